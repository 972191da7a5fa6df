"""Against norms of shards, and shapes of shards: a shard is a piece of a flat buffer, not a parameter.

fairscale#989: sharpness-aware minimisation by the norm of a shard. RLinf PR 1558: clipping by it. detr#544: what has
two dimensions is initialised, and no shard has.

Outside of an optimizer's step, a shard is a `Shard`. Its gradient, and what is computed from these, is a `Piece`. A
norm of a piece, and what is computed from that, is a `Partial`: this rank's number. It may be printed. What
`all_reduce` makes of it is a tensor like others. If nobody sums it, it may neither change a piece nor be a part of a
loss. A sum of squares, or of magnitudes, may: the gradient of the whole sum is made of those of the parts.
"""

import threading
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minizero import torch_private

NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm", "normalize", "dist"}
SUMS = {"sum", "dot", "vdot"}
# Of a sum over elements they make another one: but not a product of two, nor a quotient.
LINEAR = {"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "rsub", "__rsub__", "neg", "sum", "mean"}
LINEAR |= {"stack", "cat", "to", "float", "clone", "detach", "view", "reshape", "squeeze", "__getitem__"}
PRODUCTS = {"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__"}


class Taken(threading.local):
    """The numbers that this rank lately made of its partials: `float` gives what nobody could mark."""

    def __init__(self) -> None:
        self.numbers: deque[float] = deque(maxlen=64)


taken = Taken()


class Watched:
    """What PyTorch asks for each operation with such a tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()))
        if name in ("__get__", "__set__"):  # of an attribute
            name = f"{name} {getattr(function.__self__, '__name__', '')}"
        if isinstance(first, Shard) and name in ("dim", "ndimension", "__get__ ndim"):
            raise RuntimeError(
                "a shard has not the dimensions of a parameter: initialise the module before wrapping it. An optimizer "
                "of matrices, such as Muon, needs whole tensors: use DDP in FP32. Groups, with decay and without, are "
                "made by group_by="
            )
        given = tree_leaves((args, kwargs))
        partials = [value for value in given if isinstance(value, Partial)]
        check(name, first, given, partials)
        if name == "all_reduce" and isinstance(first, Partial):  # torch.distributed's sums in place
            mark_as(first, torch.Tensor)
        if name == "backward" and args and isinstance(args[0], Partial):  # whose hooks may ask about other tensors
            return function(mark_as(args[0], torch.Tensor), *args[1:], **kwargs)
        with torch_private.as_plain_tensors():
            if args and name in ("__format__", "__repr__"):  # an f-string's format needs the very class
                args = args[0].as_subclass(nn.Parameter if isinstance(args[0], Shard) else torch.Tensor), *args[1:]
            result = function(*args, **kwargs)
        if partials and isinstance(result, float) and result:
            taken.numbers.append(result)
        if not name.startswith(("__set__", "__get__ grad", "new_", "copy_")) and "_like" not in name:
            for made in result if isinstance(result, list | tuple) else [result]:
                if type(made) in (torch.Tensor, Piece, Partial) and made.is_floating_point():
                    mark_result(made, name, args, kwargs, partials)
        return result


class Shard(Watched, nn.Parameter):
    """One of an engine's parameters()."""

    def __deepcopy__(self, _: Any) -> nn.Parameter:
        with torch_private.as_plain_tensors():
            return nn.Parameter(self.detach().clone(), self.requires_grad)


class Piece(Watched, torch.Tensor):
    """This rank's piece of a flat tensor."""


class Partial(Watched, torch.Tensor):
    """This rank's number. order: 1 if the numbers of all ranks add up, 2 if their squares do, else another one."""

    order: Any


def mark_as(tensor: torch.Tensor, kind: type) -> Any:
    """`tensor`, which is of another class from now on."""
    tensor.__class__ = kind
    return tensor


def mark_result(made: torch.Tensor, name: str, args: Any, kwargs: Any, partials: list[Any]) -> None:
    """Say what an operation has made of pieces and partials."""
    argument = next((kwargs[key] for key in ("p", "ord", "exponent") if key in kwargs), [*args[1:2], 2][0])
    if partials:
        squared = name in ("square", "pow", "__pow__") and (argument, partials[0].order) == (2, 2)
        sums = all(partial.order == 1 for partial in partials)
        product = name in PRODUCTS and len(partials) == 1 and args and partials[0] is args[0]
        mark_as(made, Partial).order = 1 if squared or sums and (name in LINEAR or product) else None
    elif name in NORMS:
        mark_as(made, Partial).order = 2 if argument in ("fro", None) else argument
    elif name in SUMS and not made.dim():
        mark_as(made, Partial).order = 1
    elif made.dim():
        mark_as(made, Piece)


def check(name: str, first: Any, given: list[Any], partials: list[Any]) -> None:
    """`RuntimeError` if this rank's number would change a piece, or be a part of a loss."""
    targets = first if isinstance(first, list | tuple) else [first]
    if writes(name) and any(isinstance(target, Shard | Piece) for target in targets):
        if not partials and not any(isinstance(value, float) and value in taken.numbers for value in given):
            return
        what = "changes a shard or its gradient"
    elif name in ("backward", "grad") and any(partial.order != 1 for partial in partials):
        what = "is a part of a loss"
    else:
        return
    raise RuntimeError(
        f"the norm of a shard {what}: it is this rank's, and no parameter's. For the norm of all gradients call "
        "model.clip_grad_norm_(), or sum the squares by all_reduce; for the norm of each parameter use DDP"
    )


def writes(name: str) -> bool:
    """Does an operation of this name write to its first argument?"""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__ grad", "__set__ data", "__setitem__") or name.startswith("__i")


def watch(shard: torch.Tensor, *, watched: bool) -> None:
    """Let a shard and its gradient be watched, or not: an optimizer's step would take a slower way."""
    if type(shard) in (nn.Parameter, Shard):  # and no fake one
        with torch_private.as_plain_tensors():
            gradient = shard.grad
        mark_as(shard, Shard if watched else nn.Parameter)
        if gradient is not None and type(gradient) in (torch.Tensor, Piece):
            mark_as(gradient, Piece if watched else torch.Tensor)
