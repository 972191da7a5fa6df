"""One number: how it goes into the bits of a format, and how it comes out again.

    split        x = (-1)^sign · significand · 2^(exponent - 52), a whole number of 53 bits
    align        how many of its low bits the format has no place for
    round off    those bits go; they decide whether 1 is added
    pack         exponent field and mantissa become one code

Whole numbers of Python have no end, so nothing is lost by accident. `fast` takes the same four steps for arrays.
IEEE 754-2019, sections 4 (rounding) and 7 (flags).
"""

import math
import struct
from fractions import Fraction

from precision.layout import BitLayout

ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic")


def encode_one(
    x: float,
    fmt: BitLayout,
    rounding: str = "nearest-even",
    *,
    draw: float | Fraction = 0,
    flush_to_zero: bool = False,
) -> tuple[int, set[str]]:
    """The bits of x, and the names of the flags that are raised. draw: for "stochastic", a random number in [0, 1).

    `ValueError` for a NaN if the format has none, and for an unknown rounding.
    """
    sign, exponent, significand = split(x)
    sign_bit = sign << (fmt.width - 1)
    # What is no number has no last place to be aligned with.
    if math.isnan(x):
        payload = significand >> (52 - fmt.mantissa_bits)  # the top bits
        if fmt.nan_bits is None:
            raise ValueError(f"{fmt} has no NaN: replace NaNs before encoding")
        code = fmt.nan_bits | (payload if fmt.infinities else 0)
        return sign_bit | code, set() if significand >> 51 & 1 else {"invalid"}
    if math.isinf(x):
        flags = set() if fmt.overflow_bits == fmt.infinity_bits else {"overflow", "inexact"}
        return sign_bit | fmt.overflow_bits, flags

    # The steps, and whether anything but zeros fell off.
    drop = align(exponent, fmt)
    code = pack(round_off(significand, drop, sign, rounding, draw), exponent, fmt)
    flags = {"inexact"} if significand % 2**drop else set()
    # Too large. A directed rounding that leads towards zero stops at the largest number.
    if code > fmt.max_bits:
        to_infinity = rounding not in ("toward-zero", "down" if sign == 0 else "up")
        code = fmt.overflow_bits if to_infinity else fmt.max_bits
        flags = {"overflow", "inexact"}
    # Tiny: below the smallest normal number even after rounding, if exponents had no end. Just below that number
    # such a format would keep one bit more: hence `drop - 1`.
    is_tiny = significand >> drop < 2**fmt.mantissa_bits
    is_tiny = is_tiny and round_off(significand, drop - 1, sign, rounding, draw) < 2 ** (fmt.mantissa_bits + 1)
    if is_tiny and flags:
        flags.add("underflow")
    # No subnormal results wanted, or none in this format.
    if (flush_to_zero or not fmt.subnormals) and code < 2**fmt.mantissa_bits and significand:
        code, flags = 0, {"underflow", "inexact"}
    return sign_bit | code, flags


def split(x: float) -> tuple[int, int, int]:
    """Sign, exponent and significand of a float64: x = (-1)^sign · significand · 2^(exponent - 52)."""
    # A float64 has 1 + 11 + 52 bits. Its field 0 has the exponent of field 1, and no leading 1.
    bits = int.from_bytes(struct.pack(">d", x), "big")
    sign, field, mantissa = bits >> 63, bits >> 52 & 0x7FF, bits % 2**52
    return sign, max(field, 1) - 1023, mantissa + (2**52 if field else 0)


def align(exponent: int, fmt: BitLayout) -> int:
    """How many of the 53 bits the format has no place for; each octave below its normal numbers costs one more."""
    return 52 - fmt.mantissa_bits + max(0, fmt.min_exponent - exponent)


def round_off(significand: int, drop: int, sign: int, rounding: str, draw: float | Fraction = 0) -> int:
    """significand / 2^drop, rounded to a whole number: what is kept, or 1 more, which is away from zero."""
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


def pack(kept: int, exponent: int, fmt: BitLayout) -> int:
    """Exponent field and mantissa as one number, by addition: the leading 1 of `kept` makes the field 1 higher.

    So a subnormal number, which lacks that 1, gets field 0. A mantissa that was rounded up to 10.000 carries into
    the field, and from the largest number into infinity.
    """
    return ((max(exponent, fmt.min_exponent) - fmt.min_exponent) << fmt.mantissa_bits) + kept


def decode_one(bits: int, fmt: BitLayout) -> float:
    """The number that bits stand for, exactly. NaN is quiet, with the payload in its top bits."""
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
