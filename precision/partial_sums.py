"""The operators that keep partial sums, with an accumulator of few bits: `emulate(accumulator=...)` runs them.

    total = 0;  for each term:  total = round(total + round(product))        round: to the accumulator's format

They stand in for PyTorch's own: products of matrices and vectors (mm, mv, dot, addmm, bmm, baddbmm and relatives), 2-d
convolutions, sums, means, and what adds terms to places (scatter_add, an embedding's gradient), forward and backward.
Other sums, means and products are refused. What autocast computes in FP32 (softmax, norms, losses) adds in FP32 as
before; so do variances, interpolations, and the backward of a maximum pool.
Terms are added in the order of their index, in a convolution channel by channel; hardware has other orders, with
other errors. Here a convolution is a matrix product: its windows are laid out as columns (Chellapilla et al.,
2006).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from precision.accumulate import Round, outer_products, rounding_to, sequential
from precision.formats import FloatFormat


def add_up(round_: Round, terms: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
    """aten.sum, over all dimensions or over some."""
    if terms.dim() == 0:
        return round_(terms)
    dims = sorted(dim % terms.dim() for dim in dims) if dims else list(range(terms.dim()))
    kept = [dim for dim in range(terms.dim()) if dim not in dims]
    shape = [1 if dim in dims else size for dim, size in enumerate(terms.shape) if keepdim or dim in kept]
    rows = terms.permute(*dims, *kept).flatten(0, len(dims) - 1)
    return sequential(rows, rows.new_zeros(rows.shape[1:]), round_).view(shape)


def product(round_: Round, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of matrices or of batches; a vector is a matrix of one row, or of one column."""
    if b.dim() > 1:
        return outer_products(round_, a, b)
    return outer_products(round_, torch.atleast_2d(a), b[:, None]).view(a.shape[:-1])


def product_and_add(round_: Round, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta · c + alpha · a @ b; c broadcasts."""
    return beta * c + alpha * product(round_, a, b) if beta else alpha * product(round_, a, b)


def mean(round_: Round, terms: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
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
        # Where windows overlap, a pixel gets one term from each place in the kernel. What lies on the border is 0 here.
        places = F.unfold((places_in(x) + 1).double(), **geometry).long()
        of_x = add_at(round_, torch.zeros_like(x), places[places > 0] - 1, columns[places > 0])
    if wants_weight:
        columns = F.unfold(x, **geometry)
        pairs = flat.transpose(0, 1).flatten(1), columns.transpose(1, 2).flatten(0, 1)
        of_weight = outer_products(round_, *pairs).view_as(weight)
    if wants_bias:
        of_bias = add_up(round_, gradient, (0, 2, 3))
    return of_x, of_weight, of_bias


def _geometry(x: Tensor, weight: Tensor, shape: Sequence[Any]) -> dict[str, Any]:
    """What unfold and fold want to know. `NotImplementedError` for convolutions that they cannot do."""
    stride, padding, dilation, transposed, _, groups = shape
    if x.dim() != 4 or transposed or groups != 1:
        raise NotImplementedError(
            "emulate: with an accumulator, a convolution must be 2-d, not transposed and have one group: "
            "leave the accumulator at FP32"
        )
    return {"kernel_size": weight.shape[2:], "dilation": dilation, "padding": padding, "stride": stride}


# Terms that are added to places, of which several may be one: an index into x as if it were flat.


def add_at(round_: Round, x: Tensor, places: Tensor, terms: Tensor) -> Tensor:
    """x with each of the terms added at its place, in their order."""
    places, order = places.flatten().sort(stable=True)
    terms, total = terms.flatten()[order], x.flatten().clone()
    turn = torch.arange(len(places), device=x.device) - torch.searchsorted(places, places)
    for i in range(int(turn.max()) + 1 if len(turn) else 0):  # all places have their i-th term at once
        place, term = places[turn == i], terms[turn == i]
        total[place] = round_(total[place] + term)
    return total.view(x.shape)


def places_in(x: Tensor) -> Tensor:
    """The place of each number of x."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)


def index_put(round_: Round, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *_: Any) -> Tensor:
    """x[indices] += values, which backward of x[indices] is made of; without `accumulate` nothing is added."""
    if not accumulate:
        return NotImplemented
    places = places_in(x)[tuple(slice(None) if index is None else index for index in indices)]
    return add_at(round_, x, places, values.expand(places.shape))


def gradient_of_embedding(
    round_: Round, gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    """aten.embedding_dense_backward: each token's gradient is added to its word's row."""
    total, indices = gradient.new_zeros(rows, gradient.shape[-1]), indices.flatten()
    counts = indices.bincount(minlength=rows)[indices, None] if by_frequency else 1
    terms = gradient.reshape(-1, gradient.shape[-1]) / counts * (indices != padding)[:, None]
    return add_at(round_, total, places_in(total)[indices], terms)


_OPERATORS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["mm", "bmm", "mv", "dot", "vdot"], product),
    **dict.fromkeys(["addmm", "baddbmm", "addmv"], product_and_add),
    "sum": add_up,
    "nansum": lambda round_, x, *rest, **k: add_up(round_, x.where(~x.isnan(), 0), *rest, **k),
    "trace": lambda round_, x: add_up(round_, x.diagonal()),
    "mean": mean,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    # Backward of gather and index_select is made of these two.
    "scatter_add": lambda round_, x, dim, index, terms: add_at(
        round_, x, places_in(x).gather(dim, index), terms[tuple(map(slice, index.shape))]
    ),
    "index_add": lambda round_, x, dim, index, terms, alpha=1: add_at(
        round_, x, places_in(x).index_select(dim, index), alpha * terms
    ),
    "index_put": index_put,
    "put": lambda round_, x, index, terms, add=False: add_at(round_, x, index, terms) if add else NotImplemented,
    "embedding_dense_backward": gradient_of_embedding,
}
# They add up, too, or multiply matrices, inside of one kernel; the second ones only by a reduction of these names.
_REFUSED = re.compile(
    "avg_pool|embedding_bag|segment_reduce|^_trilinear|col2im|unfold_backward|bincount|scaled_dot_product|_attention_"
    "|multi_head_attention|encoder_layer|rnn|addmm_activation|^addbmm|cumsum"
)
_REDUCTIONS = {"scatter", "scatter_reduce", "index_reduce"}, {"add", "sum", "mean"}


def run(fmt: FloatFormat, accumulator: FloatFormat, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs) on values of `fmt`. The operators above round their partial sums to `accumulator`.

    `NotImplementedError` from others that add up or multiply matrices.
    """
    name = func._schema.name.removeprefix("aten::")
    operator, given = name.removesuffix("_"), [*args, *kwargs.values()]
    dtypes = [kwargs["dtype"]] if kwargs.get("dtype") else [x.dtype for x in args if isinstance(x, Tensor)]
    dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
    by_name = operator in _REDUCTIONS[0] and any(isinstance(each, str) and each in _REDUCTIONS[1] for each in given)
    if dtypes and (_REFUSED.search(operator) or by_name):
        raise NotImplementedError(
            f"emulate: {func} would add in FP32, not in the accumulator: write it with sums, means and products of "
            "matrices, or leave the accumulator at FP32"
        )
    if not dtypes or operator not in _OPERATORS:
        return func(*args, **kwargs)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    # In FP64 one operation on two numbers of few bits comes out as if it were rounded once (see `accumulate`). So does
    # a sum of two FP32 numbers, unless one is below 2^-52 of the other, and the other half-way between two numbers.
    wide = [cast(value, torch.float64) for value in args]
    options = {option: value for option, value in kwargs.items() if option not in ("out", "dtype")}
    target = kwargs.get("out", args[0] if operator != name else None)
    result = _OPERATORS[operator](rounding_to(accumulator, terms=fmt), *wide, **options)
    if result is NotImplemented:
        return func(*args, **kwargs)
    if target is not None:
        return target.resize_(result.shape).copy_(result)
    return tuple(cast(value, dtypes[0]) for value in result) if isinstance(result, tuple) else cast(result, dtypes[0])
