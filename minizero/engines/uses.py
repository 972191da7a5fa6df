"""How autograd tells when a unit is used: by hooks on its module, its inputs and outputs, and its parameters.

    forward     the unit begins                           gather
                it ends                                   its forward is over
    backward    the gradient of an output has come        the use opens: gather
                a parameter has its gradient              deposit; complete units are reduced, in order
                the gradient of an input has come         the use closes: release
                autograd has gone through all             the rest is reduced, and all is released

Autograd goes back through the newest operation first. What made a unit's input is older than all that the unit did.
So when the gradient of an input has come, the unit's own operations are done.
"""

import dataclasses
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.no_sync import show
from minizero.engines.refused import check_unchanged
from minizero.engines.unit import Unit

# `engine: Any` is an `Engine`, whose file imports this one.


class Uses:
    """The uses of an engine's units. running: those whose forward runs, the innermost last. open: how many, by unit."""

    def __init__(self) -> None:
        self.running: list[Use] = []
        self.open: Counter[Unit] = Counter()

    def take(self, unit: Unit) -> "Use":
        """The innermost use of the unit, whose forward is over. What lies above it ended by an exception."""
        while (use := self.running.pop()).unit is not unit:
            pass
        return use


class Use:
    """One use of a unit in a forward, and the hooks by which autograd opens and closes it in backward.

    It must hold no tensors: their hooks hold it, and such a cycle would never be freed. A graph can be gone through
    twice, also by `torch.autograd.grad` inside a forward, so `opened` and `closed` are autograd's numbers of a pass.
    """

    def __init__(self, engine: Any, unit: Unit, given: Any) -> None:
        self.engine, self.unit = engine, unit
        self.version = unit.version  # of the master that the replica was made from
        self.began = torch_private.next_operation()  # a thread numbers its operations, one after the other
        self.inputs = {id(x): x._version for x in tensors_in(given) if x.grad_fn is not None}
        self.opened = self.closed = -1  # no pass has this number

    def watch(self, given: Any, output: Any) -> None:
        """The forward is over. given: what the unit was given, as it is now."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # Runs after the tensor's own hooks: the next unit of the forward is released before this is gathered.
                tensor.grad_fn.register_prehook(self.open)
                # An in-place write to a view changes its grad_fn; backward then reaches the grad_fn of its base first.
                if self.made(tensor._base):
                    tensor._base.grad_fn.register_prehook(self.open)  # type: ignore[union-attr]
            elif tensor.requires_grad:
                tensor.register_hook(self.open)
        # Tensors that are kept as attributes can reach the loss, too: an auxiliary loss, say. A stage that keeps
        # replicas need not look.
        for tensor in kept_in(self.unit.module) if self.engine.frees_replicas else ():
            if self.made(tensor):
                tensor.grad_fn.register_prehook(self.open)  # type: ignore[union-attr]
        for tensor in tensors_in(given):  # without any, this use ends with the backward
            # What the unit wrote in place, or put into a list that it was given, is its own work, no input.
            if tensor.grad_fn is not None and self.inputs.get(id(tensor)) == tensor._version:
                tensor.register_hook(self.close)

    def made(self, tensor: torch.Tensor | None) -> bool:
        """Did an operation of this use, or a later one, make the tensor?"""
        return tensor is not None and torch_private.operation_of(tensor) >= self.began

    def open(self, _: Any) -> None:
        this = torch_private.current_backward()
        if self.opened != this:  # one of several outputs is the first
            self.opened = this
            check_unchanged(self.engine, self.unit, self.version)
            self.engine.uses.open[self.unit] += 1
            self.engine.do(self.engine.when.gather, self.unit)

    def close(self, _: Any) -> None:
        if self.opened == torch_private.current_backward() != self.closed:
            self.closed = self.opened
            self.engine.uses.open[self.unit] -= 1
            if not self.engine.uses.open[self.unit]:  # no other use of the same unit is open
                self.engine.do(self.engine.when.release, self.unit)


class Backward:
    """One backward pass of a model: it begins with the gradient of an output, or of a parameter.

    A gradient that only goes through a unit, to an input, is none of it: nothing is to be reduced then.

    left: the units that are still to be reduced. The order is fixed, last block first, so that all ranks reduce the
    same unit at the same time even if only some of them took a branch. owed: by unit, the numbers of the parameters
    whose gradient has not come.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.left = list(engine.in_order)
        self.owed = {unit: set(range(len(unit.parameters))) for unit in self.left}

    def begin(self) -> None:
        for unit in self.engine.in_order:
            unit.begin_gradient()
        for unit in self.engine.roots:  # an earlier backward of the same forward may have released them
            self.engine.do(self.engine.when.gather, unit)
        # Only autograd knows when the whole backward is over; then it calls this.
        torch_private.call_at_end_of_backward(self.end)

    def bring(self, unit: Unit, number: int, gradient: torch.Tensor | None) -> None:
        """The gradient of the unit's parameter `number` has come."""
        stage = type(self.engine).__name__
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{stage}: backward(create_graph=True): .grad is an average over ranks, which no graph "
                "contains: use torch.autograd.grad(…, inputs, create_graph=True), then backward()"
            )
        if self.engine.sync and unit not in self.left:
            raise RuntimeError(
                f"{stage}: a second gradient for {unit.name} after it was reduced: "
                "use checkpoint with use_reentrant=False, or no_sync()"
            )
        if self.engine.reshard_after_forward and unit.module is not None and not self.engine.uses.open[unit]:
            raise RuntimeError(
                f"{stage}: backward reached {unit.name} while it was not gathered: a tensor that it made "
                "was used, but was neither in its output nor an attribute: return it from the unit's forward"
            )
        if gradient is None or gradient.is_sparse:
            raise RuntimeError(f"{unit.name}: sparse gradients are not supported: use sparse=False")
        self.owed[unit].discard(number)
        self.engine.when.deposit(unit, number, gradient)

    def reduce_complete(self) -> None:
        """Reduce the units that owe nothing more, as far as the order allows."""
        while self.engine.sync and self.left and not self.owed[self.left[0]]:
            self.reduce_next()

    def reduce_next(self) -> None:
        unit = self.left.pop(0)
        assert unit.gradient is not None
        self.engine.do(self.engine.when.reduce, unit, unit.gradient.take())

    def end(self) -> None:
        while self.engine.sync and self.left:  # what was not used has a gradient of zero
            self.reduce_next()
        self.engine.do(self.engine.when.finish)
        self.engine.release_all()
        for unit in self.engine.in_order:
            if unit.gradient is not None:  # under no_sync
                show(unit)
        self.engine.backward = None


def watch(engine: Any, unit: Unit) -> None:
    """Register the hooks that tell the engine of the unit's uses."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        engine.do(engine.when.gather, unit)
        changed = without_leaves(args, kwargs)
        engine.uses.running.append(Use(engine, unit, changed or (args, kwargs)))
        return changed

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        engine.do(engine.forward_is_over, unit)
        engine.uses.take(unit).watch((args, kwargs), output)

    if unit.module is not None:
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.module.register_forward_hook(after, with_kwargs=True)
    for number, parameter in enumerate(unit.parameters if unit.trains else ()):
        parameter.register_post_accumulate_grad_hook(arrival(engine, unit, number))


def arrival(engine: Any, unit: Unit, number: int) -> Any:
    """The hook of a parameter. It is given the parameter, not the gradient."""
    # Autograd holds this hook out of the garbage collector's sight, so a strong reference would leak the engine.
    weak_engine, weak_unit = weakref.ref(engine), weakref.ref(unit)

    def arrived(parameter: torch.Tensor) -> None:
        engine, unit = weak_engine(), weak_unit()
        if engine is None or unit is None:
            return
        gradient, parameter.grad = parameter.grad, None
        backward = engine.begin_backward()
        backward.bring(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        backward.reduce_complete()

    return arrived


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


def kept_in(module: nn.Module | None) -> list[torch.Tensor]:
    """The tensors that are attributes of the module or its parts, or in lists and tuples that are."""
    parts = [] if module is None else module.modules()
    kept = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor | list | tuple)]
    return list(tensors_in(kept))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses and simple namespaces."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, types.SimpleNamespace):
        yield from tensors_in(list(vars(value).values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
