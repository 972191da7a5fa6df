"""CPU offload: shards, gradients and optimizer states live in the CPU's memory, and the step runs there.

    per rank and unit      GPU                          CPU
    forward, backward      the gathered unit   <---     its FP32 shard
    backward               the mean gradient   --->     its shard, which the optimizer reads
    step                                                12 bytes a parameter and more, and the arithmetic

What stays on the GPU is the unit in use and the activations; what the optimizer's step makes and frees is temporary.
Each step copies 4Ψ/N bytes to the GPU and 4Ψ/N back, to it twice as many if backward gathers again; with `prefetch`
they travel during the computation. In FP32 forward copies 4Ψ/N bytes back, too: it may have written to parameters. On a
machine without a GPU the same code runs, and its copies are counted as `host`, which no total of the ledger contains.
Ren et al., 2021, "ZeRO-Offload"; Rajbhandari et al., 2021, "ZeRO-Infinity".
"""

import torch

from minizero.memory import tag


def to_host(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A copy in the CPU's memory; pinned if it comes from a GPU, which can then copy by itself.

    It returns when the copy is done: the CPU reads it next.
    """
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    tag(copy, "host")
    return copy.copy_(tensor)
