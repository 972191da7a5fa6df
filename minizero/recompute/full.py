"""Recomputation (gradient checkpointing): keep a function's inputs instead of all it computes on the way.

    plain        forward: x → h₁ → h₂ → … → y, all kept      backward: y … h₂ ← h₁ ← x
    checkpoint   forward: x → … → y, only x kept             backward: x → h₁ → h₂ → … again, then as above

A block's activations then live only while its own backward runs, for one more forward of the block.
There are two ways to do it, `by_function` and `by_hooks` below. `checkpoint` is the second with what a user
expects; it gives the plain run's gradients bit for bit. Its parts: `Inputs` keeps the arguments, `Frame` drops what
the first run saves and fetches it by a second, `Replay` makes that second run like the first, `Stop` ends it early.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from minizero.recompute.frame import Frame, Inputs, Stop, may_bring_gradient, name_of
from minizero.recompute.replay import Replay, is_enabled, is_recomputing
from minizero.recompute.selective import Comparison, Kept, Policy

# The two ways, for tensors in and out.


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
    """Simple, with limits. All of fn runs twice; one of `tensors` must require a gradient, or there is none for the
    parameters either; `autograd.grad` and `backward(inputs=...)` see the node, not what is inside; and there is no
    second derivative.
    """
    return ByFunction.apply(fn, *tensors)


def by_hooks(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """The graph is the plain one; only what it saves is dropped, and computed again when its backward asks for it.

    Everything that works on a graph works, and the second forward stops before the last products.
    """
    replay = Replay(fn, tensors)
    values: list[Any] = []  # what the second forward saved
    saved = 0  # how many tensors the first forward would have saved

    def drop(tensor: torch.Tensor) -> int:
        nonlocal saved
        saved += 1
        return saved - 1

    def keep(tensor: torch.Tensor) -> None:
        values.append(tensor.detach())
        if len(values) == saved:
            raise Stop

    def fetch(index: int) -> torch.Tensor:
        if not values or values[index] is None:  # for the first time, or for another backward
            values.clear()
            with replay.again(), saved_tensors_hooks(keep, lambda _: _), torch.enable_grad():
                with contextlib.suppress(Stop):
                    fn(*tensors)
        value, values[index] = values[index], None
        return value

    with replay.first_run(), saved_tensors_hooks(drop, fetch):
        return fn(*tensors)


# The second way, in full.


def checkpoint(
    fn: Callable[..., Any], /, *args: Any, verify: bool = False, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """`fn(*args, **kwargs)`, without keeping what it computes on the way; backward runs fn again.

    Tensors are found in nested tuples, lists and dicts of the arguments; anything else is passed as it is. The
    second run sees the same state of torch's generators, the global ones and those among the arguments (unless
    `preserve_rng_state` is False), the same autocast and default device, and the same buffers, which the first run may
    change: batch norms count a batch once. (Buffers are found in fn if it is a module, in the modules that fn has in
    its closure, arguments, defaults or globals, and in every module that fn calls. Those of a module that fn finds in a
    list or an attribute, and runs by `module.forward(x)`, change twice. Other state, such as a plain attribute or a
    parameter that forward assigns, is not put back.)
    Threads, as the ranks of a `World`, share the global generators; there fn draws from generators of its own, and so
    other numbers than without checkpoint. `torch.manual_seed`, `torch.set_rng_state` and PyTorch's own checkpoint
    reach only the global ones: inside such an fn they give other numbers than in the main thread.
    `verify` compares the values of all operators; without it only their shapes, dtypes and number can tell. Without
    grad mode it is fn.

    `RecomputeMismatch` where the second run differs, or would: fn changes an input in place, draws from NumPy's or
    Python's global generator, depends on something that changes. `ValueError` where a gradient is asked for and can go
    nowhere.
    """
    return _checkpoint(fn, args, kwargs, preserve_rng_state, verify=verify)


def checkpoint_selective(
    keep: Policy | Collection[Any],
    fn: Callable[..., Any],
    /,
    *args: Any,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`checkpoint` that keeps the results of the operators for which `keep(operator)` is true.

    keep: a function of the operator (`torch.ops.aten.mm.default`, …), or a list of operators; `keep_matmuls` keeps what
    takes long. `TypeError` if it is neither.
    """
    if not callable(keep) or isinstance(keep, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        operators = list(keep) if isinstance(keep, Collection) else [None]
        if not all(isinstance(operator, torch._ops.OpOverload) for operator in operators):
            raise TypeError(
                "checkpoint_selective: keep must be a function of an operator or a list of operators, such as "
                f"torch.ops.aten.mm.default, not {keep!r}"
            )
        keep = operators.__contains__
    return _checkpoint(fn, args, kwargs, preserve_rng_state, keep=keep)


def _checkpoint(
    fn: Any, args: Any, kwargs: Any, preserve_rng_state: bool, verify: bool = False, keep: Policy | None = None
) -> Any:
    if not (torch.is_grad_enabled() and is_enabled()):
        return fn(*args, **kwargs)
    if torch._C._are_functorch_transforms_active() and not is_recomputing():
        raise NotImplementedError(
            "checkpoint: torch.func's transforms (grad, vmap, jacrev, …) cannot go through it: call the function "
            "without checkpoint there, or inside set_enabled(False)"
        )
    inputs = Inputs(fn, args, kwargs)
    replay = Replay(fn, inputs.tensors, preserve_rng_state, inputs.generators)

    def again() -> None:
        args, kwargs = inputs.again()
        with replay.again(), mode.again() if mode else nothing:
            fn(*args, **kwargs)

    frame, nothing = Frame(fn, again), contextlib.nullcontext()
    mode = Comparison() if verify else Kept(keep, frame.saved) if keep else None
    with replay.first_run(), frame.dropping(), mode or nothing:
        outputs = fn(*args, **kwargs)
    for part in (mode, inputs):
        if part is not None:
            part.first_run_is_over()
    if not may_bring_gradient(outputs):
        _check_that_nothing_asks(fn, inputs, frame)
    return outputs


def _check_that_nothing_asks(fn: Any, inputs: Inputs, frame: Frame) -> None:
    """`ValueError` where something that `fn` was given asks for a gradient, since its outputs will bring none."""
    asking = [f"tensor {i} of its arguments" for i, requires_grad in enumerate(inputs.trains) if requires_grad]
    if isinstance(fn, nn.Module):
        asking += [f"parameter {parameter}" for parameter, p in fn.named_parameters() if p.requires_grad]
    if frame.asks:
        asking.append("something in it")
    if asking:
        raise ValueError(
            f"checkpoint: {name_of(fn)} returns nothing with a gradient, though {asking[0]} asks for one: return "
            "what is computed from it, without detach() or no_grad(), or call it without checkpoint"
        )


class Checkpointed(nn.Module):
    """`module`, of which every forward is a `checkpoint`. Parameters keep their names behind `module.`

    Other attributes are the module's: whoever asks a block for one finds it here.
    """

    def __init__(self, module: nn.Module, *, verify: bool = False, preserve_rng_state: bool = True) -> None:
        super().__init__()
        self.module, self.verify, self.preserve_rng_state = module, verify, preserve_rng_state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpoint(self.module, args, kwargs, self.preserve_rng_state, self.verify)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
