"""The same `Comm` for the processes of torchrun, over `torch.distributed`'s point-to-point calls.

Only sends and receives are used; the collectives are ours. gloo moves CPU tensors, NCCL
GPU tensors. The ranks agree by tags: a message's tag is computed from what its collective is
about (or from its size and dtype), so that messages that do not fit never meet. What has come
once round the ring has come through all ranks, and all of them were about to do the same; ranks
of one communicator that disagree wait for each other, until `Watch` sees it.
"""

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minizero.ranks.comm import CollectiveMismatch, Comm, CommTimeout, RankFailed
from minizero.ranks.watch import STUCK_SECONDS, Watch

TIMEOUT_SECONDS = 60.0
WORDS_BYTES = 256  # of one rank's words in the agreement
AHEAD_BYTES = 2**20  # of small messages that a ring may expect at once
TAGS = 0x7FFFFFFF  # gloo's tags have 31 bits
AGREEMENT = "agreement with"
Pending = tuple[str, int, Any]  # a message under way: what it does, with whom, and what to wait for


@contextlib.contextmanager
def process_comm(group: Any = None) -> Iterator[Comm]:
    """See `Comm.from_process_group`."""
    ours, comm = not dist.is_initialized(), None
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
        group = group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend_config(group)
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        # For CPU tensors, and the agreement about GPU tensors: connections of our own, since a mismatch closes them.
        store = group.get_group_store()
        number = store.add(f"communicators of rank {dist.get_rank()}", 1)  # an earlier one's addresses are old
        store, rank = dist.PrefixStore(f"communicator {number}", store), ranks.index(dist.get_rank())
        control = dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=TIMEOUT_SECONDS))
        comm = ProcessComm(rank, ranks, device, control, store, group if device.type == "cuda" else None)
        yield comm
    except BaseException as error:
        if comm is not None:
            comm.watch.blame(error.rank if isinstance(error, RankFailed) else comm.world_rank)
            comm.watch.close()  # the others are not to wait until this process ends
        raise
    finally:
        if comm is not None:
            comm.watch.stop()
        if ours and dist.is_initialized():
            dist.destroy_process_group()


class ProcessComm(Comm):
    """A rank that is a process. CPU tensors go through gloo, GPU tensors through `nccl`."""

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        device: torch.device,
        gloo: Any,
        store: Any,
        nccl: Any = None,
        name: str = "",
        parent: "ProcessComm | None" = None,
    ) -> None:
        super().__init__(rank, ranks, device, parent.timeout if parent else TIMEOUT_SECONDS, name, parent)
        self.gloo, self.store, self.nccl = gloo, store, nccl
        self.tag = 0  # of the collective under way
        self.expected: dict[int, Pending] = {}  # receives under way, by address
        self.watch: Watch = parent.watch if parent else Watch(self, gloo, store)
        self.peers = [self.watch.root.ranks.index(rank) for rank in ranks]  # gloo's numbers for the ranks

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        if self.device.type == "cuda":
            self._transfer_by_nccl(outgoing, dst, incoming, src)
            return
        tag = self._tag_of(incoming if outgoing is None else outgoing)
        # Send first: where the receiver is not ready yet, gloo's own thread does the writing, not this one.
        pending = [] if outgoing is None else [self._send(outgoing, dst, tag)]
        if incoming is not None:
            early = self.expected.pop(incoming.data_ptr(), None)
            pending.append(early or self._recv(incoming, src, tag))
        self._finish(pending)

    def _transfer_by_nccl(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self.settle()  # NCCL has no tags: data that do not fit would meet
        calls = [("send to", dist.isend, outgoing, dst), ("recv from", dist.irecv, incoming, src)]
        calls = [call for call in calls if call[2] is not None]
        both = [dist.P2POp(call, tensor, self.ranks[peer], self.nccl) for _, call, tensor, peer in calls]
        try:
            works = dist.batch_isend_irecv(both)  # NCCL must see both directions as one
        except RuntimeError as error:
            raise self._lost(calls[0][0], calls[0][3], error) from error
        self._finish([(verb, peer, work) for (verb, _, _, peer), work in zip(calls, works)])

    def expect(self, tensors: list[torch.Tensor], src: int) -> None:
        # A message that finds its receive posted is written at once: one trip of the two threads less.
        if self.device.type == "cpu" and self.size > 1:
            self.agreed = True  # when all have come
            for tensor in tensors:
                if tensor.is_contiguous():
                    self.expected[tensor.data_ptr()] = self._recv(tensor, src, self._tag_of(tensor))

    def ahead(self, tensor: torch.Tensor) -> int:
        # Small messages take as long as the processes take to wake up: less often where receives are there before.
        return max(2, AHEAD_BYTES // tensor.nbytes if self.device.type == "cpu" else 0)

    def _tag_of(self, tensor: torch.Tensor) -> int:
        return self.tag if self.operation else _hash(f"{self.name} {tensor.numel()} {tensor.dtype}")

    def say(self, words: str) -> None:
        super().say(words)
        self.tag = _hash(f"{self.name} {words}")
        self.expected.clear()

    def settle(self) -> None:
        """Hear something from every rank, unless data have come from all of them."""
        if not self.agreed:
            self._swap(list(torch.empty(self.size, 1)))
            self.agreed = True

    def exchange(self, words: str) -> list[str]:
        boards = torch.empty(self.size, WORDS_BYTES, dtype=torch.uint8)
        boards[self.rank] = _encode(words)
        self._swap(list(boards))
        return [bytes(board).rstrip(b"\0").decode() for board in boards.numpy()]

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen, name = [self.ranks[rank] for rank in ranks], f"{self.name}/{name}"
        mine = ranks.index(self.rank)
        return ProcessComm(mine, chosen, self.device, self.gloo, self.store, self.nccl, name, self)

    def _swap(self, rows: list[torch.Tensor]) -> None:
        """Fill in the other ranks' rows. All to all: one trip, and each rank sees who is missing."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        tag = _hash(f"{self.tag if self.operation else self.name} {rows[0].numel()} words")
        pending = [self._send(rows[self.rank], rank, tag, AGREEMENT) for rank in others]
        self._finish(pending + [self._recv(rows[rank], rank, tag, AGREEMENT) for rank in others])

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, verb: str = "send to") -> Pending:
        # What `dist.isend` ends in: its checks cost as much as a small message.
        try:
            return verb, dst, self.gloo.send([_real(tensor)], self.peers[dst], tag)
        except RuntimeError as error:
            raise self._lost(verb, dst, error) from error

    def _recv(self, tensor: torch.Tensor, src: int, tag: int, verb: str = "recv from") -> Pending:
        try:
            return verb, src, self.gloo.recv([_real(tensor)], self.peers[src], tag)
        except RuntimeError as error:
            raise self._lost(verb, src, error) from error

    def _finish(self, pending: list[Pending]) -> None:
        patience = timedelta(seconds=self.timeout)
        for verb, peer, work in reversed(pending):  # a receive that times out tells more than a send
            try:
                work.wait(patience)
            except RuntimeError as error:
                raise self._lost(verb, peer, error) from error

    def _lost(self, verb: str, peer: int, error: RuntimeError) -> RuntimeError:
        """Why a message did not come: what the ranks are in tells more than the one connection."""
        late = "timed out" in str(error).lower()
        culprit, absent = self.ranks[peer], ""
        if self.operation and not self.watch.told:
            words = self.watch.look(self, 0)
            missing = [self.ranks[rank] for rank in range(self.size) if words and rank not in words]
            if late and missing:
                culprit = culprit if culprit in missing else missing[0]
                absent = f"; rank {culprit} has not come"
            if not late:
                time.sleep(STUCK_SECONDS)  # the peer may have timed out: it then blames whom it has waited for
            culprit = self.watch.blame(culprit)
            self.watch.close()  # nobody is to wait for what cannot come, in whatever communicator
            if not late:
                self.watch.look(self)  # it may have been a mismatch
        if self.watch.told:
            return CollectiveMismatch(self.watch.told)
        where = f"{self.operation or 'point-to-point'}: {verb} rank {self.ranks[peer]}"
        if late:
            return CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}{absent}")
        if culprit == self.world_rank:
            return RankFailed(culprit, f"rank {culprit} came too late, or failed before: lost in {where}: {error}")
        return RankFailed(culprit, f"rank {self.world_rank} lost rank {culprit} in {where}: {error}")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _hash(words: str) -> int:
    return zlib.crc32(words.encode()) & TAGS


def _encode(words: str) -> torch.Tensor:
    raw = words.encode()
    if len(raw) > WORDS_BYTES:  # a long name is cut, but a checksum of the whole still tells two apart
        raw = raw[: WORDS_BYTES - 12].decode(errors="ignore").encode() + f" {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
