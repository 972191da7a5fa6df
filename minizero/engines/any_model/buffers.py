"""Buffers belong to no unit: each rank holds them all. They start as rank 0's, and are made so again.

Forward may write to a buffer: the statistics of a batch norm, a codebook, a queue. Each rank writes what its own part
of the batch gives, so the ranks would drift apart. PyTorch's DDP gives all ranks rank 0's buffers as a forward begins.
Here they come as a backward ends that has averaged gradients: all ranks are in it, so none waits alone, and one of them
may evaluate by itself afterwards. A backward under no_sync sends none.

    sent per backward   by rank 0 at most B log2 N bytes, by others less; B: the bytes of all buffers, and one for each
"""

import torch
from torch import nn

from minizero import torch_private
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm


class Buffers:
    """Those that the module has when it is wrapped. One whose shape or dtype changes later is each rank's own.

    Two parts may hold one tensor, and each may replace it, on some ranks: it is sent under both names.
    (A rank where it still is one tensor has the second value in both, if rank 0 has two.)
    """

    def __init__(self, module: nn.Module, comm: Comm) -> None:
        start_buffers(module, comm)
        self.module, self.comm = module, comm
        self.kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in by_place(module).items()}

    def become_rank_0s(self) -> None:
        """Collective. Whatever has become of a rank's buffers, all ranks bring the same number of bytes."""
        if not self.kinds:
            return
        device, here = self.comm.device, {}
        for name, buffer in by_place(self.module).items():
            if self.kinds.get(name) == (buffer.shape, buffer.dtype) and not buffer.is_inference():
                here[name] = buffer.detach()
        parts = [torch.tensor([name in here for name in self.kinds], dtype=torch.uint8, device=device)]
        for name, (shape, dtype) in self.kinds.items():
            value = here[name] if name in here else torch.zeros(shape, dtype=dtype)
            parts.append(value.to(device).contiguous().view(-1).view(torch.uint8))
        valid, *values = broadcast(torch.cat(parts), self.comm, label="buffers").split([len(part) for part in parts])
        for name, on_rank_0, value in zip(self.kinds, valid.bool(), values, strict=True):
            if name in here:
                new = value.clone().view(here[name].dtype).view(here[name].shape)
                write(here[name], torch.where(on_rank_0, new, here[name].to(device)))


def by_place(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of each part, by name; one that two parts hold has two names."""
    parts = module.named_modules()
    return {f"{path}.{name}": buffer for path, part in parts for name, buffer in part.named_buffers(recurse=False)}


def start_buffers(module: nn.Module, comm: Comm) -> None:
    """Move the buffers to the ranks' device, and give them rank 0's values. Those that share memory go on sharing."""
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # old, which keeps its number, and new
    for name, buffer in module.named_buffers():
        if buffer.device != comm.device or buffer.is_inference():  # which may not be written in place
            old = buffer.untyped_storage()
            if (key := torch_private.storage_id(old)) not in moved:
                memory = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(old)
                moved[key] = old, memory.to(comm.device).untyped_storage()
            place = buffer.storage_offset(), buffer.shape, buffer.stride()
            buffer.data = torch.empty(0, dtype=buffer.dtype, device=comm.device).set_(moved[key][1], *place)
        write(buffer, broadcast(buffer.data, comm, label=name))


def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write to a buffer. Nothing counts it: a graph that has saved the buffer may be gone through again."""
    # One number behind many places, as `expand` makes them, is written once.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())
    buffer.data[once].copy_(value[once])
