"""How autograd tells when a unit is used: by hooks on its module, and on the module's inputs and outputs.

    forward     the unit begins                        gather
                it ends                                forward_is_over
    backward    the gradient of an output has come     the use opens: gather
                the gradient of an input has come      the use closes: release

Autograd goes back through the newest operation first. What made a unit's input is older than all that the unit did.
So when the gradient of an input has come, the unit's own operations are done.
"""

import dataclasses
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.refused import check_unchanged
from minizero.engines.unit import Unit

# `engine: Any` is an `Engine`, whose file imports this one.


class Uses:
    """The uses of an engine's units. running: those whose forward runs, the innermost last."""

    def __init__(self) -> None:
        self.running: list[Use] = []
        self.in_backward: Counter[Unit] = Counter()  # how many of a unit are open

    def pop(self, unit: Unit) -> "Use":
        """The innermost use of the unit, whose forward is over. What lies above it ended by an exception."""
        while (use := self.running.pop()).unit is not unit:
            pass
        return use


class Use:
    """One use of a unit in a forward, and the hooks by which autograd opens and closes it in backward.

    After the forward it must hold no tensors: their hooks hold it, and such a cycle would never be freed. A graph can
    be gone through twice, also by `torch.autograd.grad` inside a forward, so `opened` and `closed` are autograd's
    numbers of a pass.
    """

    def __init__(self, engine: Any, unit: Unit, given: Any) -> None:
        self.engine, self.unit = engine, unit
        self.version = unit.version  # of the master that the replica was made from
        self.began = torch_private.next_operation()  # a thread numbers its operations, one after the other
        self.inputs = [(x, x._version) for x in tensors_in(given) if x.grad_fn is not None]  # until the forward is over
        self.opened = self.closed = -1  # no pass has this number

    def watch(self, output: Any) -> None:
        """The forward is over."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # Runs after the tensor's own hooks: the next unit of the forward is released before this is gathered.
                tensor.grad_fn.register_prehook(self.open)
                # An in-place write to a view changes its grad_fn; backward then reaches the grad_fn of its base first.
                if self.made(tensor._base):
                    tensor._base.grad_fn.register_prehook(self.open)  # type: ignore[union-attr]
            elif tensor.requires_grad:
                tensor.register_hook(self.open)
        # Tensors that the unit keeps can reach the loss, too: an auxiliary loss, say.
        self.opens_with(kept_in(self.unit.module) if self.engine.frees_replicas else [])
        for tensor, version in self.inputs:  # without any, this use ends with the backward
            if tensor._version == version:  # what the unit wrote in place is its own work, no input
                tensor.register_hook(self.close)
        self.inputs = []

    def opens_with(self, value: Any) -> None:
        """The gradient of a tensor in `value` opens the use, if the use made the tensor."""
        for tensor in tensors_in(value):
            if self.made(tensor):
                tensor.grad_fn.register_prehook(self.open)  # type: ignore[union-attr]

    def made(self, tensor: torch.Tensor | None) -> bool:
        """Did an operation of this use, or a later one, make the tensor?"""
        return tensor is not None and torch_private.operation_of(tensor) >= self.began

    def open(self, _: Any) -> None:
        this = torch_private.current_backward()
        if self.opened != this:  # one of several outputs is the first
            self.opened = this
            check_unchanged(self.engine, self.unit, self.version)
            self.engine.uses.in_backward[self.unit] += 1
            self.engine.do(self.engine.mover.gather, self.unit)

    def close(self, _: Any) -> None:
        if self.opened == torch_private.current_backward() != self.closed:
            self.closed = self.opened
            self.engine.uses.in_backward[self.unit] -= 1
            if not self.engine.uses.in_backward[self.unit]:  # no other use of the same unit is open
                self.engine.do(self.engine.mover.release, self.unit)


def watch_uses(engine: Any, unit: Unit) -> None:
    """Register the hooks that tell the engine of the unit's uses."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        engine.do(engine.mover.gather, unit)
        changed = without_leaves(args, kwargs)
        engine.uses.running.append(Use(engine, unit, changed or (args, kwargs)))
        return changed

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        use = engine.uses.pop(unit)
        if all(other.unit is not unit for other in engine.uses.running):  # else it was called inside itself
            engine.do(engine.forward_is_over, unit)
        use.watch(output)

    def part_is_over(_: nn.Module, __: Any, output: Any) -> None:
        """The part used its parameters: wherever its output is kept, its gradient opens the use."""
        for use in engine.uses.running:
            if use.unit is unit:
                use.opens_with(output)

    if unit.module is not None:
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.module.register_forward_hook(after, with_kwargs=True)
        its = {id(parameter) for parameter in unit.parameters}
        for part in unit.module.modules() if engine.frees_replicas else ():
            if part is not unit.module and any(id(p) in its for p in part.parameters(recurse=False)):
                part.register_forward_hook(part_is_over)


def without_leaves(args: Any, kwargs: Any) -> Any:
    """The arguments of a forward, with a view for each leaf among them that requires a gradient; or None.

    Autograd completes leaves before all else: when a leaf has its gradient, the unit's weights may still have none.
    A view is an operation like any other. It is older than the unit's own, so its turn comes after theirs.
    """
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    if not (leaves and torch.is_grad_enabled()):
        return None  # leave them as they are
    views = {
        key: leaf.view_as(leaf) for key, leaf in leaves.items()
    }  # one each: nn.MultiheadAttention asks whether q is k
    return tuple(views.get(id(a), a) for a in args), {name: views.get(id(a), a) for name, a in kwargs.items()}


CONTAINERS = (list, tuple, set, deque, Mapping, types.SimpleNamespace)


def kept_in(module: nn.Module | None) -> list[torch.Tensor]:
    """The tensors that are attributes of the module or its parts, or in containers that are."""
    parts = [] if module is None else module.modules()
    kept = (value for part in parts for value in vars(part).values())
    return list(tensors_in([v for v in kept if isinstance(v, torch.Tensor) or isinstance(v, CONTAINERS) and v]))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, types.SimpleNamespace):
        yield from tensors_in(list(vars(value).values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from tensors_in(item)
