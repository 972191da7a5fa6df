"""The buffers of a function's modules, put back for its second run.

A first run may change buffers: batch norm adds the batch to its running statistics, spectral norm improves its
vector. A second run must read what the first run read, and must not add the batch twice. So `Buffers` copies the
buffers before the first run, and lends the copies to the modules while a later run goes on. The modules are those
that `modules_of` finds in the function, and those that this thread calls while the function runs.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from minizero.recompute.mismatch import RecomputeMismatch
from minizero.torch_private import without_modes

Named = dict[str, torch.Tensor | None]  # a module's buffers


class Noted(NamedTuple):
    """A buffer, with its version and a copy of its numbers from before the first run."""

    buffer: torch.Tensor
    version: int
    copy: torch.Tensor


class Buffers:
    """The buffers that a first run changes, as they were before it. `note` comes before the module's first run."""

    def __init__(self) -> None:
        self.before: dict[nn.Module, Named] = {}  # while the first run goes on: of all modules noted
        self.noted: dict[int, Noted] = {}  # by the buffer's id: modules may share a buffer

    def note(self, module: nn.Module) -> None:
        """Copies the buffers of a module, and of all that it contains, if it has not been noted yet."""
        if module in self.before:
            return
        for each in module.modules():  # the function may change buffers of a module that it does not call
            if each not in self.before:
                self.before[each] = dict(each._buffers)
                for name, buffer in each._buffers.items():
                    if buffer is not None and id(buffer) not in self.noted:
                        _refuse_lazy(each, name, buffer)
                        self.noted[id(buffer)] = Noted(buffer, _version(buffer), _copy(buffer))

    def first_run_is_over(self) -> None:
        """Keeps the copies of what the run has changed, and forgets the others."""
        noted, self.noted = self.noted, {}
        self.before = {
            module: {name: None if buffer is None else noted[id(buffer)].copy for name, buffer in buffers.items()}
            for module, buffers in self.before.items()
            if (module._buffers or buffers) and _has_changed(module, buffers, noted)
        }

    def put_back(self) -> dict[nn.Module, Named]:
        """Gives the modules the buffers from before the first run. Returns their own, for `give_back`."""
        copies: dict[int, torch.Tensor] = {}  # copied again, since there may be a third run
        lent = {
            module: {
                name: None if buffer is None else copies.setdefault(id(buffer), _copy(buffer))
                for name, buffer in buffers.items()
            }
            for module, buffers in self.before.items()
        }
        now = {module: module._buffers for module in lent}
        give_back(lent)
        return now


def give_back(buffers: dict[nn.Module, Named]) -> None:
    """Each module has its own buffers again, as they were before copies were lent to it."""
    for module, own in buffers.items():
        module._buffers = own


def _refuse_lazy(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    if is_lazy(buffer):
        raise RecomputeMismatch(
            f"checkpoint: buffer {name} of {type(module).__name__} has no size before the first "
            "forward, and could not be put back for the second: run the module once without "
            "checkpoint"
        )


def _version(buffer: torch.Tensor) -> int:
    """How often the buffer was written to. A tensor made in inference mode does not count, and cannot be written to."""
    return 0 if buffer.is_inference() else buffer._version


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    with without_modes():  # modes watch the function's own operators, and this is none of them
        return buffer.detach().clone()


def _has_changed(module: nn.Module, before: Named, noted: dict[int, Noted]) -> bool:
    """Has this module other buffers now, or other numbers in them?"""
    now = module._buffers
    if now.keys() != before.keys() or any(now[name] is not buffer for name, buffer in before.items()):
        return True
    known = [noted[id(buffer)] for buffer in before.values() if buffer is not None]
    if any(one.version != _version(one.buffer) for one in known):
        return True
    # A write through `.data` changes no version, so the numbers are compared. Fake tensors have none.
    return any(_has_numbers(one.buffer) and not torch.equal(one.buffer, one.copy) for one in known)


def _has_numbers(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and not buffer.is_meta and buffer.layout == torch.strided


def modules_of(fn: Any, depth: int = 3) -> list[nn.Module]:
    """fn itself if it is a module; else those that it is bound to, or has in its arguments, closure or globals."""
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
        empty = CellType()  # the cell of a variable that has no value yet
        closure = [cell.cell_contents for cell in fn.__closure__ or () if cell != empty]
        used = [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
        parts = [*closure, *used, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return [module for part in parts for module in modules_of(part, depth - 1)]


@contextlib.contextmanager
def before_each_module(do: Callable[[nn.Module], None]) -> Iterator[None]:
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
