"""Against norms of shards, and shapes of shards: a shard is a piece of a flat buffer, not a parameter.

fairscale#989: sharpness-aware minimisation by the norm of a shard. RLinf PR 1558: clipping by it. detr#544: what has
two dimensions is initialised, and no shard has.

A *piece* is a shard, its gradient, or what is computed from these. What an operation reduces it to is a *number*, this
rank's, and so is what is computed from numbers. It may be printed, and what `all_reduce` makes of it is a tensor like
others. It may not change a piece. It may be a part of a loss if the numbers of all ranks add up, as sums of squares do:
the gradient of their sum is made of the ranks' own. Not seen: what Python computes from a number, and masks. An
optimizer's step is not watched.
"""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minizero import torch_private

NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm", "dist", "normalize"}
# Without underscores: of numbers that add up they make another one.
LINEAR = {"add", "radd", "iadd", "sub", "rsub", "neg", "sum", "mean", "stack", "cat", "to", "float", "clone", "detach"}
LINEAR |= {"view", "reshape", "getitem"}
ADVICE = (
    "it is this rank's, and no parameter's. For the norm of all gradients call model.clip_grad_norm_(), or sum the "
    "squares by all_reduce; for the norm of each parameter use DDP"
)
THIS_THREAD = threading.local()  # .floats: what this rank lately made of its numbers; nothing can be noted on a float


class Watched:
    """What PyTorch asks for each operation with such a tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        if name in ("__get__", "__set__"):
            attribute = function.__self__
            name = f".{getattr(attribute, 'fget', attribute).__name__}"  # of a property that of its function
        if cls is Shard and name in ("dim", "ndimension", ".ndim"):
            raise RuntimeError(
                "a shard has not the dimensions of a parameter: initialise the module before wrapping it. An optimizer "
                "of matrices, such as Muon, needs whole tensors: use DDP in FP32. Groups, with decay and without, are "
                "made by group_by="
            )
        if name[0] == "." and name != ".data":
            with torch_private.as_plain_tensors():
                return function(*args)
        given = [x for each in (*args, *kwargs.values()) for x in (each if isinstance(each, list | tuple) else [each])]
        numbers: list[Any] = [x for x in given if isinstance(x, Number)]
        floats = vars(THIS_THREAD).setdefault("floats", deque(maxlen=64))
        if numbers and name in ("backward", "grad", "all_reduce"):  # the last is torch.distributed's, in place
            if name != "all_reduce" and any(number.power != 1 for number in numbers):
                raise RuntimeError(f"the norm of a shard is a part of a loss: {ADVICE}")
            for number in numbers:
                number.__class__ = torch.Tensor
            return function(*args, **kwargs)  # whose hooks may ask about other tensors
        with torch_private.as_plain_tensors():
            if name in ("__format__", "__repr__", "__reduce_ex__"):  # which look at the very class
                args = args[0].as_subclass(torch.Tensor), *args[1:]
            result = function(*args, **kwargs)
            if numbers and isinstance(result, float) and result:
                if math.frexp(result)[0] * 2**11 % 1:  # else it may be a constant of the loop, such as 0.5, by chance
                    floats.append(abs(result))
            made = result if isinstance(result, list | tuple) else [result]
            made = [x for x in made if x is None or isinstance(x, torch.Tensor) and x.is_floating_point()]
            pieces = [x for x in given if isinstance(x, Shard | Piece)]
            by_numbers = numbers or any(isinstance(x, float) and abs(x) in floats for x in given)
            if pieces and by_numbers and any(new is None or new.shape in [p.shape for p in pieces] for new in made):
                raise RuntimeError(f"the norm of a shard changes a shard or its gradient: {ADVICE}")
            if name.startswith(("new_", "copy_")) or "_like" in name:  # whose result is no function of this tensor
                return result
            flat = any(piece.dim() for piece in pieces)
            for new in made:
                if type(new) in (torch.Tensor, Number):  # not None, and no piece that was written to
                    reduced = flat and not new.dim() and new._base is None  # not one element of a piece
                    new.__class__ = Number if reduced or name in NORMS or not pieces else Piece
                    new.power = power_of(name, args, kwargs, numbers)
        return result


class Shard(Watched, nn.Parameter):
    """One of an engine's parameters()."""


class Piece(Watched, torch.Tensor):
    """Computed from shards and their gradients, number by number."""


class Number(Watched, torch.Tensor):
    """This rank's. power: these powers of all ranks' numbers add up, 1 of sums, p of p-norms; None: nobody knows."""

    power: Any


def power_of(name: str, args: Any, kwargs: Any, numbers: list[Any]) -> float | None:
    """The `power` of what an operation makes: of `numbers`, or of pieces alone."""
    exponent = next((kwargs[key] for key in ("p", "ord", "exponent") if key in kwargs), [*args[1:2], 2][0])
    if not numbers:
        norm = (2 if exponent in ("fro", None) else exponent) if name in NORMS else None
        return 1 if name in ("sum", "dot", "vdot") or kwargs.get("reduction") == "sum" else norm
    if name in ("square", "pow", "__pow__"):
        return 1 if exponent == numbers[0].power else None
    add_up, name = all(number.power == 1 for number in numbers), name.strip("_")
    scaled = name in ("mul", "rmul") or name in ("div", "truediv", "true_divide") and args[0] is numbers[0]
    return 1 if add_up and (name in LINEAR or scaled and len(numbers) == 1) else None


def watch(unit: Any, *, watched: bool) -> None:
    """Let the shards of a unit and their gradients be watched, or not: an optimizer's step would take a slower way."""
    before, after = (nn.Parameter, Shard) if watched else (Shard, nn.Parameter)
    for shard in unit.shards if unit.trains and not unit.unsharded else ():
        if type(shard) is before:  # and no fake one
            shard.__class__ = nn.Parameter  # so that nobody is asked for .grad
            if shard.grad is not None:
                shard.grad.__class__ = Piece if watched else torch.Tensor
            shard.__class__ = after


@contextlib.contextmanager
def watching(units: Iterable[Any]) -> Iterator[None]:
    """Around a closure: it is the loop's code, in the middle of a step."""
    for unit in units:
        watch(unit, watched=True)
    try:
        yield
    finally:
        for unit in units:
            watch(unit, watched=False)
