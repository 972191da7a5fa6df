"""The same `Comm` for the processes of torchrun, over `torch.distributed`'s point-to-point calls.

Only `isend` and `irecv` are used; the collectives are ours. gloo moves CPU tensors, NCCL
GPU tensors. gloo's silent failures are kept out by tags: a message's tag is computed from
what its collective is about (or from its size and dtype), so that messages that do not fit
never meet. The words of the agreement always travel through gloo, beside the first data.
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
from torch.distributed.rendezvous import rendezvous

from minizero.comm import Comm, CommTimeout, RankFailed

TIMEOUT_SECONDS = 60.0
WORDS_BYTES = 256  # of one rank's words in the agreement
TAGS = 0x7FFFFFFF  # gloo's tags have 31 bits


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
        # torchrun keeps one store for all its attempts, where a restarted rank would find a dead one's address.
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
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
        self.digest = 0
        self.digests = torch.zeros(self.size, 1, dtype=torch.int64)
        self.digest_rows = list(self.digests)
        self.asked: list[Any] = []  # the agreement's messages under way
        self.expected: dict[int, list[Any]] = {}  # receives under way, by address

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        if self.device.type == "cuda":  # NCCL has no tags: data that do not fit would meet
            self.settle()
        early = [] if incoming is None else self.expected.pop(incoming.data_ptr(), [])
        # Send first: where the receiver is not ready yet, gloo's own thread does the writing, not this one.
        calls: list[Any] = [] if outgoing is None else [(dist.isend, outgoing, dst)]
        if incoming is not None and not early:
            calls.append((dist.irecv, incoming, src))
        pending = self._start(calls, self._payload_tag(calls), self.group)
        self.settle()
        self._finish(pending + early)

    def expect(self, tensors: list[torch.Tensor], src: int) -> None:
        # A message that finds its receive posted is written at once: one trip of the two threads less.
        if self.device.type == "cpu":
            for tensor in tensors:
                if tensor.is_contiguous():
                    calls = [(dist.irecv, tensor, src)]
                    self.expected[tensor.data_ptr()] = self._start(calls, self._payload_tag(calls), self.group)

    def _payload_tag(self, calls: list[Any]) -> int:
        """Data of ranks that disagree never meet: nobody has to wait for the agreement before sending."""
        if self.operation:
            return self.digest & TAGS
        return _tag(self.name, calls[0][1].numel(), calls[0][1].dtype) if calls else 0

    def say(self, words: str) -> None:
        super().say(words)
        self.expected.clear()
        # A digest is enough to see whether all say the same.
        self.digest = int.from_bytes(hashlib.blake2b(f"{self.name} {words}".encode(), digest_size=7).digest(), "big")
        self.digests[self.rank] = self.digest
        self.asked = self._swap(self.digest_rows)

    def all_say_the_same(self) -> bool:
        self._finish(self.asked, "agreement with")
        return len(set(self.digests.flatten().tolist())) == 1

    def exchange(self, words: str) -> list[str]:
        boards = torch.empty(self.size, WORDS_BYTES, dtype=torch.uint8)
        boards[self.rank] = _encode(words)
        self._finish(self._swap(list(boards)), "agreement with")
        return [bytes(board).rstrip(b"\0").decode() for board in boards.numpy()]

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen = [self.ranks[rank] for rank in ranks]
        return ProcessComm(
            ranks.index(self.rank), chosen, self.device, self.group, self.control, f"{self.name}/{name}", self
        )

    def _swap(self, rows: list[torch.Tensor]) -> list[Any]:
        """Start to fill in the other ranks' rows. All to all: one trip, and each rank sees who is missing."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        calls: list[Any] = [(dist.isend, rows[self.rank], rank) for rank in others]
        calls += [(dist.irecv, rows[rank], rank) for rank in others]
        return self._start(calls, _tag(f"{self.name} agreement", rows[0].numel(), rows[0].dtype), self.control)

    def _start(self, calls: list[Any], tag: int, group: Any) -> list[Any]:
        """Start all (isend or irecv, tensor, rank); returns each with what to wait for."""
        try:
            if calls and calls[0][1].is_cuda:  # NCCL must see both directions as one
                works = dist.batch_isend_irecv([dist.P2POp(c, t, self.ranks[r], group) for c, t, r in calls])
            else:
                works = [c(t, self.ranks[r], group, tag) for c, t, r in calls]
        except RuntimeError as error:
            raise self._lost(calls[0], "", error) from error
        return list(zip(calls, works))

    def _finish(self, pending: list[Any], verb: str = "") -> None:
        for call, work in reversed(pending):  # a receive that times out tells more than a send
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise self._lost(call, verb, error) from error

    def _lost(self, call: Any, verb: str, error: RuntimeError) -> RuntimeError:
        verb = verb or ("recv from" if call[0] is dist.irecv else "send to")
        peer = self.ranks[call[2]]
        where = f"{self.operation or 'point-to-point'}: {verb} rank {peer}"
        if "timed out" in str(error).lower():
            return CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}")
        return RankFailed(peer, f"rank {self.world_rank} lost rank {peer} in {where}: {error}")


@functools.cache
def _tag(name: str, elements: int, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{name} {elements} {dtype}".encode()) & TAGS


def _encode(words: str) -> torch.Tensor:
    raw = words.encode()
    if len(raw) > WORDS_BYTES:  # a long name is cut, but a checksum of the whole still tells two apart
        raw = raw[: WORDS_BYTES - 12].decode(errors="ignore").encode() + f" {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
