"""`FloatFormat`, a floating-point format with its conversions, and the formats that training uses.

                 sign | exponent | mantissa    largest      epsilon
    FP32            1        8         23      3.4 · 10^38   2^-23
    TF32            1        8         10      3.4 · 10^38   2^-10     FP32's range, FP16's precision
    BF16            1        8          7      3.4 · 10^38   2^-7      FP32's range in half the bits
    FP16            1        5         10      65504         2^-10
    FP8_E5M2        1        5          2      57344         2^-2
    FP8_E4M3        1        4          3      448           2^-3      no infinities: one more octave of numbers

What a format is: `layout`. How one number is converted: `one_number`, to be read first. Arrays: `conversions`.
"""

from dataclasses import dataclass
from typing import Any

from precision import conversions
from precision.layout import BitLayout


@dataclass(frozen=True)  # once more, so that Python names FloatFormat when an argument is missing
class FloatFormat(BitLayout):
    """A binary floating-point format of at most 16 bits (or TF32 or FP32), with its conversions.

    FloatFormat(exponent_bits, mantissa_bits, *, bias, infinities, nans, subnormals, saturate): see `BitLayout`.
    The defaults are IEEE 754's. `ValueError` for a format that cannot exist.
    """

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
        return conversions.encode(x, self, rounding, return_flags=return_flags, seed=seed, flush_to_zero=flush_to_zero)

    def decode(self, bits: Any) -> Any:
        """The numbers that bits (integers, any shape, NumPy or torch) stand for, exactly.

        float32, or float64 if the format has numbers that float32 has not. `TypeError` for bits that are not
        integers, `ValueError` for patterns wider than the format.
        """
        return conversions.decode(bits, self)

    def quantize(
        self, x: Any, rounding: str = "nearest-even", *, seed: int | None = None, flush_to_zero: bool = False
    ) -> Any:
        """x rounded to numbers of this format, in x's own dtype: `decode(encode(x))`. No gradient flows through."""
        return conversions.quantize(x, self, rounding, seed=seed, flush_to_zero=flush_to_zero)


FP16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
TF32 = FloatFormat(8, 10)
FP32 = FloatFormat(8, 23)
FP8_E4M3 = FloatFormat(4, 3, infinities=False)
FP8_E5M2 = FloatFormat(5, 2)
FORMATS = {"FP16": FP16, "BF16": BF16, "TF32": TF32, "FP32": FP32, "FP8_E4M3": FP8_E4M3, "FP8_E5M2": FP8_E5M2}
