"""Recomputation (gradient checkpointing), twice in short: keep a function's inputs, not what it computes on the way.

    plain        forward: x → h₁ → h₂ → … → y, all kept      backward: y … h₂ ← h₁ ← x
    checkpoint   forward: x → … → y, only x kept             backward: x → h₁ → h₂ → … again, then as above

A block's activations then live only while its own backward runs, for one more forward of the block. There are two
ways to do it. `by_function` is one node of the graph, which runs a backward inside the backward. `by_hooks` leaves
the graph as it is, and drops what the graph saves. Both take and return tensors; `full.py` takes the second further.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from minizero.recompute.frame import Stop, stopping
from minizero.recompute.guards.mismatch import ADVICE, RecomputeMismatch, name_of
from minizero.recompute.replay import Replay


class ByFunction(torch.autograd.Function):
    """One node in the graph, whose backward runs the function again and a backward inside the backward."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.fn, ctx.replay = fn, Replay(fn, tensors)
        ctx.save_for_backward(*tensors)
        with ctx.replay.first_run():
            return fn(*tensors)  # autograd records nothing inside a Function

    @staticmethod
    @once_differentiable  # what happens inside is on no graph
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with ctx.replay.again(), torch.enable_grad():
            outputs = ctx.fn(*tensors)
        torch.autograd.backward(outputs, gradients)
        return None, *(tensor.grad for tensor in tensors)


def by_function(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Simple, with limits. All of fn runs twice. If no tensor in `tensors` requires a gradient, the parameters get
    none. `autograd.grad` and `backward(inputs=...)` see the node, not what is inside. There is no second derivative.
    """
    return ByFunction.apply(fn, *tensors)


def by_hooks(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """The graph is the plain one; only what it saves is dropped, and computed again when its backward asks for it.

    Everything that works on a graph works, and the second forward ends with the module that saved the last tensor.
    """
    replay = Replay(fn, tensors)
    values: list[Any] = []  # what the second forward saved, each with its version: how often it was written to
    saved: list[Any] = []  # shape and dtype of each tensor that the first forward would have saved

    def drop(tensor: torch.Tensor) -> int:
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def keep(tensor: torch.Tensor) -> None:
        values.append((tensor.detach(), tensor._version))

    def fetch(index: int) -> torch.Tensor:
        if not values or values[index] is None:  # for the first time, or for another backward
            values.clear()
            with replay.again(), suppress(Stop), stopping(lambda: len(values) == len(saved)), torch.enable_grad():
                with saved_tensors_hooks(keep, lambda _: _):
                    fn(*tensors)
            # Backward would read beyond a tensor that is shorter than the one that it saved.
            if [(value.shape, value.dtype) for value, _ in values[: len(saved)]] != saved:
                raise RecomputeMismatch(f"by_hooks: {name_of(fn)} saved other tensors in its second run: {ADVICE}")
        (value, version), values[index] = values[index], None
        if value._version != version:
            raise RuntimeError("by_hooks: fn changes a tensor in place that its backward needs: change a clone of it")
        return value

    with replay.first_run(), saved_tensors_hooks(drop, fetch):
        return fn(*tensors)
