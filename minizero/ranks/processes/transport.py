"""The transport of processes, as torchrun starts them: `torch.distributed`'s sends and receives.

Nothing else of `torch.distributed` is used; the collectives are ours. gloo moves CPU tensors, NCCL
GPU tensors. The ranks agree by tags. A message in a collective carries a tag computed from the
collective's words (agreement.py); any other message, one computed from its size and dtype. Messages
with different tags never meet. A tensor that came round the ring has passed through every rank, and
all of them used the same tag: so it proves that all agree. Ranks that disagree wait for each other,
until a `Watch` sees it (watch.py).
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minizero.ranks.errors import CollectiveMismatch, CommTimeout, RankFailed
from minizero.ranks.processes.watch import STUCK_SECONDS, Watch
from minizero.ranks.transport import Transport, tag_of

AHEAD_BYTES = 2**20  # of small messages that a ring may expect at once
AGREEMENT = "agreement with"
Pending = tuple[str, int, Any]  # a message under way: what it does, with whom, and what to wait for


class ProcessTransport(Transport):
    """The connections of a rank that is a process. CPU tensors go through `gloo`, GPU tensors through `nccl`."""

    def __init__(
        self, rank: int, ranks: list[int], device: torch.device, timeout: float, name: str, nccl: Any, watch: Watch
    ) -> None:
        super().__init__(rank, ranks, device, timeout, name, nccl, watch)
        self.gloo, self.nccl, self.watch = watch.gloo, nccl, watch
        self.peers = [watch.ranks.index(world_rank) for world_rank in ranks]  # gloo's numbers for the ranks
        watch.transports.append(self)

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        if self.device.type == "cuda":
            self._transfer_by_nccl(outgoing, dst, incoming, src)
            return
        one = incoming if outgoing is None else outgoing
        tag = self.collective.tag if self.collective else tag_of(f"{self.name} {one.numel()} {one.dtype}")
        # Send first: if the receiver is not ready yet, gloo's own thread does the writing, not this one.
        pending = [] if outgoing is None else [self._post("send to", self.gloo.send, outgoing, dst, tag)]
        if incoming is not None:
            early = self.collective.posted.pop(incoming.data_ptr(), None) if self.collective else None
            pending.append(early or self._post("recv from", self.gloo.recv, incoming, src, tag))
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

    def soon(self, tensors: list[torch.Tensor], src: int) -> None:
        # A message that finds its receive posted is written at once: gloo's two threads need one trip less.
        if self.collective is None or self.device.type != "cpu" or self.size == 1:
            return
        self.collective.agreed = True  # once all of these have come, every rank has been heard from
        for tensor in tensors:
            if tensor.is_contiguous():
                early = self._post("recv from", self.gloo.recv, tensor, src, self.collective.tag)
                self.collective.posted[tensor.data_ptr()] = early

    def ring_buffers(self, tensor: torch.Tensor) -> int:
        # A small message takes as long as the processes take to wake up: they wake less often if receives are posted.
        return max(2, AHEAD_BYTES // tensor.nbytes if self.device.type == "cpu" else 0)

    def settle(self) -> None:
        """Wait until every rank has been heard from; data that came round the ring count."""
        if self.collective is not None and not self.collective.agreed:
            self._swap(list(torch.empty(self.size, 1)))
            self.collective.agreed = True

    def exchange(self, words: str) -> list[str]:
        mine = torch.tensor(list(words.encode()), dtype=torch.uint8)
        lengths = torch.full((self.size, 1), len(mine))
        self._swap(list(lengths))
        everyones = [mine if rank == self.rank else mine.new_empty(int(lengths[rank])) for rank in range(self.size)]
        self._swap(everyones)
        return [bytes(letters.tolist()).decode() for letters in everyones]

    def _swap(self, rows: list[torch.Tensor]) -> None:
        """Fill in the other ranks' rows. All send to all: in one trip, and each rank sees who is missing."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        tag = tag_of(f"{self.collective.tag if self.collective else self.name} {rows[0].numel()} {rows[0].dtype} words")
        pending = [self._post(AGREEMENT, self.gloo.send, rows[self.rank], rank, tag) for rank in others]
        self._finish(pending + [self._post(AGREEMENT, self.gloo.recv, rows[rank], rank, tag) for rank in others])

    def _post(self, verb: str, call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Begin a message. `dist.isend` ends in the same call of gloo, but its checks cost as much as a small one."""
        if self.watch.over.is_set():
            raise RuntimeError(f"rank {self.world_rank}: {verb} rank {peer} over a communicator that is closed")
        try:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            return verb, peer, call([real], self.peers[peer], tag)
        except RuntimeError as error:
            raise self._lost(verb, peer, error) from error

    def _finish(self, pending: list[Pending]) -> None:
        patience = timedelta(seconds=self.timeout)
        for verb, peer, work in reversed(pending):  # a receive that times out tells more than a send
            try:
                work.wait(patience)
            except RuntimeError as error:
                raise self._lost(verb, peer, error) from error

    def _lost(self, verb: str, peer: int, error: RuntimeError) -> RuntimeError:
        """Why a message did not come. What all ranks are in tells more than this one connection.

        This rank has waited too long: if some ranks have not come to this collective, it names one. Or a connection is
        closed: a rank failed, or it closed its connections so that no rank waits for ever.
        """
        culprit, where, absent = self.ranks[peer], self.where(verb, f"{self.ranks[peer]}"), ""
        timed_out = "timed out" in str(error).lower()
        if self.collective and not self.watch.told:
            here = self.watch.look(self, 0)  # publishes what this rank is in, for those who look for a mismatch
            missing = [self.ranks[rank] for rank in range(self.size) if here and rank not in here]
            if timed_out and missing:
                culprit = culprit if culprit in missing else missing[0]
                absent = f"; rank {culprit} has not come"
            elif not timed_out:
                time.sleep(STUCK_SECONDS)  # the peer may have timed out: it then blames whom it has waited for
            culprit = self.watch.blame(culprit)
            self.watch.close()  # nobody is to wait for what cannot come, in whatever communicator
            if not timed_out:
                self.watch.look(self)  # it may have been a mismatch
        if self.watch.told:  # if the ranks disagree, all else follows from that
            return CollectiveMismatch(self.watch.told)
        if timed_out:
            return CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}{absent}")
        if culprit == self.world_rank:
            return RankFailed(culprit, f"rank {culprit} came too late, or failed before: lost in {where}: {error}")
        return RankFailed(culprit, f"rank {self.world_rank} lost rank {culprit} in {where}: {error}")
