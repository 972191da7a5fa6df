"""What each rank does when: one step drawn as bars, computation above, communication beside it.

    with Timeline(model, optimizer) as timeline:      # on every rank
        model(x, y).backward()
        optimizer.step()
    from minizero.pictures import plot_timeline, save_chrome_trace

    plot_timeline(timeline.events)                    # of one rank, or of several, one list after the other
    save_chrome_trace(timeline.events, "step.json")   # opens in Perfetto, ui.perfetto.dev

If a bar of communication lies under one of computation, they overlap: that is what prefetch buys.
"""

import contextlib
import time
from typing import Any

import torch

from minizero.engines.engine import Engine
from minizero.engines.unit import Unit
from minizero.pictures.timeline import LANES, Event


class Timeline:
    """Records what this rank's engine and its optimizer do while the block runs. Times are the host's, in seconds.

    Computation is what lies between two calls of the engine: its bar ends when the engine is called next. A GPU
    computes later than the host asks it to.
    """

    def __init__(self, model: Engine, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.rank = model.comm.ranks[model.comm.rank]  # in the whole world
        self.events: list[Event] = []
        self.in_use: list[Unit] = []  # the innermost last
        self.computing: tuple[str, float] | None = None  # what, since when

    def __enter__(self) -> "Timeline":
        self.open = contextlib.ExitStack()
        self._watch(self.model.watchers, (self._before, self._after))
        self._watch(self.model.comm.observers, self._observe)
        if self.optimizer is not None:
            begin, end = lambda *_: self._begin("optimizer step"), lambda *_: self._end("optimizer")
            self.open.callback(self.optimizer.register_step_pre_hook(begin).remove)
            self.open.callback(self.optimizer.register_step_post_hook(end).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self.open.close()

    def _watch(self, observers: list[Any], observer: Any) -> None:
        """Add the observer until the block ends."""
        observers.append(observer)
        self.open.callback(observers.remove, observer)

    def _before(self) -> None:
        """The engine is called, so what was computed until now is over."""
        self._end("compute")

    def _after(self, method: str, unit: Unit | None = None, *_: Any) -> None:
        """The engine has done something, and computation goes on."""
        if method == "gather" and unit is not None:
            self.in_use.append(unit)
        elif method in ("release", "forward_is_over"):  # it may have been gathered for several uses
            self.in_use = [other for other in self.in_use if other is not unit]
        if self.in_use:
            self._begin(f"{'backward' if self.model.in_backward else 'forward'} {self.in_use[-1].name}")

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
