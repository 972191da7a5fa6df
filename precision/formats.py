"""`FloatFormat`, a floating-point format with its conversions, and the formats that training uses.

                 sign | exponent | mantissa    largest      epsilon
    FP32            1        8         23      3.4 · 10^38   2^-23
    TF32            1        8         10      3.4 · 10^38   2^-10     FP32's range, FP16's precision
    BF16            1        8          7      3.4 · 10^38   2^-7      FP32's range in half the bits
    FP16            1        5         10      65504         2^-10
    FP8_E5M2        1        5          2      57344         2^-2
    FP8_E4M3        1        4          3      448           2^-3      no infinities: one more octave of numbers

What a format is: `layout`. How one number is converted: `one_number`, to be read first. How many are: `fast`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precision.arrays import Array, as_numbers, as_patterns, by_pieces, dtype_of, in_shape_of, local, view
from precision.exact import exact
from precision.fast import FLOAT32, FLOAT64, Options, decode_integers, encode_integers, integers, is_within_float32
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


@dataclass(frozen=True)  # once more, so that Python names FloatFormat when an argument is missing
class FloatFormat(BitLayout):
    """A binary floating-point format of at most 16 bits (or TF32 or FP32), with its conversions.

    FloatFormat(exponent_bits, mantissa_bits, *, bias, infinities, nans, subnormals, saturate): see `BitLayout`.
    The defaults are IEEE 754's. `ValueError` for a format that cannot exist.
    """

    @exact()
    def encode(
        self,
        x: Any,
        rounding: str = "nearest-even",
        *,
        return_flags: bool = False,
        seed: int | None = None,
        flush_to_zero: bool = False,
    ) -> Any:
        """The bits of x in this format, rounded once; with return_flags, (bits, `Flags`).

        x: float32 or float64 of any shape: a NumPy array or what becomes one, or a torch tensor on any device.
        float16 and bfloat16 are widened first, which is exact, except that NaNs become quiet; so is float32 for a
        format of larger range. Returns uint8, uint16 or uint32, the first to hold `width` bits, of x's kind and shape.
        rounding: one of `one_number.ROUNDINGS`.
        seed: for "stochastic", which rounds away from zero with the probability that the distance gives. One seed
        gives one result, on every device; without a seed one is drawn from torch's generator.
        flush_to_zero: a result that would be subnormal is zero, with underflow and inexact.
        A NaN keeps its sign and the top bits of its payload, and is quiet afterwards.
        `TypeError` for integers and complex numbers, `ValueError` for a NaN if the format has none.
        """
        options = _options("encode", rounding, seed, flush_to_zero, return_flags)
        numbers = as_numbers("encode", x)

        def steps(start: int, part: Array) -> Sequence[Array]:
            code, flags = encode_integers(integers(part, self), start, self, options)
            if dtype == "uint16" and torch.compiler.is_compiling() and isinstance(code, Tensor) and code.is_cpu:
                # The compiler converts to 16 bits without vectors. The code is the integer's first half.
                code = view(code.contiguous(), dtype)[..., :: code.itemsize // 2]
            return [code, *flags]

        dtype = f"uint{8 if self.width <= 8 else 16 if self.width <= 16 else 32}"
        bits, *flags = (in_shape_of(x, r) for r in by_pieces(steps, [numbers], [dtype, *["bool"] * 5 * return_flags]))
        return (bits, Flags(*flags)) if return_flags else bits

    @exact()
    def decode(self, bits: Any) -> Any:
        """The numbers that bits (integers, any shape, NumPy or torch) stand for, exactly.

        float32, or float64 if the format has numbers that float32 has not. `TypeError` for bits that are not
        integers, `ValueError` for patterns wider than the format.
        """
        patterns = as_patterns("decode: bits", bits, self.width)
        carrier = FLOAT32 if is_within_float32(self) else FLOAT64
        steps = lambda _, part: [decode_integers(local(part), self, carrier)]  # noqa: E731
        return in_shape_of(bits, *by_pieces(steps, [patterns], [carrier.floating]))

    @exact()
    def quantize(
        self, x: Any, rounding: str = "nearest-even", *, seed: int | None = None, flush_to_zero: bool = False
    ) -> Any:
        """x rounded to numbers of this format, in x's own dtype: `decode(encode(x))`. No gradient flows through."""
        options = _options("quantize", rounding, seed, flush_to_zero)
        numbers = as_numbers("quantize", x)
        carrier = FLOAT64 if dtype_of(numbers) == "float64" else FLOAT32

        def steps(start: int, part: Array) -> Sequence[Array]:
            code, _ = encode_integers(integers(part, self), start, self, options)
            return [decode_integers(code, self, carrier)]

        return in_shape_of(x, *by_pieces(steps, [numbers], [dtype_of(numbers)]))


def _options(
    function: str, rounding: str, seed: int | None, flush_to_zero: bool, return_flags: bool = False
) -> Options:
    """The options, checked. `ValueError` for an unknown rounding, and for a seed that no rounding would use."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"{function}: unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
    if rounding == "stochastic":
        seed = int(torch.randint(2**62, ())) if seed is None else operator.index(seed)
    elif seed is not None:
        raise ValueError(f"{function}: seed={seed!r} is for rounding='stochastic', not for {rounding!r}")
    return Options(rounding, seed or 0, flush_to_zero, return_flags)


FP16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
TF32 = FloatFormat(8, 10)
FP32 = FloatFormat(8, 23)
FP8_E4M3 = FloatFormat(4, 3, infinities=False)
FP8_E5M2 = FloatFormat(5, 2)
FORMATS = {"FP16": FP16, "BF16": BF16, "TF32": TF32, "FP32": FP32, "FP8_E4M3": FP8_E4M3, "FP8_E5M2": FP8_E5M2}
