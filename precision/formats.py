"""A floating-point format, and how one number goes into its bits and comes out again.

    value = (-1)^sign · 1.mantissa · 2^(field - bias)         bits: sign | exponent field | mantissa
    value = (-1)^sign · 0.mantissa · 2^(1 - bias)             where the field is 0: zero and the subnormals

Encoding is four steps on whole numbers: split the number, align it with the format's last place,
round what falls off, pack the fields. Here they work on one number, to be read; `fast` does the same
for arrays. IEEE 754-2019, sections 3 (formats), 4 (rounding) and 7 (flags);
Micikevicius et al., 2022, "FP8 Formats for Deep Learning" (E4M3 and E5M2).
"""

import math
import struct
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any

ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic")


@dataclass(frozen=True)
class Flags:
    """What rounding did to each number: boolean arrays of the result's shape, NumPy's or torch's as the result is.

    overflow: rounded as if exponents had no end, the result is beyond the largest number; underflow: it is below
    the smallest normal one, and inexact; invalid: a signalling NaN came in, or the operation has no value.
    """

    inexact: Any
    underflow: Any
    overflow: Any
    invalid: Any
    divide_by_zero: Any


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format of at most 16 bits (and TF32 and FP32), with its conversions.

    infinities, nans: the highest exponent field holds both, as in IEEE 754. Where only one of the two exists, it is
    the highest code of each sign and all other codes are numbers, as in E4M3. saturate: overflow and infinity
    become ±max; without it infinity, in its absence NaN, in the absence of both ±max. subnormals=False: what
    would be subnormal is zero, in encode and in decode. `ValueError` for a format that cannot exist.
    """

    exponent_bits: int
    mantissa_bits: int
    _: KW_ONLY
    bias: int = None  # type: ignore[assignment]  # by default 2^(exponent_bits - 1) - 1
    infinities: bool = True
    nans: bool = True
    subnormals: bool = True
    saturate: bool = False

    def __post_init__(self) -> None:
        widths = (self.exponent_bits, self.mantissa_bits)
        name = f"FloatFormat({self.exponent_bits!r}, {self.mantissa_bits!r})"
        if not all(isinstance(bits, int) for bits in widths) or not isinstance(self.bias, int | None):
            raise TypeError(f"{name}: the widths and the bias ({self.bias!r}) must be whole numbers")
        if self.exponent_bits < 1 or self.mantissa_bits < 0:
            raise ValueError(f"{name}: a float has at least 1 bit of exponent, and no fewer than 0 of mantissa")
        if self.width > 16 and widths not in ((8, 10), (8, 23)):
            raise ValueError(f"{name} has {self.width} bits: at most 16 are possible, or TF32 (8, 10) and FP32 (8, 23)")
        if self.infinities and self.nans and self.mantissa_bits == 0:
            raise ValueError(f"{name}: no bit of mantissa tells NaN from infinity: pass infinities=False or nans=False")
        if self.max_bits < 2**self.mantissa_bits:
            raise ValueError(
                f"{name}: infinities={self.infinities}, nans={self.nans} leave no code for a normal number"
            )
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if self.min_exponent < -1022 or self.max_exponent > 1023:
            raise ValueError(
                f"{name}: with bias {self.bias} its numbers lie between 2^{self.min_exponent} and "
                f"2^{self.max_exponent}: float64, from which numbers are encoded, ends at 2^-1022 and 2^1023"
            )

    # The codes that mean something special; all of them without the sign bit.

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_bits(self) -> int:
        """The code of the largest number; the codes above it are infinity and NaN."""
        highest = 2 ** (self.width - 1) - 1
        if self.infinities and self.nans:
            return highest - 2**self.mantissa_bits
        return highest - 1 if self.infinities or self.nans else highest

    @property
    def infinity_bits(self) -> int | None:
        return self.max_bits + 1 if self.infinities else None

    @property
    def nan_bits(self) -> int | None:
        """The quiet NaN without a payload."""
        if not self.nans:
            return None
        return self.max_bits + 1 + (2**self.mantissa_bits // 2 if self.infinities else 0)

    @property
    def overflow_bits(self) -> int:
        """What a number too large becomes; see the class."""
        return self.max_bits if self.saturate or not (self.infinities or self.nans) else self.max_bits + 1

    # Its numbers.

    @property
    def min_exponent(self) -> int:
        """Of the smallest normal number, 2^min_exponent."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        return (self.max_bits >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        return decode_one(self.max_bits, self)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero: in a format without subnormals the smallest normal one."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits * self.subnormals)

    @property
    def epsilon(self) -> float:
        """From 1 to the next number."""
        return 2.0**-self.mantissa_bits

    # Conversions of arrays, in `conversions` and `fast`.

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

        x: float32 or float64, a NumPy array or what becomes one, or a torch tensor on any device; of any shape.
        float16 and bfloat16 (and float32, for a format of larger range) are widened first, which is exact, but for
        making NaNs quiet. Returns uint8, uint16 or uint32, the first to hold `width` bits, of x's kind and shape.
        rounding: see `ROUNDINGS`. seed: of "stochastic", which rounds away from zero as often as the distance
        says; one seed gives one result, on every device; without a seed one is drawn from torch's generator.
        flush_to_zero: a result that would be subnormal is zero, with underflow and inexact.
        NaN keeps its sign and the top bits of its payload and is quiet afterwards.
        `TypeError` for integers and complex numbers, `ValueError` for a NaN where the format has none.
        """
        from precision import conversions  # which imports this module

        return conversions.encode(x, self, rounding, return_flags=return_flags, seed=seed, flush_to_zero=flush_to_zero)

    def decode(self, bits: Any) -> Any:
        """The numbers that bits (integers, any shape, NumPy or torch) stand for, exactly.

        float32, or float64 where the format has numbers that float32 has not. `TypeError` for bits that are
        not integers, `ValueError` for patterns wider than the format.
        """
        from precision import conversions

        return conversions.decode(bits, self)

    def quantize(
        self, x: Any, rounding: str = "nearest-even", *, seed: int | None = None, flush_to_zero: bool = False
    ) -> Any:
        """x rounded to numbers of this format, in x's own dtype: `decode(encode(x))`. No gradient flows through."""
        from precision import conversions

        return conversions.quantize(x, self, rounding, seed=seed, flush_to_zero=flush_to_zero)


# One number at a time. Whole numbers of Python have no end, so nothing here is lost by accident.


def encode_one(
    x: float,
    fmt: FloatFormat,
    rounding: str = "nearest-even",
    *,
    draw: float | Fraction = 0,
    flush_to_zero: bool = False,
) -> tuple[int, set[str]]:
    """The bits of x, and the names of the flags raised. draw: for "stochastic", a random number in [0, 1)."""
    sign, exponent, significand = split(x)
    sign_bit = sign << (fmt.width - 1)
    if math.isnan(x):
        payload = significand >> (52 - fmt.mantissa_bits)  # the top bits
        if fmt.nan_bits is None:
            raise ValueError(f"{fmt} has no NaN: replace NaNs before encoding")
        code = fmt.nan_bits | (payload if fmt.infinities else 0)
        return sign_bit | code, set() if significand >> 51 & 1 else {"invalid"}
    if math.isinf(x):
        flags = set() if fmt.overflow_bits == fmt.infinity_bits else {"overflow", "inexact"}
        return sign_bit | fmt.overflow_bits, flags

    drop = align(exponent, fmt)
    code = pack(round_off(significand, drop, sign, rounding, draw), exponent, fmt)
    flags = {"inexact"} if significand % 2**drop else set()
    if code > fmt.max_bits:
        to_infinity = rounding not in ("toward-zero", "down" if sign == 0 else "up")
        code = fmt.overflow_bits if to_infinity else fmt.max_bits
        flags = {"overflow", "inexact"}
    # Exponents without end would keep one more bit just below the smallest normal number.
    is_tiny = significand >> drop < 2**fmt.mantissa_bits
    is_tiny = is_tiny and round_off(significand, drop - 1, sign, rounding, draw) < 2 ** (fmt.mantissa_bits + 1)
    if is_tiny and flags:
        flags.add("underflow")
    if (flush_to_zero or not fmt.subnormals) and code < 2**fmt.mantissa_bits and significand:
        code, flags = 0, {"underflow", "inexact"}
    return sign_bit | code, flags


def split(x: float) -> tuple[int, int, int]:
    """Sign, exponent and significand of a float64: x = (-1)^sign · significand · 2^(exponent - 52)."""
    bits = int.from_bytes(struct.pack(">d", x), "big")
    sign, field, mantissa = bits >> 63, bits >> 52 & 0x7FF, bits % 2**52
    return sign, max(field, 1) - 1023, mantissa + (2**52 if field else 0)


def align(exponent: int, fmt: FloatFormat) -> int:
    """How many low bits of the 53 the format has no place for; below its normal numbers each octave costs one more."""
    return 52 - fmt.mantissa_bits + max(0, fmt.min_exponent - exponent)


def round_off(significand: int, drop: int, sign: int, rounding: str, draw: float | Fraction = 0) -> int:
    """significand / 2^drop, rounded to a whole number."""
    kept, rest, one = significand >> drop, significand % 2**drop, 2**drop
    if rounding == "nearest-even":
        away = 2 * rest > one or (2 * rest == one and kept % 2 == 1)
    elif rounding == "nearest-away":
        away = 2 * rest >= one
    elif rounding == "toward-zero":
        away = False
    elif rounding == "up":
        away = rest > 0 and sign == 0
    elif rounding == "down":
        away = rest > 0 and sign == 1
    elif rounding == "stochastic":
        away = Fraction(rest, one) > draw
    else:
        raise ValueError(f"unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
    return kept + away


def pack(kept: int, exponent: int, fmt: FloatFormat) -> int:
    """Exponent field and mantissa as one number: `kept` brings the leading 1 that makes the field 1 higher.

    So a subnormal number, without that 1, has field 0, and a mantissa rounded up to 10.000 carries into the field.
    """
    return ((max(exponent, fmt.min_exponent) - fmt.min_exponent) << fmt.mantissa_bits) + kept


def decode_one(bits: int, fmt: FloatFormat) -> float:
    """The number that bits stand for."""
    sign, code = bits >> (fmt.width - 1), bits % 2 ** (fmt.width - 1)
    field, mantissa = code >> fmt.mantissa_bits, code % 2**fmt.mantissa_bits
    if code == fmt.infinity_bits:
        magnitude = math.inf
    elif code > fmt.max_bits:
        quiet = 0x7FF8 << 48 | mantissa << (52 - fmt.mantissa_bits)
        magnitude = struct.unpack(">d", quiet.to_bytes(8, "big"))[0]
    elif field == 0:
        magnitude = math.ldexp(mantissa, fmt.min_exponent - fmt.mantissa_bits) if fmt.subnormals else 0.0
    else:
        magnitude = math.ldexp(2**fmt.mantissa_bits + mantissa, field - fmt.bias - fmt.mantissa_bits)
    return math.copysign(magnitude, -1.0 if sign else 1.0)


FP16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
TF32 = FloatFormat(8, 10)
FP32 = FloatFormat(8, 23)
FP8_E4M3 = FloatFormat(4, 3, infinities=False)
FP8_E5M2 = FloatFormat(5, 2)
FORMATS = {"FP16": FP16, "BF16": BF16, "TF32": TF32, "FP32": FP32, "FP8_E4M3": FP8_E4M3, "FP8_E5M2": FP8_E5M2}
