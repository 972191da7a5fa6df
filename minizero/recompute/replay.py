"""Running a function a second time as if it were the first.

What a function computes depends on more than its arguments:

    random numbers       `Generators` sets torch's generators back
    what modules hold    `State` puts it back: batch norm, for one, adds each batch to its running statistics
    autocast, device     the defaults of the moment: read before the first run, and entered again

A `Replay` notes all of it before the first run and restores it for every later run. A later run leaves nothing
behind: generators and modules end as it found them. How the first two are done is in guards/.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from minizero.recompute.guards.generators import Generators, set_states
from minizero.recompute.guards.state import State, give_back, modules_of

_running = threading.local()  # .again: does this thread run something for the second time?


def is_recomputing() -> bool:
    """True in code that runs for the second time. A function that counts its calls may ask."""
    return getattr(_running, "again", False)


class Replay:
    """What else than its arguments a run of `fn` depends on.

    `with first_run():` goes around the first run, `with again():` around each later one.
    given: the tensors and generators among its arguments. preserve_rng_state: False leaves random numbers alone.
    """

    def __init__(self, fn: Any, given: Iterable[Any], preserve_rng_state: bool = True) -> None:
        self.fn = fn
        self.autocast = _autocast()
        self.device = torch.get_default_device()
        self.state = State()
        self.generators = Generators(given) if preserve_rng_state else None

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        thread = threading.get_ident()

        def note(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self.state.note(module)

        for module in modules_of(self.fn):
            self.state.note(module)
        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        self.state.first_run_is_over()
        if self.generators is not None:
            self.generators.first_run_is_over()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        held = self.state.put_back()
        outer, _running.again = is_recomputing(), True
        states = self.generators.put_back() if self.generators is not None else []
        try:
            with contextlib.ExitStack() as stack:
                if self.autocast != _autocast():
                    for kind, enabled, dtype, cache in self.autocast:
                        stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
                if self.device != torch.get_default_device():
                    stack.enter_context(self.device)
                yield
        finally:
            set_states(states)
            give_back(held)
            _running.again = outer


def _autocast() -> list[tuple[str, bool, torch.dtype, bool]]:
    cache = torch.is_autocast_cache_enabled()
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in ("cpu", "cuda")]
