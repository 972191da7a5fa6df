"""The same `Comm` for the processes of torchrun, over `torch.distributed`'s point-to-point calls.

Only `isend` and `irecv` are used; the collectives are ours. gloo moves CPU tensors, NCCL
GPU tensors. Two things guard against gloo's silent failures: a message's tag is
computed from its size and dtype, so that messages that do not fit never meet (they time
out by name), and the words of the agreement always travel through gloo.
"""

import contextlib
import functools
import hashlib
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
        self.digests = torch.zeros(self.size, 1, dtype=torch.int64)
        self.digest_rows = list(self.digests)

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        # Send first: where the receiver is not ready yet, gloo's own thread does the writing, not this one.
        calls: list[Any] = [] if outgoing is None else [(dist.isend, outgoing, dst)]
        if incoming is not None:
            calls.append((dist.irecv, incoming, src))
        self._run(calls, "payload", self.group)

    def agree(self, words: str) -> bool:
        # A digest is enough to see whether all say the same.
        self.digests[self.rank] = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "big")
        self._swap(self.digest_rows)
        return len(set(self.digests.flatten().tolist())) == 1

    def exchange(self, words: str) -> list[str]:
        boards = torch.empty(self.size, WORDS_BYTES, dtype=torch.uint8)
        boards[self.rank] = _encode(words)
        self._swap(list(boards))
        return [bytes(board).rstrip(b"\0").decode() for board in boards.numpy()]

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen = [self.ranks[rank] for rank in ranks]
        return ProcessComm(
            ranks.index(self.rank), chosen, self.device, self.group, self.control, f"{self.name}/{name}", self
        )

    def _swap(self, rows: list[torch.Tensor]) -> None:
        """Fill in the other ranks' rows. All to all at once: one trip, and each rank sees who is missing."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        calls: list[Any] = [(dist.isend, rows[self.rank], rank) for rank in others]
        self._run(calls + [(dist.irecv, rows[rank], rank) for rank in others], "agreement", self.control)

    def _run(self, calls: list[Any], kind: str, group: Any) -> None:
        """Start all (isend or irecv, tensor, rank), then wait for each; `kind` keeps payload and agreement apart."""
        done = 0
        try:
            if kind == "payload" and self.device.type == "cuda":  # NCCL must see both directions as one
                works = dist.batch_isend_irecv([dist.P2POp(c, t, self.ranks[r], group) for c, t, r in calls])
            else:
                works = [c(t, self.ranks[r], group, _tag(self.name, kind, t.numel(), t.dtype)) for c, t, r in calls]
            for done in reversed(range(len(works))):  # a receive that times out tells more than a send
                works[done].wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            call, _, rank = calls[done]
            verb = "agreement with" if kind == "agreement" else "recv from" if call is dist.irecv else "send to"
            peer = self.ranks[rank]
            where = f"{self.operation or 'point-to-point'}: {verb} rank {peer}"
            if "timed out" in str(error).lower():
                raise CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}") from error
            raise RankFailed(peer, f"rank {self.world_rank} lost rank {peer} in {where}: {error}") from error


@functools.cache
def _tag(name: str, kind: str, elements: int, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{name} {kind} {elements} {dtype}".encode()) & 0x7FFFFFFF


def _encode(words: str) -> torch.Tensor:
    raw = words.encode()
    if len(raw) > WORDS_BYTES:  # a long name is cut, but a checksum of the whole still tells two apart
        raw = raw[: WORDS_BYTES - 12].decode(errors="ignore").encode() + f" {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
