"""The arguments of a function, kept for its second run; and walks through nested arguments.

The function may change its arguments in place, or someone may between forward and backward. Then a second run would
start from other values. Autograd counts how often a tensor was written to: its version tells.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minizero.recompute.frame import Frame, name_of
from minizero.recompute.replay import RecomputeMismatch


class Place(int):
    """Stands where a tensor was."""


class Inputs:
    """The arguments of a function, for another run. `first_run_is_over()` must follow the first."""

    def __init__(self, of: Any, *arguments: Any) -> None:
        self.of = of
        taken: list[torch.Tensor] = []
        self.tensors: Sequence[torch.Tensor] = taken
        self.generators: list[torch.Generator] = []
        self.packed: list[Any] | None = None  # the tensors, where somebody asks for what is saved
        places: dict[int, Place] = {}  # of each tensor, which may come twice: attention asks whether q is k

        def take(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                self.generators.append(value)
                return value
            # Parameters live anyway. What inference mode made cannot be saved, and nothing can change it.
            if isinstance(value, nn.Parameter) or value.is_inference():
                return value
            if id(value) not in places:
                places[id(value)] = Place(len(taken))
                taken.append(value)
            return places[id(value)]

        self.arguments = map_tensors(take, arguments, (torch.Tensor, torch.Generator))
        self.versions = [tensor._version for tensor in taken]
        self.trains = [tensor.requires_grad for tensor in taken]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None:  # as autograd would do with a tensor that it saves
            pack, self.unpack = hooks
            outer = getattr(pack, "__self__", None)
            with torch.no_grad():
                self.packed = [*map(outer.drop_input if isinstance(outer, Frame) else pack, taken)]

    def first_run_is_over(self) -> None:
        """`RecomputeMismatch` where it has changed a tensor in place."""
        for i, (tensor, version) in enumerate(zip(self.tensors, self.versions)):
            if tensor._version != version:
                raise RecomputeMismatch(
                    f"checkpoint: {name_of(self.of)} changes tensor {i} of its arguments in place, so that a second "
                    "forward would start from other values: use the out-of-place operation (inplace=False), or change "
                    "a clone"
                )
        if self.packed is not None:
            self.tensors = ()

    def again(self) -> Any:
        """The arguments. `RecomputeMismatch` where one has been changed in place."""
        tensors = self.tensors
        if self.packed is not None:
            with torch.no_grad():
                tensors = [self.unpack(packed) for packed in self.packed]
        elif [tensor._version for tensor in tensors] != self.versions:
            raise RecomputeMismatch(
                f"checkpoint: an argument of {name_of(self.of)} was changed in place between forward and backward: "
                "change a clone of it"
            )
        # Detached, so that nothing that the function does with them (a hook, say) reaches the first forward's graph.
        fresh = [tensor.detach().requires_grad_(trains) for tensor, trains in zip(tensors, self.trains)]
        return map_tensors(lambda place: fresh[place], self.arguments, Place)


def map_tensors(change: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """`change` applied to each tensor (or other `kind`) in nested tuples, lists and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        items = {key: map_tensors(change, item, kind) for key, item in value.items()}
        if type(value) is not dict:  # OrderedDict, defaultdict and others keep what they are
            items, changed = copy.copy(value), items
            for key, item in changed.items():  # Hugging Face's outputs refuse update()
                items[key] = item
        return items
    if isinstance(value, tuple | list):
        parts = [map_tensors(change, item, kind) for item in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)  # named tuples take no sequence
    return value


def may_bring_gradient(value: Any) -> bool:
    """Is there a tensor that requires one in nested tuples, lists and dicts; or something that may hide one?"""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(may_bring_gradient(item) for item in value.values())
    if isinstance(value, tuple | list):
        return any(may_bring_gradient(item) for item in value)
    return not isinstance(value, int | float | str | None)
