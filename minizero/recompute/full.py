"""Recomputation with what a user expects: any arguments, calls in calls, autocast, dropout, batch norm.

It is the second of the two ways, `by_hooks`, and gives the plain run's gradients bit for bit. Its parts: `Inputs`
keeps the arguments. `Frame` drops what the first run saves, and fetches it by a second run. `Replay` makes that
second run like the first. `Stop` ends it early. two_ways.py names the source.
"""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.recompute.frame import Frame
from minizero.recompute.inputs import Inputs
from minizero.recompute.replay import Replay
from minizero.recompute.selective import Comparison, Keeper, Policy


def checkpoint(
    fn: Callable[..., Any], /, *args: Any, verify: bool = False, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """`fn(*args, **kwargs)`, without keeping what it computes on the way; backward runs fn again.

    Tensors are found in nested tuples, lists and dicts of the arguments, and in what else PyTorch's pytree knows;
    anything else is passed as it is. Under no_grad it just calls fn.

    The second run sees what the first run saw: autocast, the default device, buffers of modules, and (unless
    `preserve_rng_state` is False) torch's generators, the global ones and those among the arguments.

    The second run ends as soon as it has what backward needs. It leaves modules as it found them: buffers, attributes,
    lists and dicts among these, hooks of forward, and which parameters train. So batch norms count a batch once.
    Modules are found if fn is one, calls them, or has them in its closure, arguments, defaults or globals, but not if
    it takes one from a list or an attribute and runs `module.forward(x)`. Nothing else is put back: what fn counts in a
    Counter, in a dict inside a dict, or in a tensor that is no buffer, counts twice, as in PyTorch's checkpoint, and a
    mean that it keeps there and computes with gives other gradients. Make it a buffer.

    verify: compares the values of all operators. Without it only other shapes, dtypes or another number of saved
    tensors are noticed, and buffers beyond 64 KiB that somebody else changes in place between forward and backward.

    Raises `RecomputeMismatch` if the second run differs, or would: fn changes in place an input, or what its backward
    needs, draws from NumPy's or Python's global generator, or depends on something that changes. Raises
    `NotImplementedError` under a transform of torch.func, and if fn calls one.
    """
    return _checkpoint(fn, args, kwargs, preserve_rng_state, verify=verify)


def checkpoint_selective(
    keep: Policy,
    fn: Callable[..., Any],
    /,
    *args: Any,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`checkpoint` that keeps the results of the operators for which `keep(operator)` is true.

    keep: a function of the operator; `keep_matmuls` keeps what takes long. Of a list of operators, such as
    `[torch.ops.aten.mm.default]`, its `__contains__` is one.
    """
    return _checkpoint(fn, args, kwargs, preserve_rng_state, keep=keep)


@torch_private.never_compiled  # torch.compile would trace hooks that run in another order
def _checkpoint(
    fn: Any, args: Any, kwargs: Any, preserve_rng_state: bool, verify: bool = False, keep: Policy | None = None
) -> Any:
    if not (torch.is_grad_enabled() and is_enabled()):
        return fn(*args, **kwargs)
    # Note what the first run begins with.
    inputs = Inputs(fn, args, kwargs)
    replay = Replay(fn, [*inputs.tensors, *inputs.generators], preserve_rng_state)

    # The frame calls this in backward, when the first tensor that it dropped is asked for.
    def again() -> None:
        args, kwargs = inputs.again()
        with replay.again(), observer.again() if observer else nothing:
            fn(*args, **kwargs)

    frame, nothing = Frame(fn, again), contextlib.nullcontext()
    # Only `verify` and `keep` need to see every operator.
    observer = Comparison() if verify else Keeper(keep, frame.saved) if keep else None
    with replay.first_run(), observer or nothing:
        outputs = frame.first_run(fn, *args, **kwargs)
    if observer:
        observer.first_run_is_over(frame.may_stop)
    inputs.first_run_is_over()
    return outputs


def _of_the_module(function: Any) -> Any:
    return lambda self, *args, **kwargs: function(self.module, *args, **kwargs)


class Checkpointed(nn.Module):
    """`module`, of which every forward is a `checkpoint`. Its parameters' names begin with `module.`

    All else is the module's: code that reads, writes or deletes an attribute here, or an item, does it there.
    """

    def __init__(self, module: nn.Module, *, verify: bool = False, preserve_rng_state: bool = True) -> None:
        super().__init__()
        super().__delattr__("training")  # all but these three is the module's
        vars(self).update(verify=verify, preserve_rng_state=preserve_rng_state)
        super().__setattr__("module", module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpoint(self.module, args, kwargs, self.preserve_rng_state, self.verify)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module" or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    __delattr__ = _of_the_module(delattr)
    register_parameter = _of_the_module(nn.Module.register_parameter)
    register_buffer = _of_the_module(nn.Module.register_buffer)
    add_module = _of_the_module(nn.Module.add_module)
    __bool__ = _of_the_module(bool)
    __len__ = _of_the_module(len)
    __iter__ = _of_the_module(iter)
    __getitem__ = _of_the_module(operator.getitem)
    __setitem__ = _of_the_module(operator.setitem)
    __delitem__ = _of_the_module(operator.delitem)


_enabled = True


def is_enabled() -> bool:
    """Does `checkpoint` do more than call the function?"""
    return _enabled


def set_enabled(on: bool) -> contextlib.ExitStack:
    """`set_enabled(False)`: from now on, or inside `with`, `checkpoint` and its relatives are plain calls.

    It holds in every thread. A checkpoint that has run already still recomputes.
    """
    global _enabled
    leaving = contextlib.ExitStack()  # of a `with` block; without one nobody leaves
    leaving.callback(set_enabled, _enabled)
    _enabled = on
    return leaving
