"""The operators that keep partial sums, with an accumulator of few bits: `emulate(accumulator=...)` runs them.

    total = 0;  for each term:  total = round(total + round(product))        round: to the accumulator's format

They stand in for PyTorch's own: products of matrices and vectors (mm, mv, dot, addmm, bmm, baddbmm), 2-d
convolutions, sums and means, forward and backward. All others, such as softmax or batch norm, add in FP32 as before.
Terms are added in the order of their index, in a convolution channel by channel; hardware has other orders, with
other errors. Here a convolution is a matrix product: its windows are laid out as columns (Chellapilla et al.,
2006).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from precision.accumulate import Round, outer_products, rounding_to, sequential
from precision.formats import FloatFormat


def add_up(round_: Round, terms: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """aten.sum, over all dimensions or over some; `run` sees to the dtype."""
    if terms.dim() == 0:
        return round_(terms)
    dims = sorted(dim % terms.dim() for dim in dims) if dims else list(range(terms.dim()))
    kept = [dim for dim in range(terms.dim()) if dim not in dims]
    shape = [1 if dim in dims else size for dim, size in enumerate(terms.shape) if keepdim or dim in kept]
    rows = terms.permute(*dims, *kept).flatten(0, len(dims) - 1)
    return sequential(rows, rows.new_zeros(rows.shape[1:]), round_).view(shape)


def product_with_vector(round_: Round, a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (..., k) and (k,): a matrix or a vector by a vector."""
    return outer_products(round_, torch.atleast_2d(a), b[:, None]).view(a.shape[:-1])


def matmul_and_add(round_: Round, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta · c + alpha · a @ b; c broadcasts."""
    return beta * c + alpha * outer_products(round_, a, b) if beta else alpha * outer_products(round_, a, b)


def mean(round_: Round, terms: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """aten.mean, likewise."""
    total = add_up(round_, terms, dims, keepdim)
    return total / (terms.numel() // max(total.numel(), 1))


def convolution(round_: Round, x: Tensor, weight: Tensor, bias: Tensor | None, *shape: Any) -> Tensor:
    """x: (batch, channels, height, width), weight: (out, channels, kernel height, kernel width)."""
    geometry = _geometry(x, weight, shape)
    columns = F.unfold(x, **geometry)  # (batch, channels · kernel, positions)
    y = outer_products(round_, weight.flatten(1), columns)
    sizes = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, dilation, padding, stride in zip(x.shape[2:], *geometry.values())
    ]
    return (y if bias is None else y + bias[:, None]).unflatten(2, sizes)


def convolution_backward(
    round_: Round, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias; None for what the mask, the last argument, leaves out."""
    *shape, mask = rest
    geometry = _geometry(x, weight, shape)
    wants_x, wants_weight, wants_bias = mask
    flat = gradient.flatten(2)  # (batch, out, positions)
    of_x = of_weight = of_bias = None
    if wants_x:
        columns = outer_products(round_, weight.flatten(1).t(), flat)
        # Where windows overlap, a pixel gets one term from each place in the kernel.
        of_x = sequential(_folded(columns, x, weight, geometry), torch.zeros_like(x), round_)
    if wants_weight:
        columns = F.unfold(x, **geometry)
        pairs = flat.transpose(0, 1).flatten(1), columns.transpose(1, 2).flatten(0, 1)
        of_weight = outer_products(round_, *pairs).view_as(weight)
    if wants_bias:
        of_bias = add_up(round_, gradient, (0, 2, 3))
    return of_x, of_weight, of_bias


def _folded(columns: Tensor, x: Tensor, weight: Tensor, geometry: dict[str, Any]) -> Any:
    """For each place in the kernel: an x that holds, at each pixel, what the windows' columns have for it there."""
    places = weight[0, 0].numel()
    for place in range(places):
        alone = torch.zeros_like(columns)
        alone[:, place::places] = columns[:, place::places]
        yield F.fold(alone, x.shape[2:], **geometry)


def _geometry(x: Tensor, weight: Tensor, shape: Sequence[Any]) -> dict[str, Any]:
    """What unfold and fold want to know. `NotImplementedError` for convolutions that they cannot do."""
    stride, padding, dilation, transposed, _, groups = shape
    if x.dim() != 4 or transposed or groups != 1:
        raise NotImplementedError(
            "emulate: with an accumulator, a convolution must be 2-d, not transposed and have one group: "
            "leave the accumulator at FP32"
        )
    return {"kernel_size": weight.shape[2:], "dilation": dilation, "padding": padding, "stride": stride}


_aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: outer_products,
    _aten.bmm.default: outer_products,
    _aten.mv.default: product_with_vector,
    _aten.dot.default: product_with_vector,
    _aten.addmm.default: matmul_and_add,
    _aten.baddbmm.default: matmul_and_add,
    _aten.sum.default: add_up,
    _aten.sum.dim_IntList: add_up,
    _aten.mean.default: mean,
    _aten.mean.dim: mean,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}


def run(fmt: FloatFormat, accumulator: FloatFormat, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs) on values of `fmt`. The operators above round their partial sums to `accumulator`."""
    if func not in _OPERATORS or not args[0].is_floating_point():
        return func(*args, **kwargs)
    dtype = kwargs.get("dtype") or args[0].dtype

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else value

    # In FP64 one operation on two numbers of few bits comes out as if it were rounded once (see `accumulate`). So does
    # a sum of two FP32 numbers, unless one is below 2^-52 of the other, and the other half-way between two numbers.
    wide = (cast(value, torch.float64) for value in args)
    result = _OPERATORS[func](rounding_to(accumulator, terms=fmt), *wide, **kwargs)
    return tuple(cast(value, dtype) for value in result) if isinstance(result, tuple) else cast(result, dtype)
