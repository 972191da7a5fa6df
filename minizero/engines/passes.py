"""One forward of the whole model, and its backward: when each begins, and what happens at its end.

    forward     the model begins                       before_forward, gather the root unit
                it ends                                its outputs wait for their gradients
    backward    the gradient of an output has come     the backward begins
                a parameter has its gradient           deposit; complete units are reduced, in order
                autograd has gone through all          the rest is reduced, finish, and all is released

What happens in between, at each use of a unit, is in uses.py.
"""

import weakref
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.no_sync import show
from minizero.engines.refused import check_compiled, check_complete, check_unchanged
from minizero.engines.unit import Unit
from minizero.engines.uses import tensors_in, without_leaves

# `engine: Any` is an `Engine`, whose file imports this one.


def watch_passes(engine: Any) -> None:
    """Register the hooks by which a forward begins, and those of the parameters, which bring their gradients."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        begin_forward(engine)
        return without_leaves(args, kwargs)

    engine.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    for unit in engine.in_order:
        for number, parameter in enumerate(unit.parameters):
            aside: list[torch.Tensor | None] = []
            if unit.original:  # autograd would add to the .grad of before
                unit.nodes.append(put_aside(parameter, aside))
            parameter.register_post_accumulate_grad_hook(arrival(engine, unit, number, aside))


def begin_forward(engine: Any) -> None:
    """Clear up what an exception left behind, and gather what the whole forward needs."""
    check_complete(engine)
    check_compiled(engine, [engine.module if unit.module is None else unit.module for unit in engine.units])
    if torch_private.current_backward() == -1:
        if engine.backward is not None:  # the last backward raised
            engine.backward = None
            release_all(engine)
            for unit in engine.in_order:
                unit.gradient = None  # unless it was reduced, .grad is that of before; what no_sync added is gone
        engine.uses.running.clear()  # what is left there ended by an exception
    engine.do(engine.mover.before_forward)
    for unit in engine.roots:
        engine.do(engine.mover.gather, unit)


def end_forward(engine: Any, output: Any) -> None:
    """Let the gradient of a tensor in `output` begin the backward."""
    grown = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    versions = {unit: unit.version for unit in engine.roots}  # a `Use` checks those of the other units

    def begin(_: torch.Tensor) -> None:
        begin_backward(engine, versions)

    for tensor in grown:
        tensor.register_hook(begin)
    if not grown:  # there will be no backward
        release_all(engine)


def put_aside(parameter: nn.Parameter, aside: list[torch.Tensor | None]) -> Any:
    """Keep the parameter's .grad of before in `aside` while autograd writes a new one.

    Returns autograd's node that writes it. Somebody must hold the node: autograd itself would make a new one.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    weak = weakref.ref(parameter)  # the node is out of the garbage collector's sight, as in `arrival`

    def writes(_: Any) -> None:
        parameter = weak()
        if parameter is not None:
            aside[:] = [parameter.grad]
            parameter.grad = None

    node.register_prehook(writes)
    return node


def arrival(engine: Any, unit: Unit, number: int, aside: list[torch.Tensor | None]) -> Any:
    """The hook of a parameter. It is given the parameter, not the gradient."""
    # Autograd holds this hook out of the garbage collector's sight, so a strong reference would leak the engine.
    weak_engine, weak_unit = weakref.ref(engine), weakref.ref(unit)

    def arrived(parameter: torch.Tensor) -> None:
        engine, unit = weak_engine(), weak_unit()
        if engine is None or unit is None:
            return
        gradient, parameter.grad = parameter.grad, aside.pop() if aside else None
        backward = begin_backward(engine)
        backward.bring(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        backward.reduce_complete()

    arrived.ours = True  # type: ignore[attr-defined]
    return arrived


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
            self.engine.do(self.engine.mover.gather, unit)
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
        if self.engine.reshard_after_forward and unit.module is not None and not self.engine.uses.in_backward[unit]:
            raise RuntimeError(
                f"{stage}: backward reached {unit.name} while it was not gathered: a tensor that it made "
                "was used, but was neither in its output nor an attribute: return it from the unit's forward"
            )
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{unit.name}: sparse gradients are not supported: use sparse=False")
        self.owed[unit].discard(number)
        if gradient is not None:  # a custom Function may give None, which is zero
            self.engine.mover.deposit(unit, number, gradient)

    def reduce_complete(self) -> None:
        """Reduce the units that owe nothing more, as far as the order allows."""
        while self.engine.sync and self.left and not self.owed[self.left[0]]:
            self.reduce_next()

    def reduce_next(self) -> None:
        unit = self.left.pop(0)
        assert unit.gradient is not None
        self.engine.do(self.engine.mover.reduce, unit, unit.gradient.take())

    def end(self) -> None:
        while self.engine.sync and self.left:  # what was not used has a gradient of zero
            self.reduce_next()
        self.engine.do(self.engine.mover.finish)
        release_all(self.engine)
        for unit in self.engine.in_order:
            if unit.gradient is not None:  # under no_sync
                show(unit)
        self.engine.backward = None


def begin_backward(engine: Any, versions: dict[Unit, int] = {}) -> Backward:  # noqa: B006
    """The backward that is running, or a new one. versions: of the units' masters, when the model was used."""
    if engine.backward is None:
        for unit, version in versions.items():
            check_unchanged(engine, unit, version)
        engine.backward = Backward(engine)
        engine.backward.begin()
    return engine.backward


def release_all(engine: Any) -> None:
    """No unit is in use any more."""
    engine.uses.in_backward.clear()
    for unit in engine.units:
        engine.do(engine.mover.release, unit)
