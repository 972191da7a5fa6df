"""The arguments of a function, kept for its second run.

The function may change its arguments in place, or someone may between forward and backward. Then a second run would
start from other values. Autograd counts how often a tensor was written to: this count is the tensor's version.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from minizero import torch_private
from minizero.recompute.frame import Frame
from minizero.recompute.guards.mismatch import RecomputeMismatch, name_of


class Place(int):
    """Stands in the arguments where a tensor was: the tensor's number."""


class Inputs:
    """The arguments of a function, for another run. `first_run_is_over()` must follow the first.

    of: the function, or a name for it in errors.
    """

    def __init__(self, of: Any, *arguments: Any) -> None:
        self.of = of
        values, self.structure = tree_flatten(arguments)
        self.generators = [value for value in values if isinstance(value, torch.Generator)]
        # By its id: a tensor that comes twice is one in the second run too, since attention asks whether q is k.
        # Not taken: a parameter, which lives anyway; a tensor of inference mode, which cannot be saved, nor changed.
        tensors = [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]
        taken = {id(tensor): tensor for tensor in tensors if not tensor.is_inference()}
        numbers = {key: Place(number) for number, key in enumerate(taken)}
        self.values = [numbers.get(id(value), value) for value in values]
        self.tensors = list(taken.values())
        self.packed: list[Any] | None = None  # the tensors as an outer hook packed them
        self.versions = [tensor._version for tensor in self.tensors]
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        # If hooks are active, they get these tensors as they would get what autograd saves. An outer checkpoint is
        # such a hook: it drops them, and fetches them by its own second run.
        hooks = torch_private.hooks_of_saved_tensors()
        if hooks is not None:
            pack, self.unpack = hooks
            outer = getattr(pack, "__self__", None)
            with torch.no_grad():
                self.packed = [*map(outer.drop_input if isinstance(outer, Frame) else pack, self.tensors)]

    def first_run_is_over(self) -> None:
        """Raises `RecomputeMismatch` if the run has changed a tensor in place."""
        for i, (tensor, version) in enumerate(zip(self.tensors, self.versions)):
            if tensor._version != version:
                raise RecomputeMismatch(
                    f"checkpoint: {name_of(self.of)} changes tensor {i} of its arguments in place, so that a second "
                    "forward would start from other values: use the out-of-place operation (inplace=False), or change "
                    "a clone"
                )
        if self.packed is not None:
            self.tensors = []

    def again(self) -> Any:
        """The arguments of a second run. Raises `RecomputeMismatch` if one has been changed in place since."""
        tensors = self.tensors
        if self.packed is not None:
            with torch.no_grad():
                tensors = [self.unpack(packed) for packed in self.packed]
        elif [tensor._version for tensor in tensors] != self.versions:
            raise RecomputeMismatch(
                f"checkpoint: an argument of {name_of(self.of)} was changed in place between forward and backward: "
                "change a clone of it"
            )
        # Detached: what the function does with them, such as a hook, must not reach the first forward's graph.
        fresh = [tensor.detach().requires_grad_(trains) for tensor, trains in zip(tensors, self.trains)]
        values = [fresh[value] if isinstance(value, Place) else value for value in self.values]
        return tree_unflatten(values, self.structure)
