"""The same `Comm` for the processes of torchrun, over `torch.distributed`'s point-to-point calls.

Only `isend` and `irecv` are used; the collectives are ours. gloo moves CPU tensors, NCCL
GPU tensors. Two things guard against gloo's silent failures: a message's tag is
computed from its size and dtype, so that messages that do not fit never meet (they time
out by name), and the words of the agreement always travel through gloo.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minizero.comm import Comm, CommTimeout, RankFailed

TIMEOUT_SECONDS = 60.0
WORDS_BYTES = 256  # of one rank's words in the agreement


@contextlib.contextmanager
def process_comm(group: Any = None) -> Iterator[Comm]:
    """See `Comm.from_process_group`."""
    ours = not dist.is_initialized()
    if ours:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"from_process_group: {', '.join(missing)} not set: start with torchrun, or use World(n).run"
            )
        # Two ranks on one GPU are the thread world's job: NCCL refuses them.
        gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    try:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        backend = dist.get_backend_config(group)
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        # The agreement is CPU tensors; a group that speaks only NCCL gets a companion.
        control = group if "gloo" in backend else dist.new_group(ranks, backend="gloo")
        yield ProcessComm(ranks.index(dist.get_rank()), ranks, device, group, control)
    finally:
        if ours:
            dist.destroy_process_group()


class ProcessComm(Comm):
    """A rank that is a process; my rank i is the group's `ranks[i]`."""

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        device: torch.device,
        group: Any,
        control: Any,
        name: str = "",
        parent: Comm | None = None,
    ) -> None:
        super().__init__(rank, len(ranks), device, TIMEOUT_SECONDS, parent)
        self.ranks, self.group, self.control, self.name = ranks, group, control, name

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self._transfer(outgoing, dst, incoming, src, self.group)

    def exchange(self, words: str) -> list[str]:
        # Each round doubles what a rank knows: it passes all of it on, 1, 2, 4, … ranks back (Bruck et al., 1997).
        boards = torch.empty(self.size, WORDS_BYTES, dtype=torch.uint8)  # row i: the words of rank (rank + i) mod N
        boards[0] = _encode(words)
        known = 1
        while known < self.size:
            count = min(known, self.size - known)
            ahead, back = (self.rank + known) % self.size, (self.rank - known) % self.size
            self._transfer(boards[:count], back, boards[known : known + count], ahead, self.control)
            known += count
        return [_decode(boards[(rank - self.rank) % self.size]) for rank in range(self.size)]

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen = [self.ranks[rank] for rank in ranks]
        return ProcessComm(
            ranks.index(self.rank), chosen, self.device, self.group, self.control, f"{self.name}/{name}", self
        )

    def _transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any, group: Any) -> None:
        operations: list[tuple[str, Any, torch.Tensor, int]] = []
        if incoming is not None:  # receives first: gloo moves data once both sides are posted
            operations.append(("recv from", dist.irecv, incoming, self.ranks[src]))
        if outgoing is not None:
            operations.append(("send to", dist.isend, outgoing, self.ranks[dst]))
        done = 0
        try:
            if any(t.is_cuda for _, _, t, _ in operations):  # NCCL must see both directions as one
                works = dist.batch_isend_irecv([dist.P2POp(call, t, p, group) for _, call, t, p in operations])
            else:
                works = [call(t, p, group, self._tag(t)) for _, call, t, p in operations]
            for done, work in enumerate(works):  # noqa: B007
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            verb, _, _, peer = operations[done]
            where = f"{self.operation or 'point-to-point'}: {verb} rank {peer}"
            if "timed out" in str(error).lower():
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s in {where}") from error
            raise RankFailed(peer, f"rank {self.rank} lost rank {peer} in {where}: {error}") from error

    def _tag(self, tensor: torch.Tensor) -> int:
        return zlib.crc32(f"{self.name} {tensor.numel()} {tensor.dtype}".encode()) & 0x7FFFFFFF


def _encode(words: str) -> torch.Tensor:
    raw = words.encode()
    if len(raw) > WORDS_BYTES:  # a long name is cut, but a checksum of the whole still tells two apart
        raw = raw[: WORDS_BYTES - 12].decode(errors="ignore").encode() + f" {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(WORDS_BYTES)), dtype=torch.uint8)


def _decode(board: torch.Tensor) -> str:
    return bytes(board.tolist()).decode().rstrip()
