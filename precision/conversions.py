"""Conversions of whole arrays as users bring them: what may come in, how it goes through, and what comes out.

    encode    check → for each piece: bits of float32 or float64 → `fast.encode_integers` → the result's place
    decode    check → for each piece: patterns → `fast.decode_integers` → the result's place

An array goes through `fast` in pieces that a processor's cache holds. That is faster than sending everything through
memory at each step, and bounds what is needed beyond input and output, whatever the size.
These are the methods `encode`, `decode` and `quantize` of `formats.FloatFormat`, whose docstrings say the rest.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch

from precision.arrays import (
    Array,
    as_numbers,
    as_patterns,
    cast,
    dtype_of,
    empty_like,
    in_shape_of,
    local,
    pieces,
    put,
    random_key,
    view,
)
from precision.exact import exactly
from precision.fast import FLOAT32, FLOAT64, Options, decode_integers, encode_integers, is_within_float32, widened
from precision.layout import BitLayout
from precision.one_number import ROUNDINGS


@dataclass(frozen=True)
class Flags:
    """What rounding did to each number: boolean arrays of the result's shape, NumPy's or torch's as the result is.

    inexact: the result differs from what was rounded.
    overflow: rounded as if exponents had no end, the result is beyond the largest number.
    underflow: it is below the smallest normal one, and inexact.
    invalid: a signalling NaN came in, or the operation has no value.
    divide_by_zero: a finite number other than 0 was divided by 0.
    """

    inexact: Any
    underflow: Any
    overflow: Any
    invalid: Any
    divide_by_zero: Any


@exactly
def encode(x: Any, fmt: BitLayout, rounding: str, *, return_flags: bool, seed: int | None, flush_to_zero: bool) -> Any:
    """The bits of x, and with return_flags `Flags`: see `FloatFormat.encode`."""
    options = _options("encode", rounding, seed, flush_to_zero, return_flags)
    numbers = as_numbers("encode", x)
    bits = empty_like(numbers, f"uint{8 if fmt.width <= 8 else 16 if fmt.width <= 16 else 32}")
    if _goes_in_pairs(numbers, bits, options):
        # Not at the top: it imports torch's compiler, and so Triton, before `flash` could ask for its interpreter.
        from precision.pairs import encode_pairs

        return encode_pairs(numbers, fmt, options).reshape(x.shape)
    flags = [empty_like(numbers, "bool") for _ in range(5)] if return_flags else []
    for start, index in pieces(numbers):
        code, raised = encode_integers(_integers(numbers[index], fmt), start, fmt, options)
        put(bits, index, code)
        for whole, part in zip(flags, raised):
            put(whole, index, part)
    bits, *flags = (in_shape_of(x, result) for result in (bits, *flags))
    return (bits, Flags(*flags)) if return_flags else bits


@exactly
def decode(bits: Any, fmt: BitLayout) -> Any:
    """The numbers that bits stand for: see `FloatFormat.decode`."""
    patterns = as_patterns("decode: bits", bits, fmt.width)
    carrier = FLOAT32 if is_within_float32(fmt) else FLOAT64
    numbers = empty_like(patterns, carrier.floating)
    for _, index in pieces(patterns):
        put(numbers, index, decode_integers(local(patterns[index]), fmt, carrier))
    return in_shape_of(bits, numbers)


@exactly
def quantize(x: Any, fmt: BitLayout, rounding: str, *, seed: int | None, flush_to_zero: bool) -> Any:
    """x rounded to numbers of the format, in x's dtype: see `FloatFormat.quantize`."""
    options = _options("quantize", rounding, seed, flush_to_zero)
    numbers = as_numbers("quantize", x)
    result = empty_like(numbers, dtype_of(numbers))
    carrier = FLOAT64 if dtype_of(numbers) == "float64" else FLOAT32
    for start, index in pieces(numbers):
        code, _ = encode_integers(_integers(numbers[index], fmt), start, fmt, options)
        put(result, index, decode_integers(code, fmt, carrier))
    return in_shape_of(x, result)


def _integers(x: Array, fmt: BitLayout) -> Array:
    """The bits of float32 or float64 numbers as int32 or int64."""
    is_float64 = dtype_of(x) == "float64"
    x = cast(x, "float64" if is_float64 else "float32")
    # A format of more range than float32 has normal numbers where float32 has subnormals or none.
    if not is_float64 and (fmt.min_exponent < -126 or fmt.max_exponent > 127):
        x = widened(x)
    return local(view(x, f"int{8 * x.itemsize}"))


def _goes_in_pairs(numbers: Array, bits: Array, options: Options) -> bool:
    """Whether `encode_pairs` may be used: under torch.compile, on a CPU, from float32 to 16 bits, without flags."""
    return (
        isinstance(numbers, torch.Tensor)
        and torch.compiler.is_compiling()
        and numbers.device.type == "cpu"
        and numbers.dtype == torch.float32
        and numbers.is_contiguous()
        and numbers.numel() % 2 == 0
        and bits.dtype == torch.uint16
        and options.rounding != "stochastic"
        and not options.return_flags
    )


def _options(
    function: str, rounding: str, seed: int | None, flush_to_zero: bool, return_flags: bool = False
) -> Options:
    """The options, checked. `ValueError` for an unknown rounding, and for a seed that no rounding would use."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"{function}: unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
    if rounding != "stochastic":
        if seed is not None:
            raise ValueError(f"{function}: seed={seed!r} is for rounding='stochastic', not for {rounding!r}")
        key = 0
    elif seed is None:
        key = random_key(int(torch.randint(2**62, ())))
    else:
        key = random_key(operator.index(seed))
    return Options(rounding, key, flush_to_zero, return_flags)
