"""What each rank does when: one step drawn as bars, computation above, communication beside it.

    with Timeline(model, optimizer) as timeline:      # on every rank
        model(x, y).backward()
        optimizer.step()
    plot_timeline(timeline.events)                    # of one rank, or of several, one list after the other
    save_chrome_trace(timeline.events, "step.json")   # opens in Perfetto, ui.perfetto.dev

Where a bar of communication lies under one of computation they overlap: that is what prefetch buys.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minizero.engines.engine import Engine
from minizero.engines.partition import Unit
from minizero.pictures.timeline import LANES, Event

WATCHED = ("before_forward", "gather", "release", "forward_is_over", "reduce", "finish")


@contextlib.contextmanager
def watch(model: Engine, before: Callable[[], None], after: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Around what the engine does in the block: `before()`, and `after(method, arguments)`. It may call itself."""
    depth = 0

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal depth
            if depth == 0:
                before()
            depth += 1
            try:
                return method(*args)
            finally:
                depth -= 1
                if depth == 0:
                    after(name, args)

        return call

    outer = {name: vars(model).get(name) for name in WATCHED}  # another's, where two watch
    for name in WATCHED:
        setattr(model, name, around(name, getattr(model, name)))
    try:
        yield
    finally:
        for name in WATCHED:
            delattr(model, name)  # from now on it is the class's own again
            if outer[name] is not None:
                setattr(model, name, outer[name])


class Timeline:
    """Records what this rank's engine and its optimizer do while the block runs. Times are the host's, in seconds.

    Computation is what lies between two calls of the engine: its bar ends when the engine is called next. A GPU
    computes later than the host asks it to.
    """

    def __init__(self, model: Engine, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.events: list[Event] = []
        self.in_use: list[Unit] = []  # the innermost last
        self.computing: tuple[str, float] | None = None  # what, since when

    def __enter__(self) -> "Timeline":
        self.open = contextlib.ExitStack()
        self.open.enter_context(watch(self.model, lambda: self._end("compute"), self._after))
        observers = self.model.comm.observers
        observers.append(self._observe)
        self.open.callback(observers.remove, self._observe)
        if self.optimizer is not None:
            begin, end = lambda *_: self._begin("optimizer step"), lambda *_: self._end("optimizer")
            self.open.callback(self.optimizer.register_step_pre_hook(begin).remove)
            self.open.callback(self.optimizer.register_step_post_hook(end).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self.open.close()

    def _after(self, method: str, args: tuple[Any, ...]) -> None:
        """The engine has done something, and computation goes on."""
        if method == "gather":
            self.in_use.append(args[0])
        elif method in ("release", "forward_is_over"):  # it may have been gathered for several uses
            self.in_use = [unit for unit in self.in_use if unit is not args[0]]
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
        self.events.append(Event(self.model.comm.world_rank, lane, name, start, time.perf_counter()))
