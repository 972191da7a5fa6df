"""The arguments of a function, kept for its second run; and walks through nested arguments.

The function may change its arguments in place, or someone may between forward and backward. Then a second run would
start from other values. Autograd counts how often a tensor was written to: this count is the tensor's version.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

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
        taken: list[torch.Tensor] = []
        self.tensors: Sequence[torch.Tensor] = taken
        self.generators: list[torch.Generator] = []
        self.packed: list[Any] | None = None  # the tensors as an outer hook packed them
        # By a tensor's id. A tensor that comes twice is one in the second run too: attention asks whether q is k.
        places: dict[int, Place] = {}

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
        # If hooks are active, they get these tensors as they would get what autograd saves. An outer checkpoint is
        # such a hook: it drops them, and fetches them by its own second run.
        hooks = torch_private.hooks_of_saved_tensors()
        if hooks is not None:
            pack, self.unpack = hooks
            outer = getattr(pack, "__self__", None)
            with torch.no_grad():
                self.packed = [*map(outer.drop_input if isinstance(outer, Frame) else pack, taken)]

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
            self.tensors = ()

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


def leaves(value: Any) -> Iterator[Any]:
    """Whatever is not itself a tuple, list or dict in nested ones."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from leaves(item)
