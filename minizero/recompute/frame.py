"""What one run of a function would have saved for backward: dropped, and computed again when backward asks for it.

Autograd lets two functions stand between it and the tensors that it saves: one that packs, in forward, and one
that unpacks, in backward. A `Frame` packs a tensor as its number, and unpacks a number by running the function
again up to the last tensor that is needed. `Inputs` are what it needs for that.
"""

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from minizero.recompute.replay import ADVICE, RecomputeMismatch


class Stop(BaseException):
    """Ends a second forward as soon as it has made what backward needs. No `except Exception` may catch it."""


class Frame:
    """of: the function, or its name. run: the same for the second time, without arguments; `with frame.dropping():`
    goes around the first.
    """

    def __init__(self, of: Any, run: Callable[[], Any]) -> None:
        self.of, self.run = of, run
        self.saved: list[tuple[Any, ...]] = []  # of each tensor that the first forward saved: shape, dtype, device
        self.asks = False  # does autograd want any of them, or only a checkpoint inside, for its inputs?
        self.values: list[Any] = []  # what the second forward saved, until it is fetched
        self.lock = threading.RLock()  # a backward has a thread for each device

    def dropping(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.drop, self.fetch)

    def drop(self, tensor: torch.Tensor) -> Any:
        if is_parameter(tensor):  # it lives anyway, and a frozen layer that saves nothing else need not run again
            return tensor.detach(), tensor._version
        self.asks = True
        return self.drop_input(tensor)

    def drop_input(self, tensor: torch.Tensor) -> int:
        """Drop what a checkpoint inside is given, and would keep."""
        self.saved.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self.saved) - 1

    def fetch(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, int):
            tensor, version = packed
            if tensor._version != version:
                raise RecomputeMismatch(
                    f"checkpoint: a parameter of shape {tuple(tensor.shape)} was changed between the forward and the "
                    f"backward of {name_of(self.of)}: step the optimizer after backward"
                )
            return tensor
        with self.lock:
            if not self.values or self.values[packed] is None:
                values = self._second_forward()
                if torch._C._current_graph_task_id() == -1:  # no backward: somebody looks at the graph
                    return values[packed]
                self.values = values
                # What this backward does not fetch goes at its end; the frame itself may go before.
                at_end = functools.partial(_clear, weakref.ref(self))
                torch.autograd.Variable._execution_engine.queue_callback(at_end)
            value, self.values[packed] = self.values[packed], None
            return value

    def _second_forward(self) -> list[Any]:
        values: list[Any] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if is_parameter(tensor):
                return tensor
            now, before = (tensor.shape, tensor.dtype, tensor.device), self.saved[len(values)]
            if now != before:
                raise RecomputeMismatch(
                    f"checkpoint: tensor {len(values)} that {name_of(self.of)} saves for backward was "
                    f"{_describe(before)} in the first forward and is {_describe(now)} in the second: {ADVICE}"
                )
            # Detached: an operator may save its own result, which would then hold itself for ever.
            values.append(tensor.detach())
            if len(values) == len(self.saved):
                raise Stop
            return values[-1]

        try:
            with saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
                self.run()
        except Stop:
            return values
        raise RecomputeMismatch(
            f"checkpoint: {name_of(self.of)} saved {len(self.saved)} tensors for backward in the first forward and "
            f"{len(values)} in the second: {ADVICE}"
        )


def name_of(function: Any) -> str:
    """For messages."""
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", type(function).__name__)


def _clear(reference: Callable[[], Frame | None]) -> None:
    frame = reference()
    if frame is not None:
        frame.values = []


def is_parameter(tensor: torch.Tensor) -> bool:
    """Is this a parameter, or a view of one (a linear layer saves its weight transposed)?"""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and isinstance(base, nn.Parameter)


def _describe(tensor: tuple[Any, ...]) -> str:
    shape, dtype, device = tensor
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


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
