"""How autograd tells an engine that a use of a unit (core.py) opens and closes, and that a gradient is there.

    forward     the unit begins                        a `Use` puts a hook on its inputs
                it ends                                and one on its outputs
    backward    it comes to what made an output        the use opens
                it comes to what made an input         the use closes

Autograd goes back through the operations of forward, the newest first. It writes each .grad as soon as it is complete.
When it comes to an operation, it first calls the hooks of the tensors that the operation made, then its prehooks.

Say block 0 makes x, and block 1 is given x. All that block 1 does is newer than what made x. So when autograd comes to
that, block 1 is done, and its gradients are written. The hook of x closes block 1. Then the prehook of what made x
opens block 0. So of a chain of blocks one is whole at a time.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from minizero import torch_private

ELSE = "the core does not serve this: take DDP, Zero1, Zero2 or Zero3 of `minizero`"  # each refusal ends so


class Use:
    """What an engine knows of one use. It holds no tensors: their hooks hold it.

    began: the number of its first operation. opened, closed: autograd's number of the last backward that opened it, and
    that closed it. (A graph may be gone through twice, or never.)
    """

    def __init__(self, engine: Any, unit: Any, inputs: Iterable[Any]) -> None:
        self.engine, self.unit = engine, unit
        self.began = torch_private.next_operation()  # the number that the next one will get
        self.opened = self.closed = -1
        for given in inputs:
            if isinstance(given, Tensor) and given.grad_fn is not None:
                given.register_hook(self.close)

    def watch(self, output: Any) -> None:
        """The forward is over: from here on its outputs tell when backward comes."""
        outputs = as_tuple(output)
        if not all(isinstance(each, Tensor) for each in outputs):
            raise TypeError(f"the unit {self.unit.name} returned neither a tensor nor a tuple of tensors: {ELSE}")
        self.open_with(outputs)

    def open_with(self, tensors: Iterable[Tensor]) -> None:
        """The gradient of any of these will open the use, if the use made the tensor: a unit may return its input."""
        for tensor in tensors:
            if torch_private.operation_of(tensor) >= self.began:  # -1: no operation made it
                tensor.grad_fn.register_prehook(self.open)  # type: ignore[union-attr]

    def open(self, _: Any) -> None:
        this = torch_private.current_backward()
        if self.opened != this:  # else another output opened it
            self.opened = this
            self.engine.open_use(self)

    def close(self, _: Any) -> None:
        # Autograd has come to what made this input. All that is newer is done, and so is all that the use did.
        this = torch_private.current_backward()
        if self.opened == this and self.closed != this:  # else another input closed it
            self.closed = this
            self.engine.close_use(self)


def arrival(engine: Any, unit: Any, number: int) -> Any:
    """`engine.arrived` as a parameter's hook. Held weakly: the garbage collector cannot see a cycle through a hook."""
    weak = weakref.ref(engine), weakref.ref(unit)

    def arrived(_: Tensor) -> None:
        engine, unit = weak[0](), weak[1]()
        if engine is not None and unit is not None:
            engine.arrived(unit, number)

    return arrived


def as_tuple(value: Any) -> tuple:
    """A unit takes and returns one value, or a tuple of values."""
    return value if isinstance(value, tuple) else (value,)
