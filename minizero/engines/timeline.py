"""What each rank does when: one step drawn as bars, computation above, communication below.

    with Timeline(model, optimizer) as timeline:      # on every rank
        model(x, y).backward()
        optimizer.step()
    from minizero.pictures import chrome_trace, plot_timeline

    plot_timeline(timeline.events)  # of one rank, or of several, one list after the other
    Path("step.json").write_text(chrome_trace(timeline.events))  # opens in Perfetto, ui.perfetto.dev

If a bar of communication lies under one of computation, they overlap: that is what prefetch buys.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from minizero.engines.any_model.engine import AnyModel
from minizero.engines.any_model.unit import Unit
from minizero.pictures.timeline import LANES, Event

METHODS = ("refresh", "gather", "forward_is_over", "release", "reduce", "finish")  # of a stage


@contextlib.contextmanager
def around_each_call(model: AnyModel, before: Callable[[], Any], after: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, `before()` and `after(method, unit or use)` run around each call of what a stage does."""

    def call(name: str, method: Callable[..., None], *args: Any) -> None:
        before()
        try:
            method(*args)
        finally:
            after(name, *args)

    with contextlib.ExitStack() as block:
        for name in METHODS:
            called = functools.partial(call, name, getattr(model, name))
            block.enter_context(mock.patch.object(model, name, called))
        yield


class Timeline(contextlib.ExitStack):
    """Records what this rank's engine and its optimizer do while the block runs. Times are the host's, in seconds.

    Computation is what lies between two calls of the engine: its bar ends when the engine is called next. A GPU
    computes later than the host asks it to.
    """

    def __init__(self, model: AnyModel, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()  # what it undoes at the end of the block
        self.model, self.optimizer = model, optimizer
        self.rank = model.comm.ranks[model.comm.rank]  # in the whole world
        self.events: list[Event] = []
        self.in_use: list[Unit] = []  # the innermost last
        self.computing: tuple[str, float] | None = None  # what, since when

    def __enter__(self) -> "Timeline":
        # The engine is called, so what was computed until now is over.
        self.enter_context(around_each_call(self.model, lambda: self._end("compute"), self._after))
        self.model.comm.observers.append(self._observe)
        self.callback(self.model.comm.observers.remove, self._observe)
        if self.optimizer is not None:
            begin, end = lambda *_: self._begin("optimizer step"), lambda *_: self._end("optimizer")
            self.callback(self.optimizer.register_step_pre_hook(begin).remove)
            self.callback(self.optimizer.register_step_post_hook(end).remove)
        return self

    def _after(self, method: str, about: Any = None, *_: Any) -> None:
        """The engine has done something, and computation goes on. about: a unit, or a use of one."""
        unit = getattr(about, "unit", about)
        if method == "refresh":
            self.in_use = []
        elif method == "gather":
            self.in_use.append(unit)
        elif method in ("release", "forward_is_over"):  # it may have been gathered for several uses
            self.in_use = [other for other in self.in_use if other is not unit]
        if self.in_use:
            self._begin(f"{'backward' if self.model.backward else 'forward'} {self.in_use[-1].name}")

    def _begin(self, what: str) -> None:
        self.computing = what, time.perf_counter()

    def _end(self, lane: str) -> None:
        if self.computing is not None:
            self._add(lane, *self.computing)
        self.computing = None

    def _observe(self, operation: str, label: str, began: float) -> None:
        if (lane := operation.replace("_", "-")) in LANES:
            self._add(lane, label, began)

    def _add(self, lane: str, name: str, start: float) -> None:
        self.events.append(Event(self.rank, lane, name, start, time.perf_counter()))
