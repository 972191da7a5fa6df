"""What one run of a function would have saved for backward: dropped, and computed again when backward asks for it.

Autograd lets two functions stand between it and the tensors that it saves: one that packs, in forward, and one
that unpacks, in backward. A `Frame` packs a tensor as its number:

    first forward     autograd saves t₀, t₁, …, tₙ        the frame notes each shape and hands autograd 0, 1, …, n
    backward          autograd asks for n                 the frame runs the function again, under hooks that keep
                                                          t₀ … tₙ, stops it at tₙ, and hands out tₙ
                      autograd asks for n-1, …            handed out as well, and forgotten
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from minizero import torch_private
from minizero.recompute.mismatch import ADVICE, RecomputeMismatch, name_of


class Stop(BaseException):
    """Ends a second forward as soon as it has made what backward needs. No `except Exception` may catch it."""


class Frame:
    """What one run of a function saves. The first run goes inside `with frame.dropping():`.

    of: the function, or a name for it in errors. run: runs it again, and takes no arguments.
    """

    def __init__(self, of: Any, run: Callable[[], Any]) -> None:
        self.of = of
        self.run = run
        self.saved: list[tuple[Any, ...]] = []  # shape, dtype and device of each tensor that the first forward saved
        self.autograd_saves = False  # True: autograd itself saved one of them, not only a checkpoint inside
        self.values: list[Any] = []  # what the second forward saved; None: fetched already
        self.lock = threading.RLock()  # a backward has a thread for each device

    def dropping(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.drop, self.fetch)

    def drop(self, tensor: torch.Tensor) -> Any:
        """Packs a tensor: as its number, or a parameter as itself with its version."""
        # A parameter lives anyway. And a frozen layer, which saves nothing else, need not run again.
        if is_parameter(tensor):
            return tensor.detach(), tensor._version
        self.autograd_saves = True
        return self.drop_input(tensor)

    def drop_input(self, tensor: torch.Tensor) -> int:
        """Packs the input of a checkpoint inside this one, which would keep it."""
        self.saved.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self.saved) - 1

    def fetch(self, packed: Any) -> torch.Tensor:
        """Unpacks what `drop` returned; runs the function again if its values are not there."""
        if not isinstance(packed, int):
            return self._unchanged(*packed)
        with self.lock:
            # No values: this backward asks for the first time. A value that is gone: another backward asks.
            if not self.values or self.values[packed] is None:
                values = self._second_forward()
                if torch_private.current_backward() == -1:  # no backward runs: somebody looks at the graph
                    return values[packed]
                self.values = values
                # This backward may fetch only some of the values, so the rest goes at its end. By then the frame
                # itself may be gone: the callback must not keep it.
                at_end = functools.partial(_clear, weakref.ref(self))
                torch_private.call_at_end_of_backward(at_end)
            # Each value is handed out once. From here autograd alone holds it, and frees it when it has used it.
            value, self.values[packed] = self.values[packed], None
            return value

    def _unchanged(self, parameter: torch.Tensor, version: int) -> torch.Tensor:
        if parameter._version != version:
            raise RecomputeMismatch(
                f"checkpoint: a parameter of shape {tuple(parameter.shape)} was changed between the forward and the "
                f"backward of {name_of(self.of)}: step the optimizer after backward"
            )
        return parameter

    def _second_forward(self) -> list[Any]:
        """Runs the function up to the last tensor that the first forward saved; returns all of them."""
        values: list[Any] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # `drop` gave parameters no number either.
            if is_parameter(tensor):
                return tensor
            # Both forwards save the same tensors in the same order, or they do not compute the same.
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
        # The function returned before `keep` had as many tensors as the first forward saved.
        raise RecomputeMismatch(
            f"checkpoint: {name_of(self.of)} saved {len(self.saved)} tensors for backward in the first forward and "
            f"{len(values)} in the second: {ADVICE}"
        )


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
