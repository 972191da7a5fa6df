"""The transport of threads: a receiver copies straight out of the sender's tensor.

A send puts the tensor itself into a queue, and waits until the receiver says that it has copied
it. Before a collective's first tensor all ranks meet, and compare what they are about to do.

Nothing here waits for ever: each wait looks, every POLL_SECONDS, at the clock and at what `Run` knows of the others.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from minizero.ranks.errors import CollectiveMismatch, CommTimeout, RankFailed
from minizero.ranks.transport import Transport

POLL_SECONDS = 0.05  # between two looks at the failure flag


class Run:
    """What the ranks of one `World.run` share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.transports: list[ThreadTransport] = []  # of the whole world, by rank
        self.queues: dict[tuple, SimpleQueue] = {}
        self.failure: tuple[int, BaseException, str] | None = None  # the first rank that failed, its error, a report
        self.finished: set[int] = set()  # ranks that have returned or raised
        self.over = threading.Event()
        self.lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        """Note that `rank` failed. Only the first failure counts: later ones are its consequences."""
        with self.lock:
            if self.failure is not None:
                return
            others = "; ".join(f"rank {t.rank} {t.doing()}" for t in self.transports if t.rank != rank)
            what = "".join(traceback.format_exception_only(error)).strip()  # survives an error that cannot print itself
            # An error that nobody has raised yet has no traceback. Then it is about this thread's own wait.
            trace = "".join(traceback.format_exception(error) if error.__traceback__ else traceback.format_stack())
            report = f"rank {rank} failed: {what}\n{trace.rstrip()}\nMeanwhile {others or 'there was no other rank'}."
            self.failure = (rank, error, report)
        self.over.set()

    def finish(self, rank: int) -> None:
        """Note that `rank` has returned or raised."""
        with self.lock:
            self.finished.add(rank)
            if len(self.finished) == self.size:
                self.over.set()


class ThreadTransport(Transport):
    """The connections of a rank that is a thread."""

    def __init__(self, rank: int, ranks: list[int], device: torch.device, timeout: float, name: str, run: Run) -> None:
        super().__init__(rank, ranks, device, timeout, name, run)
        self.run = run
        self.waiting: Callable[[], str] | None = None  # tells, for reports, what this rank waits in, and for whom

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self._stop_if_failed()
        self.settle()
        # First the own tensor goes out, without waiting, so that two ranks can do this at the same time.
        if outgoing is not None:
            self._queue("tensors", self.rank, dst).put((outgoing, _record(outgoing)))
        if incoming is not None:
            tensor, ready = self._wait(self._queue("tensors", src, self.rank), lambda: [src], "recv from")
            if tensor.numel() != incoming.numel() or tensor.dtype != incoming.dtype:
                raise CollectiveMismatch(
                    f"rank {self.world_rank} expected {incoming.numel():,} elements of {incoming.dtype} "
                    f"from rank {self.ranks[src]}, which sent {tensor.numel():,} of {tensor.dtype}"
                )
            _await(ready, incoming)
            incoming.view(-1).copy_(tensor.view(-1))
            del tensor  # before the sender goes on: it may count on the memory being free
            self._queue("copied", self.rank, src).put((_record(incoming),))
        # The sender may change its tensor only after the receiver has copied it.
        if outgoing is not None:
            (copied,) = self._wait(self._queue("copied", dst, self.rank), lambda: [dst], "send to")
            _await(copied, outgoing)

    def settle(self) -> None:
        collective = self.collective
        if collective is None or collective.agreed:
            return
        everyone = self.exchange(collective.words)
        collective.agreed = True
        for rank, words in enumerate(everyone):
            if words != collective.words:
                raise self.mismatch(collective.words, rank, words)

    def exchange(self, words: str) -> list[str]:
        self._stop_if_failed()
        for rank in range(self.size):
            self._queue("words", self.rank, rank).put((words,))
        queues = [self._queue("words", rank, self.rank) for rank in range(self.size)]
        everyone: list[str] = []

        def missing() -> list[int]:
            return [rank for rank in range(len(everyone), self.size) if queues[rank].empty()]

        for queue in queues:
            everyone += self._wait(queue, missing, "agreement with")
        return everyone

    def _queue(self, what: str, src: int, dst: int) -> SimpleQueue:
        """From one rank to another: its "tensors", the word that it has "copied" one of the other's, or its "words"."""
        key = (what, self.name, self.ranks[src], self.ranks[dst])
        return self.run.queues.get(key) or self.run.queues.setdefault(key, SimpleQueue())

    def _wait(self, queue: SimpleQueue, peers: Callable[[], list[int]], verb: str) -> Any:
        """What comes out of the queue, unless the run has failed or time is up."""
        if not queue.empty():  # often so, and nobody else takes from it
            return queue.get()

        def where() -> str:
            return self.where(verb, ", ".join(str(self.ranks[rank]) for rank in peers()) or "(all came)")

        myself = self.run.transports[self.world_rank]
        myself.waiting = where
        start = time.monotonic()
        try:
            while True:
                with contextlib.suppress(Empty):
                    return queue.get(timeout=POLL_SECONDS)
                gone = [rank for rank in (self.ranks[peer] for peer in peers()) if rank in self.run.finished]
                if not gone or queue.empty():  # else its last message came between the two looks
                    self._check(gone, time.monotonic() - start, where)
        finally:
            myself.waiting = None

    def _check(self, gone: list[int], waited: float, where: Callable[[], str]) -> None:
        """Raise if a wait can have no good end. The run then fails, even if the program catches the error."""
        self._stop_if_failed()
        error: RuntimeError
        if gone:
            error = RuntimeError(f"rank {gone[0]} returned while rank {self.world_rank} was waiting in {where()}")
        elif waited > self.timeout:
            error = CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where()}")
        else:
            return
        self.run.fail(gone[0] if gone else self.world_rank, error)
        raise error

    def _stop_if_failed(self) -> None:
        if self.run.failure is not None:
            raise RankFailed(self.run.failure[0], f"rank {self.world_rank} stops: {self.run.failure[2]}")

    def doing(self) -> str:
        """What this rank is in at this moment, for the report of a failure."""
        if (waiting := self.waiting) is not None:  # read once: this rank goes on while another one asks
            return f"was waiting in {waiting()}"
        return "had returned" if self.rank in self.run.finished else "was computing"


def _record(tensor: torch.Tensor) -> Any:
    """On a GPU: an event after which `tensor` is written. On a CPU there is nothing to wait for."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _await(event: Any, tensor: torch.Tensor) -> None:
    """Let what is done with `tensor` from now on wait for `event`."""
    if event is not None:
        torch.cuda.current_stream(tensor.device).wait_event(event)
