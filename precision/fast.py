"""Conversions of whole arrays: the four steps of `formats`, each an integer operation on every number at once.

    float32 or float64 → its bits as integers → split, align, round off, pack → the format's bits

Integers come in and integers go out, int32 for float32 and int64 for float64, as NumPy arrays or torch tensors:
the same lines serve both. To the nearest there are two short ways, for NumPy. The long way rounds in all manners,
raises the flags, and never looks at the data, for which a GPU would be waited for and a compiled graph be broken.
"""

from collections.abc import Callable
from typing import NamedTuple

from precision.arrays import Array, can_look, cast, random_bits, view, where
from precision.formats import FloatFormat


class Carrier(NamedTuple):
    """The machine's own format, in which numbers come and go."""

    width: int
    mantissa_bits: int
    bias: int

    @property
    def infinity(self) -> int:
        """Its bits: above are the NaNs. They are the mask of the exponent, too."""
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def one(self) -> int:
        """The leading 1 of a significand, in units of its last place."""
        return 2**self.mantissa_bits

    @property
    def floating(self) -> str:
        return f"float{self.width}"

    @property
    def integer(self) -> str:
        return f"int{self.width}"


FLOAT32, FLOAT64 = Carrier(32, 23, 127), Carrier(64, 52, 1023)


class Options(NamedTuple):
    """What `encode` was asked for; `key` is the seed's, for random_bits."""

    rounding: str
    key: int
    flush_to_zero: bool
    return_flags: bool = False


# Encoding.


def encode_integers(bits: Array, start: int, fmt: FloatFormat, options: Options) -> tuple[Array, list[Array]]:
    """The codes of one piece, in the low bits of wide integers, and its flags if they are wanted."""
    carrier = FLOAT64 if bits.itemsize == 8 else FLOAT32
    magnitude = bits & (2 ** (carrier.width - 1) - 1)
    largest = int(magnitude.max()) if can_look(bits) else None
    way = _short_way(fmt, carrier, options)
    flags: list[Array] = []
    if way is not None and largest is not None:
        code = way(magnitude, largest, fmt, carrier)
    else:
        code, flags = _round(magnitude, bits < 0, start, fmt, carrier, options)
    if largest is None or largest > carrier.infinity:
        code = _with_nans(code, bits, fmt, carrier)
    sign = bits >> (carrier.width - fmt.width)
    sign &= 2 ** (fmt.width - 1) if fmt.width < carrier.width else -(2 ** (fmt.width - 1))
    code |= sign
    return code, flags


def _with_nans(code: Array, bits: Array, fmt: FloatFormat, carrier: Carrier) -> Array:
    """The codes, with NaNs where they belong: quiet, and the payload cut to the top bits that fmt has."""
    nan = bits & (2 ** (carrier.width - 1) - 1) > carrier.infinity
    if fmt.nan_bits is None:
        if nan.any():
            raise ValueError(f"{fmt} has no NaN: replace NaNs first (nan_to_num in NumPy and in torch)")
        return code
    payload = (bits & (carrier.one - 1)) >> (carrier.mantissa_bits - fmt.mantissa_bits)
    return where(nan, (payload if fmt.infinities else 0) | fmt.nan_bits, code)


def _carried(code: int, fmt: FloatFormat, carrier: Carrier) -> int:
    """The carrier's bits of a normal number: the exponent by another bias, the mantissa with zeros behind it."""
    return (code << (carrier.mantissa_bits - fmt.mantissa_bits)) + ((carrier.bias - fmt.bias) << carrier.mantissa_bits)


def _short_way(
    fmt: FloatFormat, carrier: Carrier, options: Options
) -> Callable[[Array, int, FloatFormat, Carrier], Array] | None:
    """A function for the nearest code of all that is not NaN, where there is a shorter one than `_round`."""
    drop = carrier.mantissa_bits - fmt.mantissa_bits
    if options.rounding != "nearest-even" or options.flush_to_zero or options.return_flags or not fmt.subnormals:
        return None
    if fmt.bias == carrier.bias == fmt.max_exponent and drop > 0 and fmt.mantissa_bits > 0:
        return _shorten
    # The power of two to add must exist, and what is subnormal in the carrier be less than halfway to fmt's first.
    fits = fmt.max_exponent + 1 + drop <= carrier.bias and fmt.min_exponent - fmt.mantissa_bits >= 2 - carrier.bias
    if fits and fmt.mantissa_bits > 0:
        return _round_by_adding
    return None


def _shorten(magnitude: Array, largest: int, fmt: FloatFormat, carrier: Carrier) -> Array:
    """Of the carrier's own exponents: add half of the last place, a trifle less where that is even, and cut."""
    drop = carrier.mantissa_bits - fmt.mantissa_bits
    code = magnitude >> drop
    code &= 1
    code += magnitude
    code += 2 ** (drop - 1) - 1
    code >>= drop
    return code.clip(0, fmt.overflow_bits) if fmt.saturate else code


def _round_by_adding(magnitude: Array, largest: int, fmt: FloatFormat, carrier: Carrier) -> Array:
    """Let the machine's addition round: a sum keeps no more bits than a float has.

    2^(e + drop) + x has its last place where x, of exponent e, has it in fmt; what the sum is more than the power
    of two is x's significand there, rounded to the nearest even. For x below fmt's normal numbers e is theirs.
    """
    drop, codes = carrier.mantissa_bits - fmt.mantissa_bits, 2**fmt.width
    smallest_normal = _carried(2**fmt.mantissa_bits, fmt, carrier)
    beyond = _carried((fmt.max_exponent + fmt.bias + 1) << fmt.mantissa_bits, fmt, carrier)  # 2^(max_exponent + 1)
    if largest > beyond:
        magnitude = magnitude.clip(0, beyond)
    exponent = magnitude.clip(smallest_normal, beyond)
    exponent &= carrier.infinity
    # What the bias has to be lowered by is in the power's last places, which are fmt's last places: it is even, so
    # that ties stay ties to even, and comes out of the sum together with the significand.
    power = exponent + ((drop << carrier.mantissa_bits) + -(smallest_normal >> drop) % codes)
    total = view(magnitude, carrier.floating)
    total += view(power, carrier.floating)  # in place, so that magnitude holds the bits of the sum
    exponent >>= drop
    code = magnitude
    code += exponent
    overflows = largest > _carried(fmt.max_bits, fmt, carrier)
    if overflows or fmt.width not in (8, 16):  # else what is above is cut off where the codes are stored
        code &= codes - 1
    return code.clip(0, fmt.overflow_bits) if overflows else code


def _round(
    magnitude: Array, negative: Array, start: int, fmt: FloatFormat, carrier: Carrier, options: Options
) -> tuple[Array, list[Array]]:
    """The code of all that is not NaN, by any rounding, and the flags if they are wanted."""
    # Split: octaves above fmt's smallest normal number, and 1.mantissa as a whole number.
    smallest_normal = _carried(2**fmt.mantissa_bits, fmt, carrier)
    lowest = smallest_normal >> carrier.mantissa_bits
    octave = (magnitude >> carrier.mantissa_bits).clip(1, carrier.infinity) - lowest
    significand = magnitude - ((octave + (lowest - 1)) << carrier.mantissa_bits)

    # Align, round off, pack.
    drop = (carrier.mantissa_bits - fmt.mantissa_bits) - octave.clip(-carrier.infinity, 0)
    draw = random_bits(magnitude, start, options.key, carrier.width - 1) if options.rounding == "stochastic" else None
    kept, rest = _round_off(significand, drop, negative, options.rounding, draw, carrier)
    code = octave.clip(0, carrier.infinity)
    code <<= fmt.mantissa_bits
    code += kept

    # Too large is infinity, unless it is finite and rounded towards zero.
    beyond = code > fmt.max_bits
    if options.rounding in ("nearest-even", "nearest-away", "stochastic"):
        code = code.clip(0, fmt.overflow_bits)
    else:
        outward = _outward(negative, options.rounding) | (magnitude == carrier.infinity)
        code = where(outward, code.clip(0, fmt.overflow_bits), code.clip(0, fmt.max_bits))
    flushed = magnitude < 0  # none
    if options.flush_to_zero or not fmt.subnormals:
        flushed = (code < 2**fmt.mantissa_bits) & (magnitude > 0)
        code = where(flushed, 0, code)
    if not options.return_flags:
        return code, []

    number, nan = magnitude < carrier.infinity, magnitude > carrier.infinity
    overflow = beyond & (number if fmt.overflow_bits == fmt.infinity_bits else ~nan)
    inexact = overflow | flushed | (number & (rest != 0))
    # Exponents without end would keep one more bit just below the smallest normal number.
    finer, _ = _round_off(significand, drop - 1, negative, options.rounding, draw, carrier)
    is_tiny = (magnitude < smallest_normal) & (finer < 2 ** (fmt.mantissa_bits + 1))
    underflow = flushed | (is_tiny & inexact)
    invalid = nan & (magnitude & (carrier.one // 2) == 0)
    return code, [inexact, underflow, overflow, invalid, nan & False]


def _round_off(
    significand: Array, drop: Array, negative: Array, rounding: str, draw: Array | None, carrier: Carrier
) -> tuple[Array, Array]:
    """significand / 2^drop rounded to a whole number, and what fell off."""
    # Two places past its leading bit all of a number falls off and is less than half: farther changes nothing.
    shift = drop.clip(0, carrier.mantissa_bits + 2)
    kept = significand >> shift
    rest = significand - (kept << shift)
    if rounding == "nearest-even":
        away = 2 * rest + (kept & 1) > 1 << shift
    elif rounding == "nearest-away":
        away = 2 * rest >= 1 << shift
    elif rounding == "stochastic":
        # The probability in units of 2^-31 or 2^-63. Here it matters how far past.
        away = (rest << (carrier.width - 1 - shift)) >> (drop - shift).clip(0, carrier.width - 1) > draw
    else:
        away = (rest > 0) & _outward(negative, rounding)
    return kept + away, rest


def _outward(negative: Array, rounding: str) -> Array:
    """Where a directed rounding leads away from zero."""
    if rounding == "toward-zero":
        return negative & False
    return negative if rounding == "down" else ~negative


# Decoding.


def decode_integers(bits: Array, fmt: FloatFormat) -> Array:
    """Bits of any integer type to float32 or float64."""
    # Subnormals are computed, so that they must be normal in the carrier, or else be the carrier's own.
    same_grid = fmt.bias == FLOAT32.bias
    carrier = FLOAT32 if same_grid or fmt.min_exponent - fmt.mantissa_bits >= -126 else FLOAT64
    if not is_within_float32(fmt):
        carrier = FLOAT64
    bits = cast(bits, carrier.integer)
    code = bits & (2 ** (fmt.width - 1) - 1)
    mantissa = (code & (2**fmt.mantissa_bits - 1)) << (carrier.mantissa_bits - fmt.mantissa_bits)

    result = _carried(code, fmt, carrier)
    is_low = code < 2**fmt.mantissa_bits
    if not fmt.subnormals:
        result = where(is_low, 0, result)
    elif carrier.bias != fmt.bias:  # 0.mantissa = 1.mantissa - 1, exactly
        with_one = view(mantissa + _carried(2**fmt.mantissa_bits, fmt, carrier), carrier.floating)
        result = where(is_low, view(with_one - fmt.smallest_normal, carrier.integer), result)
    if fmt.infinities or fmt.nans:
        quiet_nan = carrier.infinity | carrier.one // 2 | mantissa
        result = where(code > fmt.max_bits, quiet_nan, result)
        if fmt.infinities:
            result = where(code == fmt.infinity_bits, carrier.infinity, result)
    result |= ((bits >> (fmt.width - 1)) & 1) << (carrier.width - 1)
    return view(result, carrier.floating)


def is_within_float32(fmt: FloatFormat) -> bool:
    return fmt.max_exponent <= 127 and fmt.min_exponent - fmt.mantissa_bits >= -149
