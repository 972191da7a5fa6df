"""Running a function a second time as if it were the first.

What a function computes depends on more than its arguments: on the random generators, on autocast, on the
default device. And it may leave something behind: batch norm adds each batch to its running statistics. A
`Replay` notes the former before the first run and restores it for every later one, which leaves nothing behind.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from numpy.random import MT19937, mtrand
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

_running = threading.local()  # .again: is a second run going on in this thread?


ADVICE = "let it depend on its arguments and on torch's generators only"


class RecomputeMismatch(RuntimeError):
    """The second forward did not compute, or could not compute, what the first one did."""


def is_recomputing() -> bool:
    """True in code that is run for the second time, in a function that counts its calls, say."""
    return getattr(_running, "again", False)


_enabled = True


def is_enabled() -> bool:
    """Do `checkpoint` and its relatives do anything?"""
    return _enabled


class set_enabled:  # noqa: N801
    """`set_enabled(False)`: from now on, or inside `with`, `checkpoint` and its relatives are plain calls.

    In every thread. What has run before is still recomputed.
    """

    def __init__(self, on: bool) -> None:
        global _enabled
        self.before, _enabled = _enabled, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        global _enabled
        _enabled = self.before


class Replay:
    """What `fn`, on `tensors`, depends on besides its arguments. Made before the first run.

    `first_run_is_over()` must follow it; then `with again():` as often as needed.
    """

    def __init__(
        self,
        fn: Any,
        tensors: Iterable[torch.Tensor],
        preserve_rng_state: bool = True,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self.fn = fn
        self.autocast, self.device = _autocast(), _default_device()
        self.generators = [*_generators(tensors), *generators] if preserve_rng_state else []
        self.states = [generator.get_state() for generator in self.generators]
        self.numpy = _numpy_state() if preserve_rng_state else None
        self.knows_all = not preserve_rng_state or torch.cuda.is_initialized()
        self.before: dict[nn.Module, dict[str, torch.Tensor]] = {}  # the statistics that norms had before the first run
        self.own: dict[nn.Module, dict[str, torch.Tensor]] = {}  # and have, while a second run is going on

    def first_run_is_over(self) -> None:
        """Forgets the generators that nothing was drawn from. Refuses what could not be drawn again."""
        used = [
            (generator, before)
            for generator, before in zip(self.generators, self.states)
            if not torch.equal(generator.get_state(), before)
        ]
        self.generators, self.states = [g for g, _ in used], [state for _, state in used]
        if self.numpy is not None and self.numpy != _numpy_state():
            raise RecomputeMismatch(
                "checkpoint: numbers were drawn from NumPy's global generator, which is not set back for the second "
                "forward: draw them with torch, or outside, and pass them as an argument"
            )
        self.numpy = None
        if not self.knows_all and torch.cuda.is_initialized():
            raise RecomputeMismatch(
                "checkpoint: the first use of the GPU was inside, so the state of its generator is not known: "
                "call torch.cuda.init() before"
            )

    def remembering_statistics(self) -> contextlib.AbstractContextManager[Any]:
        """Around the first run: let norms begin the second with what they had then, so that all is comparable."""

        def remember(module: nn.Module) -> None:
            if module not in self.before:
                self.before[module] = _copies(module)

        return _before_each_norm(remember)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A second run: everything is as it was before the first, and afterwards as it is now."""
        outer, _running.again = is_recomputing(), True
        before = [generator.get_state() for generator in self.generators]
        with contextlib.ExitStack() as stack:
            try:
                if _may_run_norms(self.fn):
                    stack.enter_context(_before_each_norm(self._replace_statistics))
                for generator, state in zip(self.generators, self.states):
                    generator.set_state(state)
                if self.autocast != _autocast():
                    for kind, enabled, dtype, cache in self.autocast:
                        stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
                if self.device != _default_device():
                    stack.enter_context(self.device)
                yield
            finally:
                _running.again = outer
                for generator, state in zip(self.generators, before):
                    generator.set_state(state)
                for module, own in self.own.items():
                    module._buffers.update(own)
                self.own = {}

    def _replace_statistics(self, module: nn.Module) -> None:
        """Let a norm add the batch to copies."""
        if module not in self.own:
            self.own[module] = dict(module._buffers)  # type: ignore[arg-type]
            module._buffers.update(_copies(module, self.before.get(module)))


def _has_statistics(module: nn.Module) -> bool:
    """Is it a norm that adds each batch to running statistics?"""
    return isinstance(module, _NormBase) and module.track_running_stats


def _may_run_norms(fn: Any) -> bool:
    """Of a module it is known; any other function may call any."""
    if not isinstance(fn, nn.Module):
        return True
    return any(_has_statistics(module) for module in fn.modules())


@contextlib.contextmanager
def _before_each_norm(do: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls `do` on each norm with running statistics before this thread runs it."""
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any) -> None:
        if _has_statistics(module) and threading.get_ident() == thread:
            do(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _copies(module: nn.Module, buffers: Any = None) -> dict[str, torch.Tensor]:
    with _disable_current_modes():  # which count the function's own operators
        return {name: buffer.clone() for name, buffer in (buffers or module._buffers).items() if buffer is not None}


def _autocast() -> list[tuple[str, bool, torch.dtype, bool]]:
    cache = torch.is_autocast_cache_enabled()
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in ("cpu", "cuda")]


def _default_device() -> torch.device:
    # Asking takes 3 µs. Where no mode is active nobody has set another.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else torch.device("cpu")


def _generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Torch's generators of the CPU, of the current GPU and of those that the tensors are on."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    indices = {tensor.get_device() for tensor in tensors if tensor.is_cuda} | {torch.cuda.current_device()}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(indices))]


_without_spare = b""  # a state of NumPy's generator, seen before


def _numpy_state() -> tuple[Any, Any]:
    """Of NumPy's global generator: differs when something was drawn in between."""
    # To read the whole state takes 30 µs, to read its words half a microsecond. They do not tell everything: normal
    # numbers are made in pairs, and the second waits as a spare. But where none waits, every draw changes the words.
    global _without_spare
    generator = mtrand.get_bit_generator()
    words = b""
    if type(generator) is MT19937:
        words = ctypes.string_at(generator.ctypes.state_address, 2500)  # 624 words, and which is next
        if words == _without_spare:
            return words, None
    state: Any = mtrand.get_state(legacy=False)
    spare = state["gauss"] if state["has_gauss"] else None
    if spare is None:
        _without_spare = words
    return words or repr(state["state"]), spare
