"""N ranks as threads of this process, that end together when one of them fails.

    World(4).run(train, 100)     a notebook, a laptop, one GPU

Nothing here waits for ever: each wait looks at a shared failure flag and at the clock. The first
rank that fails is reported with what the others were waiting in; they stop at their next
communication, or a second later at their next line of Python.
"""

import ctypes
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from minizero.ranks.comm import CollectiveMismatch, Comm, CommTimeout, RankFailed

POLL_SECONDS = 0.05  # between two looks at the failure flag
GRACE_SECONDS = 1.0  # that the other ranks have to stop after a failure


class World:
    """`size` ranks as threads of this process, with real sends and receives between them.

    device: "auto" puts rank r on cuda:(r mod device_count) where there is CUDA, else on the
    CPU; or any torch device, "cuda" again spreading the ranks. timeout: seconds that a rank
    waits for another. The ranks share torch's random generators and `torch.get_num_threads()`.
    """

    def __init__(self, size: int, device: str | torch.device = "auto", timeout: float = 60.0) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"World: size must be a whole number of at least 1, not {size!r}")
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"World: timeout must be a positive number of seconds, not {timeout!r}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"World: unknown device {device!r}: use 'auto', 'cpu' or 'cuda'") from error
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"World: no device {device!r} here: torch sees {torch.cuda.device_count()} GPUs")
        self.size, self.timeout = size, timeout

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list:
        """Call `fn(comm, *args, **kwargs)` on every rank; their results in rank order.

        `RankFailed` as soon as one rank fails: the others stop at their next communication.
        """
        run = _Run(self.size, self.timeout)
        results: list[Any] = [None] * self.size

        def rank_main(comm: ThreadComm) -> None:
            try:
                if comm.device.type == "cuda":
                    torch.cuda.set_device(comm.device)
                # Otherwise every rank's backward would queue up in one thread for each device.
                with torch.autograd.set_multithreading_enabled(False):
                    results[comm.rank] = fn(comm, *args, **kwargs)
            except BaseException as error:  # also SystemExit: no rank may vanish silently
                run.fail(comm.rank, error)
            finally:
                run.finish(comm.rank)

        everyone = list(range(self.size))
        run.comms = [ThreadComm(rank, everyone, self._device_of(rank), run) for rank in everyone]
        threads = [threading.Thread(target=rank_main, args=(c,), name=f"rank {c.rank}", daemon=True) for c in run.comms]
        try:
            for thread in threads:
                thread.start()
            while not run.over.wait(1.0):  # in slices, so that Ctrl-C is heard on every system
                pass
        except BaseException as error:  # Ctrl-C, or no more threads to be had
            run.fail(-1, error)
            raise
        finally:
            for thread in _alive_after(GRACE_SECONDS, threads):  # it only computes, and never looks at the flag
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
            _alive_after(GRACE_SECONDS / 4, threads)
        if run.failure is not None:
            rank, cause, report = run.failure
            raise RankFailed(rank, report) from cause
        return results

    def _device_of(self, rank: int) -> torch.device:
        if self.device.type == "cuda" and self.device.index is None:
            return torch.device("cuda", rank % torch.cuda.device_count())
        return self.device


def _alive_after(seconds: float, threads: list[threading.Thread]) -> list[threading.Thread]:
    patience = time.monotonic() + seconds
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, patience - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


class _Run:
    """What the ranks of one `World.run` share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.comms: list[ThreadComm] = []
        self.channels: dict = {}
        self.meetings: dict = {}
        self.failure: tuple[int, BaseException, str] | None = None
        self.finished: set[int] = set()
        self.over = threading.Event()
        self.lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        """The first failure counts; what follows in other ranks is its consequence."""
        with self.lock:
            if self.failure is not None:
                return
            others = "; ".join(f"rank {c.rank} {c.doing()}" for c in self.comms if c.rank != rank)
            what = "".join(traceback.format_exception_only(error)).strip()  # survives an error that cannot print itself
            # An error that is yet to be raised has no traceback: then it is this thread's wait that it is about.
            trace = "".join(traceback.format_exception(error) if error.__traceback__ else traceback.format_stack())
            report = f"rank {rank} failed: {what}\n{trace.rstrip()}\nMeanwhile {others or 'there was no other rank'}."
            self.failure = (rank, error, report)
        self.over.set()

    def finish(self, rank: int) -> None:
        with self.lock:
            self.finished.add(rank)
            if len(self.finished) == self.size:
                self.over.set()


class _Channel:
    """From one rank to another: tensors one way, acknowledgements the other."""

    def __init__(self) -> None:
        self.tensors: SimpleQueue = SimpleQueue()
        self.copied: SimpleQueue = SimpleQueue()


class _Meeting:
    """Where all ranks of a communicator leave their words and read the others'."""

    def __init__(self, size: int) -> None:
        self.words: list[str | None] = [None] * size
        self.left: list[int] = []
        self.complete = threading.Event()


class ThreadComm(Comm):
    """A rank that is a thread: a receiver copies straight out of the sender's tensor."""

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        device: torch.device,
        run: _Run,
        name: str = "",
        parent: Comm | None = None,
    ) -> None:
        super().__init__(rank, ranks, device, parent.timeout if parent else run.timeout, name, parent)
        self.run = run
        self.meeting_number = 0
        self.waiting: tuple[ThreadComm, str, Callable[[], list[int]]] | None = None

    def transfer(self, outgoing: Any, dst: Any, incoming: Any, src: Any) -> None:
        self._stop_if_failed()
        self.settle()
        if outgoing is not None:
            sending = self._channel(self.rank, dst)
            sending.tensors.put((outgoing, _record(outgoing)))
        if incoming is not None:
            receiving = self._channel(src, self.rank)
            tensor, ready = self._wait(_taker(receiving.tensors), lambda: [src], "recv from")
            if tensor.numel() != incoming.numel() or tensor.dtype != incoming.dtype:
                raise CollectiveMismatch(
                    f"rank {self.world_rank} expected {incoming.numel():,} elements of {incoming.dtype} "
                    f"from rank {self.ranks[src]}, which sent {tensor.numel():,} of {tensor.dtype}"
                )
            _await(ready, incoming)
            incoming.view(-1).copy_(tensor.view(-1))
            del tensor  # before the sender goes on: it may count on the memory being free
            receiving.copied.put((_record(incoming),))
        if outgoing is not None:
            (copied,) = self._wait(_taker(sending.copied), lambda: [dst], "send to")
            _await(copied, outgoing)

    def settle(self) -> None:
        if self.agreed:
            return
        everyone = self.exchange(self.words)
        self.agreed = True
        for rank, words in enumerate(everyone):
            if words != self.words:
                raise self.mismatch(rank, words)

    def exchange(self, words: str) -> list[str]:
        self._stop_if_failed()
        self.meeting_number += 1
        key = (self.name, *self.ranks, self.meeting_number)
        meeting = self.run.meetings.setdefault(key, _Meeting(self.size))
        meeting.words[self.rank] = words
        if None not in meeting.words:
            meeting.complete.set()

        def missing() -> list[int]:
            return [rank for rank, said in enumerate(meeting.words) if said is None]

        self._wait(meeting.complete.wait, missing, "agreement with")
        meeting.left.append(self.rank)
        if len(meeting.left) == self.size:
            self.run.meetings.pop(key, None)  # two ranks may both see that they are the last
        return meeting.words

    def subgroup(self, ranks: list[int], name: str) -> Comm:
        chosen = [self.ranks[rank] for rank in ranks]
        return ThreadComm(ranks.index(self.rank), chosen, self.device, self.run, f"{self.name}/{name}", self)

    def _channel(self, src: int, dst: int) -> _Channel:
        key = (self.name, self.ranks[src], self.ranks[dst])
        return self.run.channels.get(key) or self.run.channels.setdefault(key, _Channel())

    def _wait(self, attempt: Callable[[float], Any], peers: Callable[[], list[int]], verb: str) -> Any:
        """Repeat `attempt(seconds)` until it gives something, unless the run has failed or time is up."""
        myself = self.run.comms[self.world_rank]
        myself.waiting = (self, verb, peers)
        start = time.monotonic()
        try:
            while not (got := attempt(POLL_SECONDS)):
                gone = [rank for rank in (self.ranks[peer] for peer in peers()) if rank in self.run.finished]
                if gone and (got := attempt(0)):  # its last message came between the two looks
                    break
                self._check(gone, time.monotonic() - start, self.where(verb, peers))
        finally:
            myself.waiting = None
        return got

    def _check(self, gone: list[int], waited: float, where: str) -> None:
        """Raise where a wait can have no good end. The run fails with it, even if someone catches the error."""
        self._stop_if_failed()
        error: RuntimeError
        if gone:
            error = RuntimeError(f"rank {gone[0]} returned while rank {self.world_rank} was waiting in {where}")
        elif waited > self.timeout:
            error = CommTimeout(f"rank {self.world_rank} waited {self.timeout:g} s in {where}")
        else:
            return
        self.run.fail(gone[0] if gone else self.world_rank, error)
        raise error

    def _stop_if_failed(self) -> None:
        if self.run.failure is not None:
            raise RankFailed(self.run.failure[0], f"rank {self.world_rank} stops: {self.run.failure[2]}")

    def doing(self) -> str:
        """What this rank is in at this moment, for the report of a failure."""
        if (waiting := self.waiting) is not None:  # read once: that rank runs on while we look
            comm, verb, peers = waiting
            return f"was waiting in {comm.where(verb, peers)}"
        return "had returned" if self.rank in self.run.finished else "was computing"

    def where(self, verb: str, peers: Callable[[], list[int]]) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in peers())
        return f"{self.operation or 'point-to-point'}: {verb} rank {names or '(all came)'}"


def _taker(queue: SimpleQueue) -> Callable[[float], Any]:
    def take(seconds: float) -> Any:
        try:
            return queue.get(timeout=seconds)
        except Empty:
            return None

    return take


def _record(tensor: torch.Tensor) -> Any:
    """On a GPU: an event after which `tensor` is written. On a CPU there is nothing to wait for."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _await(event: Any, tensor: torch.Tensor) -> None:
    if event is not None:
        torch.cuda.current_stream(tensor.device).wait_event(event)
