"""What a rank sees of the others: send, recv, agreement, and the errors that end a run.

A rank is one of N workers that run the same program on different data. Two
transports offer the same `Comm`:

    World(4).run(fn)                          4 threads of this process (world.py)
    with Comm.from_process_group() as comm:   one process of torchrun (processes.py)

A `send` waits for its `recv` (a rendezvous, as in MPI), so a message costs one copy and no
hidden buffer; two ranks that both send first wait for each other: `send_recv` does both at once.
"""

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


class RankFailed(RuntimeError):
    """A rank failed; `.rank` is the first that did, as far as the others can see, `__cause__` its exception."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveMismatch(RuntimeError):
    """The ranks were about to do different things; raised on every rank before any data is used."""


class CommTimeout(RuntimeError):
    """A rank waited for another longer than the timeout."""


ALONE = "tries an optimizer"  # the name of a thread that one rank has, and the others need not have


def not_alone(what: str) -> None:
    """`RuntimeError` if this thread tries an optimizer: the other ranks would never answer it."""
    if threading.current_thread().name.startswith(ALONE):
        raise RuntimeError(f"its step calls {what}")


class Comm(abc.ABC):
    """One rank's view of the others: who it is, and how it reaches them.

    `rank` (0 … size-1), `size`, `device`, `timeout` in seconds; `bytes_sent` and
    `bytes_received` count payload, that of communicators made by `split` included.
    `ranks[r]`: the number in the whole world of rank r here; messages name ranks by it.
    """

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        device: torch.device,
        timeout: float,
        name: str = "",
        parent: "Comm | None" = None,
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, len(ranks), device, timeout
        self.ranks, self.world_rank = ranks, ranks[rank]
        self.name = name  # which of the `split`s this is
        self.sent = self.received = 0  # by this communicator, in its one thread
        self.children: list[Comm] = []  # what `split` made: each may be another thread's
        # Called after each collective with its name, its label and when it began; shared with what `split` makes.
        self.observers: list[Callable[[str, str, float], None]] = [] if parent is None else parent.observers
        if parent is not None:
            parent.children.append(self)
        self.sequence = 0  # of the last collective; see `agreement`
        self.words = ""  # what this rank has said that it is about to do
        self.agreed = True  # the others are known to have said the same
        self.operation = ""  # what this rank is in, for the messages of others

    @staticmethod
    def from_process_group(group: Any = None) -> contextlib.AbstractContextManager["Comm"]:
        """This process as one rank of `torch.distributed`: gloo on CPUs, NCCL on GPUs.

        A context manager: sets up a process group from torchrun's variables if there is
        none, and destroys only what it made. `ValueError` outside torchrun.
        """
        from minizero.ranks.processes import process_comm

        return process_comm(group)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`; returns when it has been received."""
        self._move(tensor, dst, None, None)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill `tensor` with what rank `src` sends (same number of elements, same dtype)."""
        self._move(None, None, tensor, src)

    def send_recv(self, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
        """Send `outgoing` to `dst` and fill `incoming` from `src` at the same time."""
        self._move(outgoing, dst, incoming, src)

    def split(self, color: int) -> "Comm":
        """A communicator of the ranks that gave the same color, in the order of their ranks. Collective."""
        with agreement(self, "split"):
            self.settle()
            colors = self.exchange(f"{color}")
        mine = [rank for rank, other in enumerate(colors) if other == colors[self.rank]]
        return self.subgroup(mine, name=f"{self.sequence}:{color}")

    def _move(
        self, outgoing: torch.Tensor | None, dst: int | None, incoming: torch.Tensor | None, src: int | None
    ) -> None:
        not_alone("send or recv")
        for tensor, peer in ((outgoing, dst), (incoming, src)):
            if peer is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"what is sent, or received into, must be a tensor, not {type(tensor).__name__}")
            if peer is not None and not 0 <= peer < self.size:
                raise ValueError(f"rank {peer} does not exist: ranks are 0 to {self.size - 1}")
        if self.rank in (dst, src) and dst != src:
            raise ValueError(f"rank {self.rank} can reach itself only by send_recv to and from itself")
        # What a transport is given is contiguous; usually it is so already.
        if outgoing is not None and (outgoing.requires_grad or not outgoing.is_contiguous() or outgoing.is_conj()):
            outgoing = outgoing.detach().contiguous().resolve_conj()
        target = incoming
        if incoming is not None and (incoming.requires_grad or not incoming.is_contiguous()):
            target = incoming.new_empty(incoming.shape)
        if dst == src == self.rank:
            _copy_to_oneself(outgoing, target)
        else:
            if outgoing is not None and target is not None and _overlap(outgoing, target):
                raise ValueError("send_recv: outgoing and incoming share memory: receive into another tensor")
            self.transfer(outgoing, dst, target, src)
            self.sent += 0 if outgoing is None else outgoing.nbytes
            self.received += 0 if target is None else target.nbytes
        if target is not incoming:
            incoming.detach().copy_(target)  # type: ignore[union-attr, arg-type]

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent, through what `split` made too."""
        return self.sent + sum(child.bytes_sent for child in self.children)

    @property
    def bytes_received(self) -> int:
        """Payload that this rank has received, through what `split` made too."""
        return self.received + sum(child.bytes_received for child in self.children)

    # What a transport has to offer.

    @abc.abstractmethod
    def settle(self) -> None:
        """Returns when all ranks have said the same; `CollectiveMismatch` on every rank if they do not."""

    @abc.abstractmethod
    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        """Move contiguous tensors; either direction may be None."""

    def expect(self, tensors: list[torch.Tensor], src: int) -> None:  # noqa: B027
        """A ring will fill these from `src` next, in this order: a transport may begin at once.

        Only for a ring: a transport may take what comes round through all ranks for their agreement.
        """

    def ahead(self, tensor: torch.Tensor) -> int:
        """How many buffers like `tensor` a ring takes turns with, at least 2: one goes out while another is filled."""
        return 2

    def say(self, words: str) -> None:
        """What this rank is about to do."""
        self.words, self.agreed = words, False

    def mismatch(self, rank: int, words: str) -> CollectiveMismatch:
        """The error where `rank` says other words than this one."""
        return CollectiveMismatch(
            f"rank {self.world_rank} called {self.words}; rank {self.ranks[rank]} called "
            f"{words}: did the ranks build different models, or take different branches?"
        )

    @abc.abstractmethod
    def exchange(self, words: str) -> list[str]:
        """Every rank's words, in rank order. Not counted as payload."""

    @abc.abstractmethod
    def subgroup(self, ranks: list[int], name: str) -> "Comm":
        """The communicator of these ranks of mine."""


@contextlib.contextmanager
def agreement(comm: Comm, operation: str, tensor: torch.Tensor | None = None, **details: object) -> Iterator[None]:
    """All ranks say what they are about to do; `CollectiveMismatch` on each of them if they differ.

    Without it, ranks that disagree hang, abort, or take each other's bytes for something else. Threads compare
    what they say before data move; processes make a tag of it, so that messages that do not fit never meet.
    """
    not_alone(operation)
    comm.sequence += 1
    comm.operation, began = f"{operation} #{comm.sequence}", time.perf_counter()
    what = "" if tensor is None else f" of {tensor.numel():,} elements {tuple(tensor.shape)} of {tensor.dtype}"
    extras = "".join(f", {key}={value}" for key, value in details.items() if value != "")
    try:
        comm.say(f"{comm.operation}{what}{extras}")
        yield
        comm.settle()  # unless a transfer has done so
    finally:
        comm.operation, comm.words, comm.agreed = "", "", True
        for observe in comm.observers:
            observe(operation, str(details.get("label", "")), began)


def _copy_to_oneself(outgoing: Any, target: Any) -> None:
    if outgoing.numel() != target.numel() or outgoing.dtype != target.dtype:
        raise ValueError("send_recv to oneself needs tensors of one size and dtype")
    target.view(-1).copy_(outgoing.view(-1))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
