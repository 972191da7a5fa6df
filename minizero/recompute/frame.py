"""What one run of a function would have saved for backward: dropped, and computed again when backward asks for it.

Autograd lets two functions stand between it and the tensors that it saves: one that packs, in forward, and one
that unpacks, in backward. A `Frame` packs a tensor as its number:

    first forward     autograd saves t₀, t₁, …, tₙ        the frame notes each shape and hands autograd 0, 1, …, n
    backward          autograd asks for n                 the frame runs the function again, under hooks that keep
                                                          t₀ … tₙ, stops it at tₙ, and hands out tₙ
                      autograd asks for n-1, …            handed out as well, and forgotten
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from minizero import torch_private
from minizero.recompute.guards.mismatch import ADVICE, TRANSFORMS, RecomputeMismatch, name_of
from minizero.recompute.replay import is_recomputing


class Stop(BaseException):
    """Ends a second forward as soon as it has made what backward needs. No `except Exception` may catch it."""


@contextlib.contextmanager
def stopping(when: Callable[[], bool]) -> Iterator[None]:
    """Raises `Stop` as soon as a module has run in this thread and `when()` is true. Suppress it outside, not in here:
    from Python 3.12 on a generator that swallows an exception keeps it alive, with all that its frames hold.

    The hooks of the module do not run: in stage 3 they would free the parameters that backward needs.
    """
    thread = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() == thread and when():
            raise Stop

    handle = register_module_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()


class Frame:
    """What one run of a function saves. `first_run` is the first.

    of: the function, or a name for it in errors. run: runs it again, and takes no arguments.
    """

    def __init__(self, of: Any, run: Callable[[], Any]) -> None:
        self.of = of
        self.run = run
        self.saved: list[tuple[Any, ...]] = []  # shape, dtype and device of each tensor that the first forward saved
        self.may_stop = True  # False: the operator that saved last may not have made what it saved
        self.unfinished = -1  # the operator that last saved a tensor without gradient
        self.versions: list[Any] = []  # while the first run goes on: of each tensor, and a weak reference to it
        self.written: list[int] = []  # those of them that the first run wrote to after it had saved them
        self.values: list[Any] = []  # what the second forward saved, with its version; None: fetched already
        self.lock = threading.RLock()  # a backward has a thread for each device

    def first_run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch_private.function_transform_is_active() and not is_recomputing():
            raise NotImplementedError(TRANSFORMS)
        try:
            with saved_tensors_hooks(self.drop, self.fetch):
                output = fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # PyTorch's words if fn calls a transform
                raise NotImplementedError(TRANSFORMS) from error
            raise
        # A second forward that stops would not come to a write behind the last tensor.
        for number, (reference, version) in enumerate(self.versions):
            if (tensor := reference()) is not None and tensor._version != version:
                self.written.append(number)
        self.versions = []
        return output

    @torch_private.never_compiled
    def drop(self, tensor: torch.Tensor) -> Any:
        """Packs a tensor: as its number, or a parameter as itself with its version."""
        # A parameter lives anyway. And a frozen layer, which saves nothing else, need not run again.
        if is_parameter(tensor):
            return tensor.detach(), tensor._version
        number, operator = self.drop_input(tensor), torch_private.next_operation()
        # RReLU saves its noise before it draws it. A tensor that requires a gradient has been made before.
        if not tensor.requires_grad:
            self.unfinished = operator
        self.may_stop = operator != self.unfinished
        return number

    def drop_input(self, tensor: torch.Tensor) -> int:
        """Packs the input of a checkpoint inside this one, which would keep it."""
        self.may_stop = True
        self.versions.append((weakref.ref(tensor), tensor._version))
        self.saved.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self.saved) - 1

    @torch_private.never_compiled
    def fetch(self, packed: Any) -> torch.Tensor:
        """Unpacks what `drop` returned; runs the function again if its values are not there."""
        if not isinstance(packed, int):
            return self._unchanged(*packed)
        if packed in self.written:
            self._refuse(self.saved[packed][0])
        with self.lock:
            # No values: this backward asks for the first time. A value that is gone: another backward asks.
            if not self.values or self.values[packed] is None:
                values = self._second_forward()
                if torch_private.current_backward() == -1:  # no backward runs: somebody looks at the graph
                    return self._unchanged(*values[packed])
                self.values = values
                # This backward may fetch only some of the values: the rest goes at its end, if the frame still lives.
                torch_private.call_at_end_of_backward(functools.partial(_clear, weakref.ref(self)))
            # Each value is handed out once. From here autograd alone holds it, and frees it when it has used it.
            value, self.values[packed] = self.values[packed], None
            return self._unchanged(*value)

    def _unchanged(self, tensor: torch.Tensor, version: int) -> torch.Tensor:
        if tensor._version != version:
            self._refuse(tensor.shape)
        return tensor

    def _refuse(self, shape: torch.Size) -> None:
        raise RecomputeMismatch(
            f"checkpoint: a tensor or parameter of shape {tuple(shape)} was changed in place after {name_of(self.of)} "
            "saved it for backward: use the out-of-place operation there, and step the optimizer after backward"
        )

    def _second_forward(self) -> list[Any]:
        """Runs the function up to the last tensor that the first forward saved; returns all of them."""
        values: list[Any] = []
        hooks = saved_tensors_hooks(functools.partial(self.keep, values), lambda _: _)
        end = contextlib.nullcontext() if self.may_stop else stopping(lambda: len(values) == len(self.saved))
        with contextlib.suppress(Stop), end, hooks, torch.enable_grad():
            self.run()
        if len(values) < len(self.saved):
            raise RecomputeMismatch(
                f"checkpoint: {name_of(self.of)} saved {len(self.saved)} tensors for backward in the first forward and "
                f"{len(values)} in the second: {ADVICE}"
            )
        return values

    @torch_private.never_compiled
    def keep(self, values: list[Any], tensor: torch.Tensor) -> torch.Tensor:
        """Packs a tensor of the second forward: in `values` with its version, where `fetch` finds it."""
        # `drop` gave parameters no number either.
        if is_parameter(tensor):
            return tensor
        if len(values) == len(self.saved):
            raise Stop
        # Both forwards save the same tensors in the same order, or they do not compute the same.
        now, before = (tensor.shape, tensor.dtype, tensor.device), self.saved[len(values)]
        if now != before:
            raise RecomputeMismatch(
                f"checkpoint: tensor {len(values)} that {name_of(self.of)} saves for backward was "
                f"{_describe(before)} in the first forward and is {_describe(now)} in the second: {ADVICE}"
            )
        # Detached: an operator may save its own result, which would then hold itself for ever.
        tensor = tensor.detach()
        values.append((tensor, tensor._version))
        if self.may_stop and len(values) == len(self.saved):
            raise Stop
        return tensor


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
