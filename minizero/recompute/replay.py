"""Running a function a second time as if it were the first.

What a function computes depends on more than its arguments: on the random generators, on autocast, on the
default device; and on the buffers of its modules, which it may change as well: batch norm adds each batch to its
running statistics, spectral norm improves its vector. A `Replay` notes all that before the first run and restores it
for every later one, which leaves nothing behind: the buffers have then what the first run gave them.
"""

import contextlib
import ctypes
import functools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from numpy.random import MT19937, mtrand
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Buffers = dict[str, torch.Tensor | None]
Noted = dict[int, tuple[torch.Tensor, int, torch.Tensor]]  # by its id: a buffer, its version then, and a copy

_running = threading.local()  # .again: is a second run going on in this thread? .own: its `OwnGenerators`, if any


ADVICE = (
    "let it depend on its arguments and on torch's generators only (a cache that grows with each forward is a common "
    "cause: switch it off, in Hugging Face's models by use_cache=False)"
)


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
    """What `fn`, on `tensors`, depends on besides its arguments.

    `with first_run():` goes around the first run, `with again():` around each later one.
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
        in_a_thread = threading.current_thread() is not threading.main_thread()
        shared = [] if in_a_thread else _generators(tensors)
        self.generators = [*shared, *generators] if preserve_rng_state else []
        self.states = [generator.get_state() for generator in self.generators]
        self.own = OwnGenerators(fn) if preserve_rng_state and in_a_thread else None
        self.numpy = _numpy_state() if preserve_rng_state else None
        self.python = _python_state() if preserve_rng_state else None
        self.knows_all = not preserve_rng_state or torch.cuda.is_initialized()
        self.buffers: dict[nn.Module, Buffers] = {}  # of modules whose buffers the first run changed: as they were

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        """The first run: copies the buffers of its modules before they run, and keeps the copies of what it changed.

        These are the modules that `_modules_of` finds in fn, with all that they contain, and those that this thread
        calls while fn runs.
        """
        before: dict[nn.Module, Buffers] = {}
        noted: Noted = {}  # a buffer that several modules share is one here too

        def note(module: nn.Module) -> None:
            if module not in before:
                for each in module.modules():  # one inside may be changed without being called
                    if each not in before:
                        before[each] = dict(each._buffers)
                        for name, buffer in before[each].items():
                            if buffer is None or id(buffer) in noted:
                                continue
                            if is_lazy(buffer):
                                raise RecomputeMismatch(
                                    f"checkpoint: buffer {name} of {type(each).__name__} has no size before the first "
                                    "forward, and could not be put back for the second: run the module once without "
                                    "checkpoint"
                                )
                            noted[id(buffer)] = buffer, _version(buffer), _copy(buffer)

        for module in _modules_of(self.fn):
            note(module)
        with self.own or contextlib.nullcontext(), _before_each_module(note):
            yield
        self.buffers = {
            module: {name: None if buffer is None else noted[id(buffer)][2] for name, buffer in buffers.items()}
            for module, buffers in before.items()
            if (module._buffers or buffers) and _has_changed(module, buffers, noted)
        }
        self._first_run_is_over()

    def _first_run_is_over(self) -> None:
        """Forgets the generators that nothing was drawn from. Refuses what could not be drawn again."""
        used = [(g, state) for g, state in zip(self.generators, self.states) if _raw(g.get_state()) != _raw(state)]
        self.generators, self.states = [g for g, _ in used], [state for _, state in used]
        for name, state, now in (("NumPy", self.numpy, _numpy_state), ("Python", self.python, _python_state)):
            if state is not None and state != now():
                raise RecomputeMismatch(
                    f"checkpoint: numbers were drawn from {name}'s global generator, which is not set back for the "
                    "second forward: draw them with torch, or outside, and pass them as an argument"
                )
        self.numpy = self.python = None
        if not self.knows_all and torch.cuda.is_initialized():
            raise RecomputeMismatch(
                "checkpoint: the first use of the GPU was inside, so the state of its generator is not known: "
                "call torch.cuda.init() before"
            )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A second run: everything is as it was before the first, and afterwards as it is now."""
        outer, _running.again = is_recomputing(), True
        before = [generator.get_state() for generator in self.generators]
        own = {module: module._buffers for module in self.buffers}
        with contextlib.ExitStack() as stack:
            try:
                copies: dict[int, torch.Tensor] = {}  # there may be a third run
                for module, buffers in self.buffers.items():
                    module._buffers = {
                        name: None if buffer is None else copies.setdefault(id(buffer), _copy(buffer))
                        for name, buffer in buffers.items()
                    }
                _set_back(self.generators, self.states)
                if self.autocast != _autocast():
                    for kind, enabled, dtype, cache in self.autocast:
                        stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
                if self.device != _default_device():
                    stack.enter_context(self.device)
                if self.own is not None:
                    stack.enter_context(self.own)
                yield
            finally:
                _running.again = outer
                _set_back(self.generators, before)
                for module, buffers in own.items():
                    module._buffers = buffers


class OwnGenerators(TorchDispatchMode):
    """Around a run in a thread: what is drawn in it comes from generators of its own, and is the same in every run.

    Torch's own generators are one for the process: what ranks that are threads draw from them falls in any order.
    """

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of
        self.seed: int | None = None  # drawn once, when the first run first needs it
        self.asked = 0  # how many checkpoints inside this run have asked for a seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Any:
        self.asked, self.generators = 0, {}
        self.outer, _running.own = getattr(_running, "own", None), self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _running.own = self.outer
        super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a layer that keeps PyTorch's compiler away, and would double what each operator costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) in _drawing and not _drawing[id(func)][1]:  # what most operators are
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generator([*args, kwargs.get("device")])
        if func is torch.ops.aten.native_dropout.default:
            x, p = args[:2]
            mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
            return x * mask * (1 / (1 - p) if p < 1 else 0), mask
        variant = _with_generator(func)
        if variant is None:
            raise RecomputeMismatch(
                f"checkpoint: {func._schema.name} in a thread draws from torch's generator, which all threads share, "
                "and takes no other: make the ranks processes, or leave its dropout out"
            )
        return variant(*args, **kwargs | {"generator": generator})  # which may be there, and None

    def _generator(self, given: list[Any]) -> torch.Generator:
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), given[-1])
        device = torch.device(device or "cpu")
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self._seed())
        return self.generators[device]

    def _seed(self) -> int:
        if self.seed is None:
            if self.outer is not None:  # a checkpoint in a checkpoint, whose second run must ask for the same
                self.outer.asked += 1
                self.seed = (self.outer._seed() + 0x9E3779B97F4A7C15 * self.outer.asked) % 2**63
            else:
                with _disable_current_modes():
                    self.seed = int(torch.randint(2**63 - 1, ()))
        return self.seed


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator: perhaps itself. None if there is none."""
    names = {argument.name for argument in func._schema.arguments} | {"generator"}
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    return next((o for o in overloads if {argument.name for argument in o._schema.arguments} == names), None)


_drawing: dict[int, tuple[Any, bool]] = {}  # of each operator, which is kept alive: is it one that may draw?


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does this call of an operator draw random numbers? If it were not repeated, all later draws would be others."""
    if id(func) not in _drawing:  # its hash would be computed in Python
        _drawing[id(func)] = func, torch.Tag.nondeterministic_seeded in func.tags
    if not _drawing[id(func)][1]:
        return False
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    names = [argument.name for argument in func._schema.arguments]
    if func is torch.ops.aten.native_dropout.default and given["train"] is False:
        return False
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def _raw(state: torch.Tensor) -> bytes:
    """Read without an operator, which a mode around us would see: FakeTensorMode refuses real tensors."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_back(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    if generators:
        with _disable_current_modes():  # for the same reason
            for generator, state in zip(generators, states):
                generator.set_state(state)


def _version(buffer: torch.Tensor) -> int:
    """How often it was written to. What inference mode made does not count that, and is not written to."""
    return 0 if buffer.is_inference() else buffer._version


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():  # which watch the function's own operators
        return buffer.detach().clone()


def _has_changed(module: nn.Module, before: Buffers, noted: Noted) -> bool:
    """Has this module other buffers, or other numbers in them?"""
    now = module._buffers
    if now.keys() != before.keys() or any(now[name] is not buffer for name, buffer in before.items()):
        return True
    known = [noted[id(buffer)] for buffer in before.values() if buffer is not None]
    if any(version != _version(buffer) for buffer, version, _ in known):
        return True
    # A write through `.data` changes no version. Tensors that have no numbers (fake ones) are of types of their own.
    for buffer, _, copy in known:
        if type(buffer) is torch.Tensor and not buffer.is_meta and buffer.layout == torch.strided:
            if not torch.equal(buffer, copy):
                return True
    return False


def _modules_of(fn: Any, depth: int = 3) -> list[nn.Module]:
    """fn itself, if it is a module; else those that it is bound to, or has in its arguments, closure or globals."""
    if isinstance(fn, nn.Module):
        return [fn]
    parts: list[Any] = []
    if depth == 0:  # a function may be in its own closure
        pass
    elif isinstance(fn, functools.partial):
        parts = [fn.func, *fn.args, *fn.keywords.values()]
    elif isinstance(fn, MethodType):
        parts = [fn.__self__, fn.__func__]
    elif isinstance(fn, FunctionType):
        closure = [cell.cell_contents for cell in fn.__closure__ or () if cell != CellType()]  # which is an empty one
        used = [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
        parts = [*closure, *used, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return [module for part in parts for module in _modules_of(part, depth - 1)]


@contextlib.contextmanager
def _before_each_module(do: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls `do` on each module before this thread runs it."""
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            do(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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


def _python_state() -> tuple[bytes, Any]:
    """Of Python's global generator: its 624 words, which is next, and the second of a pair of normal numbers."""
    # They lie in the object, behind what every object has. `random.getstate()` takes ten times as long.
    generator: Any = random._inst  # type: ignore[attr-defined]
    head, end = object.__basicsize__, random.Random.__base__.__basicsize__  # type: ignore[union-attr]
    return ctypes.string_at(id(generator) + head, end - head), generator.gauss_next
