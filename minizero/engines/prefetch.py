"""Prefetch: the next unit is gathered, and the last one's gradient reduced, while this one computes.

    prefetch = 0    gather 0 | compute 0 | gather 1 | compute 1 | gather 2 | compute 2

    prefetch = 1    gather 0 | compute 0 | compute 1 | compute 2
                               gather 1  | gather 2

Two lanes beside the rank's own thread, each with a communicator of its own, so that no message of one is taken for
another's: all-gathers and reduce-scatters. On a GPU each lane is a stream as well. Which unit comes next the engine
learns from the pass before: the first forward and the first backward gather nothing ahead.

The price is memory: the replica of one unit more. In backward it is gathered when two thirds of this unit's gradient
are there, so that it takes the place of activations that are gone; and one reduction has to end before the next
unit's gradient begins. So stage 3 still peaks at three units beside its shards: two replicas and a gradient.
Zhao et al., 2023, "PyTorch FSDP", sections 3.3.2 and 3.3.3.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from minizero.engines.partition import Unit
from minizero.engines.zero3 import Zero3
from minizero.memory.ledger import current_ledger, watched_by
from minizero.ranks.comm import Comm


class Lane:
    """A thread that runs one call after the other, on a GPU in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Begin `call(*args)`; what this returns waits for the result. Memory that it tags counts as the caller's."""
        ledger = current_ledger()
        if self.stream is None:

            def work() -> Any:
                nonlocal args
                with watched_by(ledger):
                    result = call(*args)
                args = ()  # what it was given is free before anyone has the result
                return result

            return self.thread.submit(work).result

        ready, done, stream = torch.cuda.Event(), torch.cuda.Event(), self.stream
        ready.record()

        def work_in_stream() -> Any:
            with watched_by(ledger), torch.cuda.stream(stream):
                stream.wait_event(ready)  # what the call reads is written
                result = call(*args)
                done.record()
                return result  # its arguments live on until the stream is waited for

        future = self.thread.submit(work_in_stream)

        def wait() -> Any:
            result = future.result()
            here = torch.cuda.current_stream()
            here.wait_event(done)
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(here)  # or its memory might be given away before it is read
            return result

        return wait


class Prefetch(Zero3):
    """What `Zero3(module, comm, prefetch=n)` makes where n is not 0: at most n gathers are under way."""

    def __init__(self, module: nn.Module, comm: Comm, *, prefetch: int = 1, **options: Any) -> None:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch: {prefetch!r} must be a whole number of units to gather ahead, or 0")
        self.prefetch = prefetch
        self.gathering: dict[Unit, Callable[[], Any]] = {}  # units under way, and how to wait for them
        self.reducing: tuple[Unit, Callable[[], torch.Tensor]] | None = None
        # Say 0 1 2 was the last forward: at the gather of 0, in_turn is [0], and following (prefetch=1) [1].
        self.in_turn: dict[bool, list[Unit]] = {False: [], True: []}  # as the last forward, and backward, used them
        self.expected: list[Unit] = []  # this pass, if it goes like the last one
        self.is_backward = False  # this pass
        self.following: list[Unit] = []  # what comes next, until its gather has begun
        super().__init__(module, comm, **options)
        self.gathers, self.reductions = Lane(comm.device), Lane(comm.device)
        gather_comm = self.units[0].comm.split(0)
        self.reduce_comm = gather_comm.split(0)
        for unit in self.units:
            unit.comm = gather_comm

    def gather(self, unit: Unit) -> None:
        self.start(unit)
        self.wait_for(unit)
        unit.point_parameters_at(unit.flat)
        self.following = self.what_follows(unit)
        # In backward `deposit` begins them; but a frozen unit deposits nothing, and the root only in the end.
        if not (self.in_backward and unit.trains and unit.module is not None):
            self.start_following()

    def deposit(self, unit: Unit, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if unit.gradient is None:
            self.finish()  # one full gradient at a time
        super().deposit(unit, parameter, gradient)
        if 3 * unit.missing() <= unit.size:
            self.start_following()

    def start_following(self) -> None:
        """Let the gathers of the units begin that come next."""
        for unit in self.following:
            self.start(unit)
        self.following = []

    def start(self, unit: Unit) -> None:
        """Let the gather of a unit begin, unless it has."""
        if not self.has_replica(unit):
            self.make_room(unit)  # by this thread, whose ledger counts it
            self.gathering[unit] = self.gathers.start(self.fill, unit)

    def wait_for(self, unit: Unit) -> None:
        """Let the gather of a unit end, if it is under way."""
        if wait := self.gathering.pop(unit, None):
            wait()

    def what_follows(self, unit: Unit) -> list[Unit]:
        """The units that came after this one in the last pass."""
        if self.in_backward and not self.is_backward:
            self.begin_pass(is_backward=True)
        turns = self.in_turn[self.is_backward]
        turns.append(unit)
        if self.expected[len(turns) - 1 : len(turns)] != [unit]:
            self.expected = []  # another way than last time: learn it first
        return self.expected[len(turns) : len(turns) + self.prefetch]

    def begin_pass(self, is_backward: bool) -> None:
        """A forward or a backward begins."""
        self.is_backward = is_backward
        self.expected, self.in_turn[is_backward] = self.in_turn[is_backward], []

    def before_forward(self) -> None:
        if self.reducing is not None and not self.in_backward:  # a backward broke off: its gradient counts no more
            (_, wait), self.reducing = self.reducing, None
            wait()
        self.begin_pass(is_backward=False)

    def release(self, unit: Unit) -> None:
        self.wait_for(unit)  # which writes to the memory that is given back here
        super().release(unit)

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        self.finish()
        self.reducing = unit, self.reductions.start(self.average, unit, gradient, self.reduce_comm)

    def finish(self) -> None:
        if self.reducing is not None:
            (unit, wait), self.reducing = self.reducing, None
            unit.set_gradient(wait())
