"""What carries the tensors of a `Comm`. Outside `ranks/` only prefetch.py uses it: `executor`.

Threads, processes and one rank of many each have their own. All offer the same: `transfer` moves tensors, `exchange`
shows every rank's words to all, `settle` waits until all ranks have agreed (agreement.py).
"""

import abc
import dataclasses
import threading
import zlib
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from minizero import torch_private
from minizero.ranks.errors import CollectiveMismatch

COUNTING = threading.Lock()  # two threads of a rank may talk at once: one of them gathers ahead


@dataclasses.dataclass
class Collective:
    """The collective that a rank is in. It exists from the collective's begin to its end."""

    number: int  # the communicator's first collective is 1
    name: str  # "all_gather #17": error messages call it so
    words: str  # what this rank is about to do, in full
    tag: int = 0  # made of these words; between processes each of its messages carries it
    agreed: bool = False  # True once all ranks are known to have said the same words
    posted: dict[int, Any] = dataclasses.field(default_factory=dict)  # receives begun early, by address


class Transport(abc.ABC):
    """One rank's connections to the others.

    `ranks[r]` is the world rank of this communicator's rank r; `timeout`: seconds that one wait may last; `common`:
    what all communicators of this rank have, the last arguments of a subclass.
    """

    def __init__(
        self, rank: int, ranks: list[int], device: torch.device, timeout: float, name: str, *common: Any
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.world_rank = ranks[rank]
        self.device = device
        self.timeout = timeout
        self.common = common
        self.name = name  # which of the splits this is; "" before any split
        self.whole: Transport | None = None  # that was split
        self.sent = self.received = 0  # bytes of payload, also of what was split from this
        self.sequence = 0  # collectives begun
        self.collective: Collective | None = None  # the one under way; other threads read it

    @abc.abstractmethod
    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        """Move contiguous tensors to and from other ranks. Either direction may be None."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Return when all ranks have said the same; `CollectiveMismatch` on every rank if they have not."""

    @abc.abstractmethod
    def exchange(self, words: str) -> list[str]:
        """Every rank's words, in rank order. They do not count as payload."""

    def subgroup(self, ranks: list[int], name: str) -> "Transport":
        """The transport of these ranks, of which this rank is one."""
        mine, chosen, name = ranks.index(self.rank), [self.ranks[rank] for rank in ranks], f"{self.name}/{name}"
        part = type(self)(mine, chosen, self.device, self.timeout, name, *self.common)
        part.whole = self
        return part

    def soon(self, tensors: list[torch.Tensor], src: int) -> None:  # noqa: B027
        """Hint: the next tensors to be received from `src`, in this order.

        For rings only: what comes round a ring has passed through every rank, and so may count as
        proof that all agree.
        """

    def ring_buffers(self, tensor: torch.Tensor) -> int:
        """How many receive buffers like `tensor` a ring rotates through, at least 2."""
        return 2

    def executor(self) -> Executor:
        """What runs this rank's calls one after the other, beside its own thread."""
        return ThreadPoolExecutor(1)

    def begin(self, name: str, words: str) -> None:
        """A collective begins, in which this rank is about to do `words`."""
        self.collective = Collective(self.sequence, name, words, tag_of(f"{self.name} {words}"))

    def move(self, outgoing: Any, dst: int | None, incoming: Any, src: int | None) -> None:
        """Check and count a message of tensors, and `transfer` it. Either direction may be None."""
        for tensor, peer in ((outgoing, dst), (incoming, src)):
            if peer is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"what is sent, or received into, must be a tensor, not {type(tensor).__name__}")
            if peer is not None and not 0 <= peer < self.size:
                raise ValueError(f"rank {peer} does not exist: ranks are 0 to {self.size - 1}")
        if self.rank in (dst, src) and dst != src:
            raise ValueError(f"rank {self.rank} can reach itself only by send_recv to and from itself")
        # `transfer` needs contiguous tensors. They usually are; if not, it gets a copy.
        if outgoing is not None and (outgoing.requires_grad or not outgoing.is_contiguous() or outgoing.is_conj()):
            outgoing = outgoing.detach().contiguous().resolve_conj()
        target = incoming
        if incoming is not None and (incoming.requires_grad or not incoming.is_contiguous()):
            target = incoming.new_empty(incoming.shape)
        if dst == src == self.rank:
            if outgoing.numel() != target.numel() or outgoing.dtype != target.dtype:
                raise ValueError("send_recv to oneself needs tensors of one size and dtype")
            target.view(-1).copy_(outgoing.view(-1))
        else:
            if outgoing is not None and target is not None and _overlap(outgoing, target):
                raise ValueError("send_recv: outgoing and incoming share memory: receive into another tensor")
            self.transfer(outgoing, dst, target, src)
            self.count(0 if outgoing is None else outgoing.nbytes, 0 if target is None else target.nbytes)
        if target is not incoming:
            incoming.detach().copy_(target)

    def mismatch(self, mine: str, rank: int, theirs: str) -> CollectiveMismatch:
        """The error if this rank says `mine`, and `rank` says `theirs`."""
        return CollectiveMismatch(
            f"rank {self.world_rank} called {mine}; rank {self.ranks[rank]} called "
            f"{theirs}: did the ranks build different models, or take different branches?"
        )

    def count(self, sent: int, received: int) -> None:
        """Adds up bytes of payload. Those of a part that a split made are the whole's, too."""
        with COUNTING:
            self.sent += sent
            self.received += received
        if self.whole is not None:
            self.whole.count(sent, received)

    def where(self, verb: str, peers: str) -> str:
        """A wait, for messages: "all_gather #17: recv from rank 2"."""
        collective = self.collective  # read once: another thread may ask, while this rank goes on
        return f"{collective.name if collective else 'point-to-point'}: {verb} rank {peers}"


def tag_of(words: str) -> int:
    """A number that other words, in all likelihood, do not have."""
    return zlib.crc32(words.encode()) & 0x7FFFFFFF  # gloo's tags have 31 bits


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two contiguous tensors share bytes? PyTorch asks it so, too: a tensor without values has no address."""
    if torch_private.storage_id(a.untyped_storage()) != torch_private.storage_id(b.untyped_storage()):
        return False
    start_of_a, start_of_b = (tensor.storage_offset() * tensor.itemsize for tensor in (a, b))
    return start_of_a < start_of_b + b.nbytes and start_of_b < start_of_a + a.nbytes
