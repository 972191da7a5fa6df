"""`encode`, `decode` and `quantize` of `FloatFormat`: what may come in, how it goes through, and what goes out.

Arrays go through `fast` in pieces that a processor's cache holds. That is faster than sending everything through
memory at each step, and bounds what is needed beyond input and output, whatever the size.
"""

import operator
from typing import Any

import torch

from precision.arrays import (
    Array,
    as_array,
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
from precision.fast import FLOAT32, FLOAT64, Options, decode_integers, encode_integers, is_within_float32
from precision.formats import ROUNDINGS, Flags, FloatFormat


@exactly
def encode(
    x: Any, fmt: FloatFormat, rounding: str, *, return_flags: bool, seed: int | None, flush_to_zero: bool
) -> Any:
    options = _options("encode", rounding, seed, flush_to_zero, return_flags)
    numbers = _as_numbers("encode", x)
    bits = empty_like(numbers, f"uint{8 if fmt.width <= 8 else 16 if fmt.width <= 16 else 32}")
    if _goes_in_pairs(numbers, bits, options):
        return _encode_pairs(numbers, fmt, options).reshape(x.shape)
    flags = [empty_like(numbers, "bool") for _ in range(5)] if return_flags else []
    for start, index in pieces(numbers):
        code, raised = encode_integers(_integers(numbers[index], fmt), start, fmt, options)
        put(bits, index, code)
        for whole, part in zip(flags, raised):
            put(whole, index, part)
    bits, *flags = (in_shape_of(x, result) for result in (bits, *flags))
    return (bits, Flags(*flags)) if return_flags else bits


@exactly
def decode(bits: Any, fmt: FloatFormat) -> Any:
    patterns = as_patterns("decode: bits", bits, fmt.width)
    numbers = empty_like(patterns, "float32" if is_within_float32(fmt) else "float64")
    for _, index in pieces(patterns):
        put(numbers, index, decode_integers(local(patterns[index]), fmt))
    return in_shape_of(bits, numbers)


@exactly
def quantize(x: Any, fmt: FloatFormat, rounding: str, *, seed: int | None, flush_to_zero: bool) -> Any:
    options = _options("quantize", rounding, seed, flush_to_zero)
    numbers = _as_numbers("quantize", x)
    result = empty_like(numbers, dtype_of(numbers))
    for start, index in pieces(numbers):
        code, _ = encode_integers(_integers(numbers[index], fmt), start, fmt, options)
        put(result, index, decode_integers(code, fmt))
    return in_shape_of(x, result)


def _integers(x: Array, fmt: FloatFormat) -> Array:
    """The bits of float32 or float64 numbers as int32 or int64."""
    # A format of more range than float32 has normal numbers where float32 has subnormals or none.
    wide = dtype_of(x) == "float64" or fmt.min_exponent < -126 or fmt.max_exponent > 127
    carrier = FLOAT64 if wide else FLOAT32
    return local(view(cast(x, carrier.floating), carrier.integer))


def _goes_in_pairs(numbers: Array, bits: Array, options: Options) -> bool:
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


def _encode_pairs(x: torch.Tensor, fmt: FloatFormat, options: Options) -> torch.Tensor:
    """Two numbers are read as one integer of 64 bits, and their codes stored as one of 32.

    For these widths torch.compile uses the processor's vectors; for integers of 16 bits it does not, and is six
    times slower.
    """
    even, odd = _even_and_odd(x.reshape(-1))
    first, _ = encode_integers(even, 0, fmt, options)
    second, _ = encode_integers(odd, 0, fmt, options)
    return ((second << 16) | first).view(torch.uint16)


@torch.compiler.allow_in_graph  # so that the offset is known, for which the compiler has no guard
def _even_and_odd(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of every other number. On a graph made for an even offset, torch refuses an odd one: clone it."""
    if x.storage_offset() % 2:
        integers = x.view(torch.int32)
        return integers[::2], integers[1::2]
    pairs = x.view(torch.int64)
    return pairs.to(torch.int32), (pairs >> 32).to(torch.int32)


def _options(
    function: str, rounding: str, seed: int | None, flush_to_zero: bool, return_flags: bool = False
) -> Options:
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


def _as_numbers(function: str, x: Any) -> Array:
    x = as_array(x)
    if dtype_of(x) not in ("float64", "float32", "float16", "bfloat16"):
        raise TypeError(
            f"{function}: x must be float32 or float64 (float16 and bfloat16 are widened), not {dtype_of(x)}: cast "
            "integers to float64 if they are numbers, give them to decode if they are bits; of complex numbers take "
            "the real and the imaginary part"
        )
    return x
