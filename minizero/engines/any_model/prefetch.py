"""Prefetch: the next unit is gathered, and the last one's gradient reduced, while this one computes.

    prefetch = 0    gather 0 | compute 0 | gather 1 | compute 1 | gather 2 | compute 2

    prefetch = 1    gather 0 | compute 0 | compute 1 | compute 2
                               gather 1  | gather 2

Each rank has two more threads: one for all-gathers, one for reduce-scatters. Each has its own communicator,
so their messages cannot mix. On a GPU each has a stream as well. A rank learns from the last pass of the same kind
which unit comes next: the first forward and the first backward gather nothing ahead.

What is frozen in a block is a unit of its own, and comes with the block: `prefetch` counts blocks.
The price is memory: the replica of one unit more. In backward the next unit is gathered once two thirds of this unit's
gradient have arrived: by then most of its activations are free. One reduction ends before the next unit's gradient
begins. So the peak of stage 3 is its shards, the root, and three units: two replicas and a gradient.
Zhao et al., 2023, "PyTorch FSDP", sections 3.3.2 and 3.3.3.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from minizero.engines.any_model.unit import Unit
from minizero.memory.recorder import current_recorder, watched_by
from minizero.ranks.comm import Comm


class Beside:
    """Another thread, which runs one call after the other. It has its own communicator, and on a GPU its own stream."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm.split(lambda rank: 0)  # all of them once more
        self.thread = comm.transport.executor()
        self.stream = torch.cuda.Stream(comm.device) if comm.device.type == "cuda" else None

    def start(self, call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Begin `call(*args)`; what this returns waits for the result. Memory that it tags counts as the caller's."""
        recorder, stream = current_recorder(), self.stream
        if stream:
            ready, done = torch.cuda.Event(), torch.cuda.Event()
            ready.record()

        def work() -> Any:
            nonlocal args
            with watched_by(recorder), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                if stream:
                    stream.wait_event(ready)  # what the call reads is written
                result = call(*args)
                if stream:
                    done.record()
            if not stream:
                args = ()  # what it was given is free before anyone has the result
            return result

        future = self.thread.submit(work)

        def wait() -> Any:
            nonlocal args
            result = future.result()
            if stream:
                here = torch.cuda.current_stream()
                here.wait_event(done)
                args = ()  # what it was given is free for what this stream does next, and not before
                if isinstance(result, torch.Tensor) and result.is_cuda:
                    result.record_stream(here)  # or its memory might be given away before it is read
            return result

        return wait


class Ahead:
    """Stage 3 gathers and reduces while it computes. The gathers of at most `depth` blocks are under way.

    Say 0 1 2 was the last forward, without a root, and depth=1: at the gather of 0, in_turn["forward"] is [0], expected
    [1, 2], and following [1] until `start_following`.
    """

    def __init__(self, engine: Any, inside: Comm, depth: int) -> None:
        self.engine = engine
        self.depth = depth
        self.gathering: dict[Unit, Callable[[], Any]] = {}  # units under way, and how to wait for them
        self.reducing: tuple[Any, Unit, Callable[[], torch.Tensor]] | None = None  # in which backward
        self.in_turn: dict[str, list[Unit]] = {"forward": [], "backward": []}  # in this pass so far, or in the last one
        self.runs = ""  # which pass; "" between passes
        self.expected: list[Unit] = []  # the rest of this pass, if it goes like the last one
        self.following: list[Unit] = []  # what comes next, until its gather has begun
        self.gathers, self.reductions = Beside(inside), Beside(inside)

    # What the engine calls.

    def begin_pass(self, kind: str) -> None:
        """A forward or a backward begins."""
        self.runs = kind
        self.expected, self.in_turn[kind] = self.in_turn[kind], []

    def gather(self, unit: Unit) -> None:
        """Its gather ends. In forward those of the units after it begin here, in backward in `after_put`."""
        self.start_following()  # some ranks have not begun it yet, if they lack gradients: one order on all
        self.start(unit)
        self.wait_for(unit)
        self.following = self.what_follows(unit)
        # In backward gradients begin them; but a frozen unit has none, and the root only in the end.
        if not (self.engine.backward and unit.trains and unit.module is not self.engine.module):
            self.start_following()

    def before_put(self, unit: Unit) -> None:
        """One full gradient at a time, the root's aside: the last reduction ends before this gradient begins."""
        if unit.gradient.full is None:
            self.finish()

    def after_put(self, unit: Unit, owed: set[int]) -> None:
        """If two thirds of the gradient have come, the gathers of the units after it begin."""
        if 3 * sum(unit.layout.shapes[number].numel() for number in owed) <= unit.size:
            self.start_following()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Its reduction begins. The one before it ends."""
        self.finish()
        self.reducing = self.engine.backward, unit, self.reductions.start(self.engine.average, unit, gradient)

    # Its own part: what comes next, and when it begins.

    def start_following(self) -> None:
        """Let the gathers of the units begin that come next."""
        for unit in self.following:
            self.start(unit)
        self.following = []

    def start(self, unit: Unit) -> None:
        """Let the gather of a unit begin, unless it has."""
        if unit.replica_is_stale() and unit not in self.gathering:
            self.engine.make_room(unit)  # by this thread, whose ledger counts it
            self.gathering[unit] = self.gathers.start(self.engine.fill, unit)

    def wait_for(self, unit: Unit) -> None:
        """Let the gather of a unit end, if it is under way."""
        if wait := self.gathering.pop(unit, None):
            wait()

    def finish(self) -> None:
        """The reduction that is under way, if any, ends, and the shards have their average."""
        if self.reducing is not None:
            (backward, unit, wait), self.reducing = self.reducing, None
            average = wait()
            if backward is self.engine.backward:  # else that one raised
                unit.set_gradient(average)

    def what_follows(self, unit: Unit) -> list[Unit]:
        """Note this unit's turn (the first in backward begins that pass); the units after it in the last pass."""
        if self.engine.backward and self.runs != "backward":
            self.begin_pass("backward")
        if not self.runs:  # a block is called by itself
            return []
        self.in_turn[self.runs].append(unit)
        goes_on = self.expected[:1] == [unit]  # else it goes another way than last time, which is to be learned first
        coming = self.expected = self.expected[1:] if goes_on else []
        # Up to one that is whole now: whether it still is when its turn comes may differ between ranks.
        coming = list(itertools.takewhile(lambda each: each in self.gathering or each.replica_is_stale(), coming))
        modules = [unit.module, *dict.fromkeys(each.module for each in coming if each.module is not unit.module)]
        return list(itertools.takewhile(lambda each: each.module in modules[: self.depth + 1], coming))


def check_prefetch(prefetch: int) -> None:
    """`ValueError` if it is no number of units."""
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch: {prefetch!r} must be a whole number of units to gather ahead, or 0")
