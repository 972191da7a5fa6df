"""Recomputation with what a user expects: any arguments, calls in calls, autocast, dropout, batch norm.

It is the second of the two ways, `by_hooks`, and gives the plain run's gradients bit for bit. Its parts: `Inputs`
keeps the arguments. `Frame` drops what the first run saves, and fetches it by a second run. `Replay` makes that
second run like the first. `Stop` ends it early.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.recompute.frame import Frame
from minizero.recompute.inputs import Inputs, may_bring_gradient
from minizero.recompute.mismatch import name_of
from minizero.recompute.replay import Replay, is_recomputing
from minizero.recompute.selective import Comparison, Keeper, Policy


def checkpoint(
    fn: Callable[..., Any], /, *args: Any, verify: bool = False, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """`fn(*args, **kwargs)`, without keeping what it computes on the way; backward runs fn again.

    Tensors are found in nested tuples, lists and dicts of the arguments; anything else is passed as it is. Under
    no_grad it just calls fn.

    The second run sees what the first run saw:

    - torch's generators, the global ones and those among the arguments (unless `preserve_rng_state` is False). In a
      thread, such as a rank of a `World`, fn draws from generators of its own, and so other numbers than without
      checkpoint. `torch.manual_seed`, `torch.set_rng_state` and PyTorch's own checkpoint reach only the global
      ones: inside such an fn they give other numbers than in the main thread.
    - autocast and the default device.
    - buffers, which the first run may change: batch norms count a batch once. Buffers are found in fn if it is a
      module, in the modules that fn has in its closure, arguments, defaults or globals, and in every module that fn
      calls. They are not found, and change twice, if fn takes a module from a list or an attribute and runs
      `module.forward(x)`. Other state is not put back, such as a plain attribute or a parameter that forward assigns.

    verify: compares the values of all operators. Without it only other shapes, dtypes or another number of saved
    tensors are noticed.

    Raises `RecomputeMismatch` if the second run differs, or would: fn changes an input in place, draws from NumPy's
    or Python's global generator, or depends on something that changes. Raises `ValueError` if a gradient is asked
    for and can go nowhere.
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

    keep: a function of the operator (`torch.ops.aten.mm.default`, …), or a list of operators; `keep_matmuls` keeps
    what takes long. Raises `TypeError` if it is neither.
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
    if torch_private.function_transform_is_active() and not is_recomputing():
        raise NotImplementedError(
            "checkpoint: torch.func's transforms (grad, vmap, jacrev, …) cannot go through it: call the function "
            "without checkpoint there, or inside set_enabled(False)"
        )
    # Note what the first run begins with.
    inputs = Inputs(fn, args, kwargs)
    replay = Replay(fn, inputs.tensors, preserve_rng_state, inputs.generators)

    # The frame calls this in backward, when the first tensor that it dropped is asked for.
    def again() -> None:
        args, kwargs = inputs.again()
        with replay.again(), observer.again() if observer else nothing:
            fn(*args, **kwargs)

    frame, nothing = Frame(fn, again), contextlib.nullcontext()
    # Only `verify` and `keep` need to see every operator.
    observer = Comparison() if verify else Keeper(keep, frame.saved) if keep else None
    with replay.first_run(), frame.dropping(), observer or nothing:
        outputs = fn(*args, **kwargs)
    for part in (observer, inputs):
        if part is not None:
            part.first_run_is_over()
    if not may_bring_gradient(outputs):
        _check_that_nothing_asks(fn, inputs, frame)
    return outputs


def _check_that_nothing_asks(fn: Any, inputs: Inputs, frame: Frame) -> None:
    """Raises `ValueError` if something that `fn` was given asks for a gradient: its outputs will bring none."""
    asking = [f"tensor {i} of its arguments" for i, requires_grad in enumerate(inputs.trains) if requires_grad]
    if isinstance(fn, nn.Module):
        asking += [f"parameter {parameter}" for parameter, p in fn.named_parameters() if p.requires_grad]
    if frame.autograd_saves:
        asking.append("something in it")
    if asking:
        raise ValueError(
            f"checkpoint: {name_of(fn)} returns nothing with a gradient, though {asking[0]} asks for one: return "
            "what is computed from it, without detach() or no_grad(), or call it without checkpoint"
        )


class Checkpointed(nn.Module):
    """`module`, of which every forward is a `checkpoint`. Its parameters' names begin with `module.`

    Other attributes are the module's: code that asks a block for one finds it here too.
    """

    def __init__(self, module: nn.Module, *, verify: bool = False, preserve_rng_state: bool = True) -> None:
        super().__init__()
        self.module = module
        self.verify = verify
        self.preserve_rng_state = preserve_rng_state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpoint(self.module, args, kwargs, self.preserve_rng_state, self.verify)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


_enabled = True


def is_enabled() -> bool:
    """Does `checkpoint` do more than call the function?"""
    return _enabled


class set_enabled:  # noqa: N801
    """`set_enabled(False)`: from now on, or inside `with`, `checkpoint` and its relatives are plain calls.

    It holds in every thread. A checkpoint that has run already still recomputes.
    """

    def __init__(self, on: bool) -> None:
        global _enabled
        self.before, _enabled = _enabled, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        global _enabled
        _enabled = self.before
