"""Every private name of PyTorch that minizero uses, in one place: why, and what public call would replace it.

A private name may change with any release. PyTorch has had all of these since 2.11, the oldest that minizero supports,
or longer; a CI job tries the newest PyTorch, so that a change is seen here first. `precision` and `flash` are
packages of their own, and say where they use one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Autograd.


def current_backward() -> int:
    """The number of the backward that runs in this thread, -1 if none does.

    Why: a backward that raised tells nobody; the next forward sees that none runs any more. In its place: a
    public way to ask whether backward runs.
    """
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(call: Callable[[], None]) -> None:
    """Let autograd call `call` when the backward that runs now is over. To be called from a hook.

    Why: only autograd knows that no further gradient will come. DDP and FSDP of PyTorch use it. In its place:
    a public hook at the end of backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def next_operation() -> int:
    """The number that autograd will give to the next operation of this thread.

    Why: an operation with a number from here on belongs to the unit whose forward begins now. In its place:
    a public `grad_fn.sequence_number`.
    """
    return torch._C._autograd._get_sequence_nr()


def operation_of(tensor: torch.Tensor) -> int:
    """The number of the operation that made the tensor; -1 for a leaf. See `next_operation`."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


# Storages and modules.


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the tensor's memory, the same for all its views, also while that memory is empty.

    Why: `data_ptr()` is 0 for each empty storage. In its place: `UntypedStorage.__hash__` by identity.
    """
    return tensor.untyped_storage()._cdata


def is_compiled(module: nn.Module) -> bool:
    """Did `module.compile()` compile the module, with its hooks?

    Why: what is compiled must not hold units that come and go. In its place: a public property.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_inside(module: nn.Module) -> bool:
    """Is it what `torch.compile(module)` returned, around the plain module and inside its hooks? See `is_compiled`."""
    return hasattr(module, "_orig_mod")


def not_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which `torch.compile` leaves as it is.

    Why: the public `torch.compiler.disable` loads the compiler when it decorates, which takes seconds.
    """
    return torch._disable_dynamo(call)


BatchNorm = nn.modules.batchnorm._NormBase
"""The class of all norms with running statistics. Why: they have no public base."""
