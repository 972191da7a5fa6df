"""Arithmetic on the bits of floating-point numbers, with whole numbers only, as a processor does it.

                                                   12 + 2.5 with three bits of mantissa
    unpack      sign, exponent and significand     1.100 · 2^3 + 1.010 · 2^1
    align       the smaller one moves right        1.100 · 2^3 + 0.01010 · 2^3
    operate     on whole numbers                   1.11010 · 2^3
    normalise   until one 1 is before the point    1.11010 · 2^3
    round       to the bits of the mantissa        1.110 · 2^3, to even: half-way to 1.111
    pack        the three fields into one          14

Bits that move out on the right leave three bits behind: guard and round are the next two places, and sticky is 1
if anything but zeros lies below. With these three every rounding gives the exact result, rounded once.
IEEE 754-2019, sections 4 to 7; Goldberg, 1991, "What every computer scientist should know about
floating-point arithmetic"; Muller et al., 2018, "Handbook of Floating-Point Arithmetic", chapter 7.

    add subtract multiply divide (a, b, fmt=FP16, rounding="nearest-even", return_flags=False)
    fma(a, b, c, ...)   sqrt(a, ...)   compare(a, b, fmt=FP16)

They take bit patterns of at most 16 bits (NumPy arrays, torch tensors on any device, whole numbers) that broadcast
to one shape, and return the result's, of the same kind; with return_flags (bits, `Flags`). If a format has no
infinity, division by zero gives what overflow gives: NaN, or ±max (see `layout.BitLayout`). A NaN has no payload.
`TypeError` for numbers in place of patterns; `ValueError` for patterns of more bits than the format, for shapes
that do not broadcast, for an unknown rounding, and for an invalid operation where the format has no NaN.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, where

from precision.formats import FP16, Flags, FloatFormat
from precision.operands import on_bits, run

EXTRA = 3  # guard, round and sticky
Result = tuple[Tensor, Flags]


class Number(NamedTuple):
    """(-1)^sign · significand · 2^(exponent - bias - point), integer tensors; each step says where its point is."""

    sign: Tensor
    exponent: Tensor
    significand: Tensor


# The steps.


def unpack(bits: Tensor, fmt: FloatFormat, extra: int = 0) -> Number:
    """The number in `bits`, with mantissa_bits + extra places after the point."""
    field = (bits >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    mantissa = bits & (2**fmt.mantissa_bits - 1)
    # The 1 before the point is not stored. A subnormal number has a 0 there, and the exponent of field 1.
    subnormal = mantissa if fmt.subnormals else 0
    significand = where(field > 0, mantissa | 2**fmt.mantissa_bits, subnormal)
    return Number(bits >> (fmt.width - 1), field.clamp(min=1), significand << extra)


def shift_right(significand: Tensor, places: Tensor | int) -> Tensor:
    """Shifted by `places`, or not at all if that is negative. The last bit is sticky: it is 1 if any 1 moved out."""
    if isinstance(places, Tensor):
        places = places.clamp(0, torch.iinfo(significand.dtype).bits - 1)  # processors cannot shift by more
    kept = significand >> places
    return kept | ((kept << places) != significand)


def align(x: Number, y: Number) -> tuple[Number, Number]:
    """Both numbers with the larger of their exponents: the smaller number moves to the right."""
    exponent = torch.maximum(x.exponent, y.exponent)
    x, y = (Number(n.sign, exponent, shift_right(n.significand, exponent - n.exponent)) for n in (x, y))
    return x, y


def operate_add(x: Number, y: Number, rounding: str) -> Number:
    """x + y, for numbers that are aligned: as signed whole numbers."""
    total = where(x.sign == 0, x.significand, -x.significand) + where(y.sign == 0, y.significand, -y.significand)
    # x - x is +0, and -0 when rounding down; (-0) + (-0) stays -0.
    sign_of_zero = where(x.sign == y.sign, x.sign, int(rounding == "down"))
    return Number(where(total == 0, sign_of_zero, (total < 0).to(total.dtype)), x.exponent, total.abs())


def operate_multiply(x: Number, y: Number, fmt: FloatFormat) -> Number:
    """x · y, exactly: the places after the points add up. Both exponents bring a bias, of which one goes."""
    return Number(x.sign ^ y.sign, x.exponent + y.exponent - fmt.bias, x.significand * y.significand)


def operate_divide(x: Number, y: Number, fmt: FloatFormat) -> Number:
    """x / y, with three places more than the mantissa_bits of x and y. A remainder makes the last place sticky."""
    dividend, divisor = x.significand << (fmt.mantissa_bits + EXTRA), y.significand.clamp(min=1)
    quotient = dividend // divisor
    return Number(x.sign ^ y.sign, x.exponent - y.exponent + fmt.bias, quotient | (quotient * divisor != dividend))


def operate_sqrt(x: Number, fmt: FloatFormat) -> Number:
    """√x, with three places more than the mantissa_bits of x. Each bit, from the highest, stays if the square fits."""
    exponent = x.exponent - fmt.bias
    # An odd exponent leaves a factor of 2 to the significand. A root has half as many places as its square.
    square = x.significand << ((exponent & 1) + fmt.mantissa_bits + 2 * EXTRA)
    root = torch.zeros_like(square)
    for place in reversed(range(fmt.mantissa_bits + EXTRA + 1)):
        candidate = root | 2**place
        root = where(candidate * candidate <= square, candidate, root)
    return Number(x.sign, (exponent >> 1) + fmt.bias, root | (root * root != square))


def normalise(x: Number, point: int) -> Number:
    """x with the highest 1 of its significand right before the point. Zero gets an exponent below all others."""
    carry = x.significand >> (point + 1)
    exponent, significand = x.exponent + carry, shift_right(x.significand, carry)
    # To the left by halving steps: by 16 places where 16 are free, then by 8, …
    for places in (16, 8, 4, 2, 1):
        if places <= point:
            free = significand < 2 ** (point + 1 - places)
            exponent = where(free, exponent - places, exponent)
            significand = where(free, significand << places, significand)
    return Number(x.sign, where(significand == 0, -(2**14), exponent), significand)


def round_off(x: Number, rounding: str) -> Tensor:
    """The significand without guard, round and sticky. These three bits decide whether 1 is added."""
    kept, rest, half = x.significand >> EXTRA, x.significand & (2**EXTRA - 1), 2 ** (EXTRA - 1)
    if rounding == "nearest-even":
        away = rest + (kept & 1) > half  # from half-way, odd numbers go up and even ones stay
    elif rounding == "nearest-away":
        away = rest >= half
    elif rounding == "toward-zero":
        away = torch.zeros_like(rest, dtype=torch.bool)
    else:
        away = (rest > 0) & (x.sign == int(rounding == "down"))
    return kept + away


def round(x: Number, point: int, fmt: FloatFormat, rounding: str) -> tuple[Number, Tensor, Tensor]:
    """(x rounded to mantissa_bits places, where that is inexact, where x is tiny), for a normalised x."""
    x = x._replace(significand=shift_right(x.significand, point - fmt.mantissa_bits - EXTRA))
    # Below the smallest normal number the exponent stays and the significand moves: a subnormal number.
    placed = Number(x.sign, x.exponent.clamp(min=1), shift_right(x.significand, 1 - x.exponent))
    inexact = (placed.significand & (2**EXTRA - 1)) != 0
    # Tiny: below the smallest normal number even after rounding, with all the bits that a normal number has.
    reaches_normal = (x.exponent == 0) & (round_off(x, rounding) == 2 ** (fmt.mantissa_bits + 1))
    return placed._replace(significand=round_off(placed, rounding)), inexact, (x.exponent < 1) & ~reaches_normal


def pack(x: Number, inexact: Tensor, tiny: Tensor, fmt: FloatFormat, rounding: str) -> Result:
    """The pattern of a rounded number, and its flags."""
    # The 1 before the point adds itself to the exponent field, and so does the carry of 1.111 rounded to 10.000.
    code = ((x.exponent - 1) << fmt.mantissa_bits) + x.significand
    if not fmt.subnormals:
        flushed = (code > 0) & (code < 2**fmt.mantissa_bits)
        code, inexact = where(flushed, 0, code), inexact | flushed
    overflow = code > fmt.max_bits
    if rounding.startswith("nearest"):
        beyond: Tensor | int = fmt.overflow_bits
    elif rounding == "toward-zero":
        beyond = fmt.max_bits
    else:
        beyond = where(x.sign == int(rounding == "down"), fmt.overflow_bits, fmt.max_bits)
    code, inexact = where(overflow, beyond, code), inexact | overflow
    none = torch.zeros_like(overflow)
    return (x.sign << (fmt.width - 1)) | code, Flags(inexact, tiny & inexact, overflow, none, none)


# What is not a finite number.


class Kind(NamedTuple):
    """What the patterns stand for: boolean tensors."""

    zero: Tensor
    infinite: Tensor
    nan: Tensor
    signalling: Tensor


def classify(bits: Tensor, fmt: FloatFormat) -> Kind:
    """Infinity is the code right above the largest number; NaNs lie above it, signalling ones below the quiet one."""
    code = bits & (2 ** (fmt.width - 1) - 1)
    zero = code < (1 if fmt.subnormals else 2**fmt.mantissa_bits)
    nan = code > (fmt.infinity_bits or fmt.max_bits)
    return Kind(zero, (code > fmt.max_bits) & ~nan, nan, nan & (code < (fmt.nan_bits or 0)))


def settle(
    finite: Result,
    fmt: FloatFormat,
    *operands: Kind,
    sign: Tensor,
    infinite: Tensor,
    invalid: Tensor,
    by_zero: Tensor | None = None,
) -> Result:
    """The result of the steps, unless infinity or NaN takes its place.

    sign: of the infinity. infinite, by_zero: where it takes the place. invalid: where NaN does; a NaN among the
    operands gives NaN, too, and a signalling one is invalid as well.
    """
    bits, flags = finite
    by_zero = torch.zeros_like(invalid) if by_zero is None else by_zero
    nan = invalid
    for kind in operands:
        nan, invalid = nan | kind.nan, invalid | kind.signalling
    infinite = infinite & ~nan
    bits = where(infinite | by_zero, (sign << (fmt.width - 1)) | fmt.overflow_bits, bits)
    bits = where(nan, fmt.nan_bits or 0, bits)
    rounded = ~(nan | infinite | by_zero)
    # An infinity is exact, unless the format saturates and so has to put its largest number there.
    clamped = infinite & (fmt.overflow_bits != fmt.infinity_bits)
    inexact, overflow = (flags.inexact & rounded) | clamped, (flags.overflow & rounded) | clamped
    return bits, Flags(inexact, flags.underflow & rounded, overflow, invalid, by_zero)


# The operations. `on_bits` checks and converts the operands, so that an operation sees integer tensors of one shape.


@on_bits
def add(a: Tensor, b: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """a + b. Invalid: ∞ - ∞."""
    point = fmt.mantissa_bits + EXTRA
    x, y = align(unpack(a, fmt, EXTRA), unpack(b, fmt, EXTRA))
    total = normalise(operate_add(x, y, rounding), point)
    result = pack(*round(total, point, fmt, rounding), fmt, rounding)

    p, q = classify(a, fmt), classify(b, fmt)
    invalid = p.infinite & q.infinite & (x.sign != y.sign)
    sign = where(p.infinite, x.sign, y.sign)
    return settle(result, fmt, p, q, sign=sign, infinite=p.infinite | q.infinite, invalid=invalid)


@on_bits
def subtract(a: Tensor, b: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """a - b = a + (-b). Invalid: ∞ - ∞."""
    return add.__wrapped__(a, b ^ 2 ** (fmt.width - 1), fmt, rounding)


@on_bits
def multiply(a: Tensor, b: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """a · b. Invalid: 0 · ∞."""
    point = 2 * fmt.mantissa_bits + EXTRA
    x, y = unpack(a, fmt, EXTRA), unpack(b, fmt)
    product = normalise(operate_multiply(x, y, fmt), point)
    result = pack(*round(product, point, fmt, rounding), fmt, rounding)

    p, q = classify(a, fmt), classify(b, fmt)
    invalid = (p.infinite & q.zero) | (p.zero & q.infinite)
    return settle(result, fmt, p, q, sign=product.sign, infinite=p.infinite | q.infinite, invalid=invalid)


@on_bits
def fma(a: Tensor, b: Tensor, c: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """a · b + c, rounded once: c is added to all bits of the product. Invalid: 0 · ∞, even with c = NaN, and ∞ - ∞."""
    point = 2 * fmt.mantissa_bits + EXTRA
    x, y, z = unpack(a, fmt, EXTRA), unpack(b, fmt), unpack(c, fmt, fmt.mantissa_bits + EXTRA)
    product = normalise(operate_multiply(x, y, fmt), point)
    total = normalise(operate_add(*align(product, normalise(z, point)), rounding), point)
    result = pack(*round(total, point, fmt, rounding), fmt, rounding)

    p, q, r = classify(a, fmt), classify(b, fmt), classify(c, fmt)
    infinite = (p.infinite | q.infinite) & ~(p.nan | q.nan)
    invalid = (p.infinite & q.zero) | (p.zero & q.infinite) | (infinite & r.infinite & (product.sign != z.sign))
    sign = where(infinite, product.sign, z.sign)
    return settle(result, fmt, p, q, r, sign=sign, infinite=infinite | r.infinite, invalid=invalid)


@on_bits
def divide(a: Tensor, b: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """a / b. Invalid: 0 / 0 and ∞ / ∞. Divide by zero: of a finite number but 0."""
    p, q = classify(a, fmt), classify(b, fmt)
    x, y = unpack(a, fmt), unpack(b, fmt)
    x = x._replace(significand=where(q.infinite, 0, x.significand))  # by infinity: exactly zero
    x, y = normalise(x, fmt.mantissa_bits), normalise(y, fmt.mantissa_bits)
    point = fmt.mantissa_bits + EXTRA
    quotient = normalise(operate_divide(x, y, fmt), point)
    result = pack(*round(quotient, point, fmt, rounding), fmt, rounding)

    invalid = (p.zero & q.zero) | (p.infinite & q.infinite)
    by_zero = q.zero & ~(p.zero | p.infinite | p.nan)
    return settle(result, fmt, p, q, sign=quotient.sign, infinite=p.infinite, invalid=invalid, by_zero=by_zero)


@on_bits
def sqrt(a: Tensor, fmt: FloatFormat = FP16, rounding: str = "nearest-even") -> Result:
    """The square root of a; that of -0 is -0. Invalid: of other negative numbers."""
    x = normalise(unpack(a, fmt), fmt.mantissa_bits)
    result = pack(*round(operate_sqrt(x, fmt), fmt.mantissa_bits + EXTRA, fmt, rounding), fmt, rounding)

    p = classify(a, fmt)
    invalid = (x.sign == 1) & ~(p.zero | p.nan)
    return settle(result, fmt, p, sign=x.sign, infinite=p.infinite, invalid=invalid)


def compare(a: Any, b: Any, fmt: FloatFormat = FP16) -> Any:
    """int8: -1 where a < b, 0 where a = b (-0 equals +0), 1 where a > b, 2 where one is NaN: unordered.

    Without their signs, patterns as whole numbers have the order of the numbers that they stand for.
    """

    def order(a: Tensor, b: Tensor) -> list[Tensor]:
        p, q, half = classify(a, fmt), classify(b, fmt), 2 ** (fmt.width - 1)
        x = where(p.zero, 0, where(a < half, a, half - a))
        y = where(q.zero, 0, where(b < half, b, half - b))
        return [where(p.nan | q.nan, 2, (x > y).to(torch.int8) - (x < y).to(torch.int8))]

    return run("compare", order, (a, b), fmt, ["int8"])[0]
