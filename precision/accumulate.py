"""Sums in few bits: what an accumulator keeps of each partial sum.

    total = round(total + term)          for one term after the other; round: to the accumulator's format

A partial sum is rounded to its last place, so terms below half of that place are lost. In FP16 a sum of ones
ends at 2048: the next number is 2050, and 2049, half-way, goes to the even one of the two, 2048. To first order in
u = epsilon / 2 the error of a sum of n terms is at most

    sequential   (n - 1) u Σ|x|     a term passes through all additions after it
    pairwise     log2(n) u Σ|x|     a term passes through one addition in each round of a tournament
    kahan              2 u Σ|x|     what an addition loses goes into the next term

So FP16 values are multiplied and added in FP32, and the result alone is rounded to FP16. Higham, 1993, "The accuracy
of floating point summation"; Micikevicius et al., 2018, "Mixed Precision Training", section 3.3.

Here each operation is computed in float64 and then rounded to the accumulator's format. For numbers of at most p bits
+ - · and / come out as if rounded once, because 53 ≥ 2p + 2 (Figueroa, 1995, "When is double rounding innocuous?"):
with the bits that `arithmetic` gives for formats of 16 bits, and float32 for FP32.
"""

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from precision.arrays import as_numbers
from precision.exact import exact
from precision.formats import FP16, FP32, FloatFormat

Round = Callable[[Tensor], Tensor]


# The sums. Terms and totals are float64, with values of the accumulator's format.


def sequential(terms: Iterable[Tensor], total: Tensor, round_: Round) -> Tensor:
    """total + the terms, one after the other."""
    for term in terms:
        total = round_(total + term)
    return total


def pairwise(terms: Tensor, total: Tensor, round_: Round) -> Tensor:
    """Neighbours are added, then neighbouring sums, and so on; the last sum is added to `total`. terms: (n, …)."""
    while len(terms) > 1:
        pairs = round_(terms[0:-1:2] + terms[1::2])
        terms = torch.cat([pairs, terms[-1:]]) if len(terms) % 2 else pairs
    return sequential(terms, total, round_)


def kahan(terms: Iterable[Tensor], total: Tensor, round_: Round) -> Tensor:
    """As `sequential`, but what an addition lost is first added to the next term. Kahan, 1965."""
    lost = torch.zeros_like(total)
    for term in terms:
        before, term = total, round_(term + lost)
        total = round_(before + term)
        lost = round_(term - round_(total - before))  # what was to be added, less what was
    return total


def outer_products(round_: Round, a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (…, m, k) and (…, k, n): k outer products, added up."""
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    products = (round_(a[..., :, k, None] * b[..., None, k, :]) for k in range(a.shape[-1]))
    return sequential(products, a.new_zeros(shape), round_)


METHODS: dict[str, Callable[..., Tensor]] = {"sequential": sequential, "pairwise": pairwise, "kahan": kahan}


# What users call: floating NumPy arrays or torch tensors in, FP16 values of the same kind and dtype out. Numbers that
# are no FP16 values are rounded first. `TypeError` for other dtypes, `ValueError` for shapes that do not fit.


@exact()
def sum(x: Any, dim: int | tuple[int, ...] = -1, accumulator: FloatFormat = FP32, method: str = "sequential") -> Any:
    """The sum over dimension `dim`, or a tuple of them; partial results are rounded to `accumulator`, the sum to FP16.

    method: "sequential", "pairwise" or "kahan", which gives NaN, not infinity, where a partial sum overflows.
    """
    if method not in METHODS:
        raise ValueError(f"sum: unknown method {method!r}: use one of {', '.join(METHODS)}")
    terms, round_ = _terms("sum", x, dim), rounding_to(accumulator)
    return _as_fp16(METHODS[method](terms, terms.new_zeros(terms.shape[1:]), round_), x)


@exact()
def dot(a: Any, b: Any, accumulator: FloatFormat = FP32) -> Any:
    """a · b over the last dimension: (…, n) and (…, n) to (…), as an element of `matmul` is computed."""
    x, y = _values("dot", a), _values("dot", b)
    if not (x.dim() and y.dim() and x.shape[-1] == y.shape[-1] and _fit(x.shape[:-1], y.shape[:-1])):
        raise ValueError(f"dot: {tuple(x.shape)} and {tuple(y.shape)} are not (…, n) and (…, n)")
    round_ = rounding_to(accumulator)
    products = round_(x * y).movedim(-1, 0)
    return _as_fp16(sequential(products, products.new_zeros(products.shape[1:]), round_), a)


@exact()
def matmul(a: Any, b: Any, accumulator: FloatFormat = FP32) -> Any:
    """a @ b: (…, m, k) and (…, k, n) to (…, m, n). Products are rounded to `accumulator` and added in the order of k.

    In FP32 the product of two FP16 numbers is exact: 11 bits by 11 make 22.
    """
    x, y = _values("matmul", a), _values("matmul", b)
    if min(x.dim(), y.dim()) < 2 or x.shape[-1] != y.shape[-2] or not _fit(x.shape[:-2], y.shape[:-2]):
        raise ValueError(f"matmul: {tuple(x.shape)} and {tuple(y.shape)} are not (…, m, k) and (…, k, n)")
    return _as_fp16(outer_products(rounding_to(accumulator), x, y), a)


@exact()
def softmax(x: Any, dim: int = -1, accumulator: FloatFormat = FP32) -> Any:
    """exp(x - max x) / Σ exp(x - max x) over dimension `dim`; difference, exp, partial sums and quotient are rounded.

    With FP16 accumulators the denominator of 4096 equal numbers stops at 2048, and their probabilities add up to 2.
    """
    values, round_ = _terms("softmax", x, dim), rounding_to(accumulator)
    if not len(values):  # nothing has no largest number
        return _as_fp16(values.movedim(0, dim), x)
    # exp has any number of digits, so the theorem above on two roundings does not hold for it: `quantize` rounds once.
    powers = accumulator.quantize(torch.exp(round_(values - values.amax(0))))
    total = sequential(powers, torch.zeros_like(powers[0]), round_)
    return _as_fp16(round_(powers / total).movedim(0, dim), x)


@exact()
def batch_norm_statistics(x: Any, accumulator: FloatFormat = FP32) -> tuple[Any, Any]:
    """Mean and variance of each channel: (N, C, …) to (C,) twice: float32 with values of `accumulator`.

        mean = Σ x / n        variance = Σ (x - mean)² / n        over the n values of a channel; NaN if n is 0

    With FP16 accumulators the mean of 4096 ones is 1/2, because their sum stops at 2048.
    """
    values = _values("batch_norm_statistics", x)
    if values.dim() < 2:
        raise ValueError(f"batch_norm_statistics: x must be (N, C, …), not {tuple(values.shape)}")
    values, round_ = values.movedim(1, -1).flatten(0, -2), rounding_to(accumulator)
    zero, count = values.new_zeros(values.shape[1:]), round_(values.new_tensor(float(len(values))))
    mean = round_(sequential(values, zero, round_) / count)
    deviation = round_(values - mean)
    variance = round_(sequential(round_(deviation * deviation), zero, round_) / count)
    mean, variance = mean.float(), variance.float()
    return (mean, variance) if isinstance(x, Tensor) else (mean.numpy(), variance.numpy())


# What they share.


def rounding_to(accumulator: FloatFormat, terms: FloatFormat = FP16) -> Round:
    """The function that rounds float64 results, each of one operation, to the accumulator's format.

    terms: the format of what is added.
    """
    if not isinstance(accumulator, FloatFormat):
        raise TypeError(f"accumulator must be a FloatFormat such as FP32 or FP16, not {accumulator!r}")
    # torch's conversions are quicker than `quantize`. To FP16 torch goes by way of float32, which changes nothing after
    # an operation on numbers of 11 bits, by the theorem above: 24 ≥ 2 · 11 + 2. To BF16 it would change something: the
    # terms have more than 8 bits.
    if accumulator == FP32:
        return lambda x: x.to(torch.float32).to(torch.float64)
    if accumulator == FP16 and terms.mantissa_bits <= FP16.mantissa_bits:
        return lambda x: x.to(torch.float16).to(torch.float64)
    return accumulator.quantize


def _values(name: str, x: Any) -> Tensor:
    """x as a float64 tensor of FP16 values."""
    return torch.as_tensor(FP16.quantize(as_numbers(name, x))).to(torch.float64).reshape(np.shape(x))


def _fit(a: torch.Size, b: torch.Size) -> bool:
    """Whether leading dimensions are equal, or broadcast."""
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def _terms(name: str, x: Any, dim: Any) -> Tensor:
    """x as a float64 tensor of FP16 values, with dimension `dim`, or the dimensions of a tuple as one, at the front."""
    values = _values(name, x)
    dims = dim if isinstance(dim, tuple) and name == "sum" else (dim,)
    if not all(isinstance(each, numbers.Integral) for each in dims):
        raise TypeError(f"{name}: dim must be a whole number{' or a tuple of them' * (name == 'sum')}, not {dim!r}")
    if not all(-values.dim() <= each < values.dim() for each in dims):
        raise ValueError(f"{name}: there is no dimension {dim} in shape {tuple(values.shape)}")
    if len({each % values.dim() for each in dims}) < len(dims) or not dims:
        raise ValueError(f"{name}: dim must name different dimensions, not {dim}")
    return values.movedim(dims, tuple(range(len(dims)))).flatten(0, len(dims) - 1)


def _as_fp16(result: Tensor, x: Any) -> Any:
    """`result`, rounded to FP16, in x's kind and dtype."""
    result = FP16.quantize(result)
    if isinstance(x, Tensor):
        return result.to(x.dtype)
    return result.numpy().astype(np.asarray(x).dtype)[()]
