"""What one run of a function would have saved for backward: dropped, and computed again when backward asks for it.

Autograd lets two functions stand between it and the tensors that it saves: one that packs, in forward, and one
that unpacks, in backward. A `Frame` packs a tensor as its number, and unpacks a number by running the function
again up to the last tensor that is needed.
"""

import functools
import threading
import weakref
from collections.abc import Callable
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
