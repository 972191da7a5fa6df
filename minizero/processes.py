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
    ours, companion = not dist.is_initialized(), None
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
        if dist.get_rank(group) < 0:
            raise ValueError("from_process_group: this process is not in the group")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        backend = dist.get_backend_config(group)
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        if "gloo" not in backend:  # the agreement is CPU tensors; a group that speaks only NCCL gets a companion
            companion = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        yield ProcessComm(ranks.index(dist.get_rank()), ranks, device, group, companion or group)
    finally:
        if ours:
            dist.destroy_process_group()
        elif companion is not None:
            dist.destroy_process_group(companion)


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
        super().__init__(rank, ranks, device, parent.timeout if parent else TIMEOUT_SECONDS, parent)
        self.group, self.control, self.name = group, control, name

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self._transfer([] if incoming is None else [(incoming, src)], [] if outgoing is None else [(outgoing, dst)])

    def exchange(self, words: str) -> list[str]:
        # All to all at once: one trip, and each rank sees for itself which other is missing.
        boards = torch.empty(self.size, WORDS_BYTES, dtype=torch.uint8)
        boards[self.rank] = _encode(words)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._transfer([(boards[r], r) for r in others], [(boards[self.rank], r) for r in others], words=True)
        return [bytes(board).rstrip(b"\0").decode() for board in boards.numpy()]

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen = [self.ranks[rank] for rank in ranks]
        return ProcessComm(
            ranks.index(self.rank), chosen, self.device, self.group, self.control, f"{self.name}/{name}", self
        )

    def _transfer(
        self,
        receives: list[tuple[torch.Tensor, int]],
        sends: list[tuple[torch.Tensor, int]],
        words: bool = False,
    ) -> None:
        """Move tensors, all at once. `words`: those of an agreement, which no payload may be taken for."""
        group, kind = (self.control, "words") if words else (self.group, "payload")
        # Receives first: gloo moves data once both sides are posted.
        calls: list[tuple[Any, torch.Tensor, int]] = [(dist.irecv, *receive) for receive in receives]
        calls += [(dist.isend, *send) for send in sends]
        operations = [(call, tensor, self.ranks[peer]) for call, tensor, peer in calls]
        done = 0
        try:
            if any(tensor.is_cuda for _, tensor, _ in operations):  # NCCL must see both directions as one
                works = dist.batch_isend_irecv([dist.P2POp(call, t, p, group) for call, t, p in operations])
            else:
                works = [call(t, p, group, self._tag(t, kind)) for call, t, p in operations]
            for done, work in enumerate(works):  # noqa: B007
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            call, _, peer = operations[done]
            verb = "agreement with" if words else "recv from" if call is dist.irecv else "send to"
            where = f"{self.operation or 'point-to-point'}: {verb} rank {peer}"
            if "timed out" in str(error).lower():
                raise CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}") from error
            raise RankFailed(peer, f"rank {self.world_rank} lost rank {peer} in {where}: {error}") from error

    def _tag(self, tensor: torch.Tensor, kind: str) -> int:
        return zlib.crc32(f"{self.name} {kind} {tensor.numel()} {tensor.dtype}".encode()) & 0x7FFFFFFF


def _encode(words: str) -> torch.Tensor:
    raw = words.encode()
    if len(raw) > WORDS_BYTES:  # a long name is cut, but a checksum of the whole still tells two apart
        raw = raw[: WORDS_BYTES - 12].decode(errors="ignore").encode() + f" {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
