"""What the modules of a function hold, which its second run leaves as it was.

A run may change what a module holds: batch norm adds the batch to its running statistics, another module switches a
layer to evaluation and back. A second run may even end before the line that switches it back. So `State` notes what
modules hold before a second run, and gives it back. Of buffers a second run must also read what the first run read,
and it must train or evaluate as that did. So `State` copies buffers before the first run, and lends the copies to the
modules while a later run goes on. Of a large buffer that the first run left alone, a mask for instance, it keeps no
copy: if somebody else writes to that before backward, it refuses.

What a module counts in its attributes, and in lists and dicts among them, is counted once. What it counts in a nested
list or dict, a Counter, a set, a deque, a NumPy array or another object is counted in each run, and so twice.

The modules are those that `modules_of` finds in the function, and those that this thread calls in the first run.
"""

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from minizero.recompute.guards.mismatch import RecomputeMismatch
from minizero.torch_private import without_modes

SMALL = 2**16  # bytes of a buffer whose copy is kept in any case
Contents = list[tuple[Any, Any]]  # what belongs to modules, each with a copy of what is in it


class State:
    """Modules, and their buffers as they were before the first run. `note` comes before the module's first run."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, tuple[bool, Any]] = {}  # of each whether it trained, and its buffers by name
        # By the buffer's id, since modules may share a buffer: itself, its version, and a copy of its numbers.
        self.buffers: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}

    def note(self, module: nn.Module) -> None:
        """Notes a module, and all that it contains, if it has not been noted yet."""
        if module in self.modules:
            return
        for each in module.modules():  # the function may change a module that it does not call
            if each not in self.modules:
                self.modules[each] = each.training, each._buffers.copy()
                for buffer in each._buffers.values():
                    if buffer is not None and id(buffer) not in self.buffers:
                        self.buffers[id(buffer)] = buffer, _version(buffer), _copy(buffer)

    def first_run_is_over(self) -> None:
        """Keeps the copies of buffers that the run has changed, or that are small, and forgets the others."""
        for key, (buffer, version, copy) in self.buffers.items():
            if copy is not None and copy.numel() * copy.itemsize > SMALL and not _has_changed(buffer, version, copy):
                self.buffers[key] = buffer, version, None

    def put_back(self) -> Contents:
        """Gives the modules the buffers from before the first run. Returns what they hold now, for `give_back`."""
        copies = {}
        for key, (buffer, version, copy) in self.buffers.items():
            if copy is None and _version(buffer) != version:
                name = next(name for _, own in self.modules.values() for name in own if own[name] is buffer)
                raise RecomputeMismatch(
                    f"checkpoint: the buffer {name!r} was changed in place between forward and backward, which needs "
                    "what the forward read: change it after backward, or give the module a new buffer"
                )
            if copy is not None and _has_changed(buffer, version, copy):
                copies[key] = _copy(copy)  # again, since there may be a third run
        now = [held for module in self.modules for held in _contents(module)]
        for module, (training, buffers) in self.modules.items():
            vars(module)["training"] = training
            if buffers or module._buffers:
                lent = {name: copies.get(id(buffer), buffer) for name, buffer in buffers.items()}
                give_back([(module._buffers, lent)])
        return now


def _contents(module: nn.Module) -> Contents:
    own = vars(module)
    inside = [held for held in own.values() if type(held) is dict or type(held) is list]
    hooks = own["_forward_hooks"], own["_forward_pre_hooks"]
    contents: Contents = [(held, (list if type(held) is list else dict)(held)) for held in (own, *hooks, *inside)]
    return contents + [(one, one.requires_grad) for one in own["_parameters"].values() if one is not None]


def give_back(contents: Contents) -> None:
    """Attributes, dicts and lists hold again what they held, and the same parameters ask for a gradient."""
    for held, before in contents:
        if type(held) is list:
            held[:] = before
        elif isinstance(held, torch.Tensor):
            held.requires_grad = before
        elif held or before:
            held.update(before)
            for name in held.keys() - before.keys() if len(held) > len(before) else ():
                del held[name]


def _version(buffer: torch.Tensor) -> int:
    """How often the buffer was written to. A tensor made in inference mode does not count, and cannot be written to."""
    return 0 if buffer.is_inference() else buffer._version


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    with without_modes():  # modes watch the function's own operators, and this is none of them
        return buffer.detach().clone()


def _has_changed(buffer: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    if version != _version(buffer):
        return True
    # A write through `.data` changes no version, so the numbers are compared. Fake tensors have none.
    has_numbers = type(buffer) is torch.Tensor and not buffer.is_meta and buffer.layout == torch.strided
    return has_numbers and not torch.equal(buffer, copy)


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
