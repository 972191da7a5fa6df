"""The four steps of `one_number` on whole arrays: each is an integer operation on every number at once.

    float32 or float64 → its bits as integers → split, align, round off, pack → the format's bits

Integers come in and integers go out, int32 for float32 and int64 for float64, as NumPy arrays or torch tensors:
the same lines serve both. Two ways lead from one to the other:

    _round      every rounding, with flags: the four steps. It never looks at the data, since a look would make the
                processor wait for a GPU, and break a graph that is being compiled.
    _nearest    to the nearest, without flags: add and cut. It asks for the largest number first, so it is for NumPy.
"""

from typing import NamedTuple

import numpy as np

from precision.arrays import Array, cast, dtype_of, local, random_bits, view, where
from precision.layout import BitLayout


class Carrier(NamedTuple):
    """A format of the machine, float32 or float64, whose bits are the integers here."""

    width: int
    mantissa_bits: int
    bias: int
    infinity: int  # its bits: the NaNs lie above. It is the mask of the exponent field, too
    floating: str  # the dtype's name, and that of the integers of the same width
    integer: str


FLOAT32 = Carrier(32, 23, 127, 0xFF << 23, "float32", "int32")
FLOAT64 = Carrier(64, 52, 1023, 0x7FF << 52, "float64", "int64")
FP32 = BitLayout(8, 23)  # float32 as a format, for conversions between the two


class Options(NamedTuple):
    """What `encode` was asked for."""

    rounding: str
    seed: int
    flush_to_zero: bool
    return_flags: bool = False


# Encoding.


def integers(x: Array, fmt: BitLayout) -> Array:
    """The bits of float32 or float64 numbers as int32 or int64; those of other numbers are float32's."""
    is_float64 = dtype_of(x) == "float64"
    x = cast(x, "float64" if is_float64 else "float32")
    # A format of more range than float32 has normal numbers where float32 has subnormals or none.
    if not is_float64 and (fmt.min_exponent < -126 or fmt.max_exponent > 127):
        x = widened(x)
    return local(view(x, f"int{8 * x.itemsize}"))


def encode_integers(bits: Array, start: int, fmt: BitLayout, options: Options) -> tuple[Array, list[Array]]:
    """The codes of one piece, in the low bits of wide integers, and its flags if they are wanted.

    bits: float32's as int32 or float64's as int64. start: position of the piece in the array, for random numbers.
    """
    carrier = FLOAT64 if bits.itemsize == 8 else FLOAT32
    # Without the sign bit, bits as integers are in the order of the magnitudes that they stand for.
    magnitude = bits & (2 ** (carrier.width - 1) - 1)
    # For a GPU's answer the processor would wait, and while torch.compile looks on there are no numbers.
    largest = int(magnitude.max()) if isinstance(bits, np.ndarray) else None
    flags: list[Array] = []
    if largest is not None and _is_short(fmt, carrier, options):
        code = _nearest(magnitude, largest, fmt, carrier)
    else:
        code, flags = _round(magnitude, bits < 0, start, fmt, carrier, options)
    # Each way took NaNs for numbers: put them right if there are any, or if we cannot know.
    if largest is None or largest > carrier.infinity:
        code = _with_nans(code, bits, fmt, carrier)
    # The sign moves to its place in fmt. At full width that place is the integer's own sign bit, -2^(width - 1).
    sign = bits >> (carrier.width - fmt.width)
    sign &= 2 ** (fmt.width - 1) if fmt.width < carrier.width else -(2 ** (fmt.width - 1))
    code |= sign
    return code, flags


def _with_nans(code: Array, bits: Array, fmt: BitLayout, carrier: Carrier) -> Array:
    """The codes, with NaN wherever the number is NaN: quiet, its payload cut to the top bits that fmt has."""
    nan = bits & (2 ** (carrier.width - 1) - 1) > carrier.infinity
    if fmt.nan_bits is None:
        if nan.any():
            raise ValueError(f"{fmt} has no NaN: replace NaNs first (nan_to_num in NumPy and in torch)")
        return code
    payload = (bits & (2**carrier.mantissa_bits - 1)) >> (carrier.mantissa_bits - fmt.mantissa_bits)
    return where(nan, (payload if fmt.infinities else 0) | fmt.nan_bits, code)


def _carried(code: int, fmt: BitLayout, carrier: Carrier) -> int:
    """The carrier's bits of fmt's normal number `code`.

    The code moves to the carrier's place, with zeros behind its mantissa; the difference of the biases is added to
    its exponent field.
    """
    return (code << (carrier.mantissa_bits - fmt.mantissa_bits)) + ((carrier.bias - fmt.bias) << carrier.mantissa_bits)


def _is_short(fmt: BitLayout, carrier: Carrier, options: Options) -> bool:
    """Whether `_nearest` may stand in for `_round`."""
    drop = carrier.mantissa_bits - fmt.mantissa_bits
    if options.rounding != "nearest-even" or options.flush_to_zero or options.return_flags or not fmt.subnormals:
        return False
    # The power of two that `_nearest` adds must exist in the carrier. And the carrier's subnormal numbers, which a
    # processor may be set to take for 0, must lie below half of fmt's smallest number: all become 0.
    adds = fmt.min_exponent + drop <= carrier.bias and fmt.min_exponent - fmt.mantissa_bits >= 2 - carrier.bias
    return drop > 0 and fmt.mantissa_bits > 0 and (adds or fmt.bias == carrier.bias)


def _nearest(magnitude: Array, largest: int, fmt: BitLayout, carrier: Carrier) -> Array:
    """The nearest code of all that is not NaN: the top of the carrier's bits, with the other bias, rounded.

    Add half of the last place that stays, less 1 if that place holds a 0: from exactly half-way a 1 goes up and a 0
    stays, so the result is even. The carry may run into the exponent, and from the largest number into infinity.
    """
    drop, rebias = carrier.mantissa_bits - fmt.mantissa_bits, carrier.bias - fmt.bias
    code = magnitude >> drop
    code &= 1  # the last place that stays
    code += magnitude
    code += 2 ** (drop - 1) - 1 - (rebias << carrier.mantissa_bits)
    code >>= drop
    if rebias:
        # Below fmt's normal numbers the machine's addition rounds: a sum keeps no more bits than the carrier has. Of
        # 2^power + x the last place is worth fmt's smallest number. So its bits exceed the power's by x's code. That
        # is larger than `code` there, and not larger above.
        power = fmt.min_exponent + drop
        low = magnitude.clip(0, _carried(2**fmt.mantissa_bits, fmt, carrier))
        total = view(low, carrier.floating)
        total += 2.0**power  # in place, so `low` holds the sum's bits
        low -= (power + carrier.bias) << carrier.mantissa_bits
        np.maximum(code, low, out=code)
    return code.clip(0, fmt.overflow_bits) if largest > _carried(fmt.max_bits, fmt, carrier) else code


def _round(
    magnitude: Array, negative: Array, start: int, fmt: BitLayout, carrier: Carrier, options: Options
) -> tuple[Array, list[Array]]:
    """The code of all that is not NaN, by any rounding, and the flags if they are wanted."""
    # Split. octave: how many powers of two x lies above fmt's smallest normal number, negative below it.
    # significand: 1.mantissa as a whole number; the carrier's subnormal numbers count in field 1, with 0.mantissa.
    smallest_normal = _carried(2**fmt.mantissa_bits, fmt, carrier)
    lowest = smallest_normal >> carrier.mantissa_bits
    octave = (magnitude >> carrier.mantissa_bits).clip(1, carrier.infinity) - lowest
    significand = magnitude - ((octave + (lowest - 1)) << carrier.mantissa_bits)

    # Align: each octave below the normal numbers costs one more bit.
    drop = (carrier.mantissa_bits - fmt.mantissa_bits) - octave.clip(-carrier.infinity, 0)
    draw = random_bits(magnitude, start, options.seed, carrier.width - 1) if options.rounding == "stochastic" else None
    # Round off.
    kept, rest = _round_off(significand, drop, negative, options.rounding, draw, carrier)
    # Pack, by addition: the leading 1 of `kept` makes the field 1 higher (`one_number.pack`).
    code = octave.clip(0, carrier.infinity)
    code <<= fmt.mantissa_bits
    code += kept

    # What is too large becomes `overflow_bits`; a finite number that is rounded towards zero becomes the largest one.
    beyond = code > fmt.max_bits
    if options.rounding in ("nearest-even", "nearest-away", "stochastic"):
        code = code.clip(0, fmt.overflow_bits)
    else:
        outward = _outward(negative, options.rounding) | (magnitude == carrier.infinity)
        code = where(outward, code.clip(0, fmt.overflow_bits), code.clip(0, fmt.max_bits))
    # Subnormal results become zero, if that is wanted or if the format has none.
    flushed = magnitude < 0  # False for all
    if options.flush_to_zero or not fmt.subnormals:
        flushed = (code < 2**fmt.mantissa_bits) & (magnitude > 0)
        code = where(flushed, 0, code)
    if not options.return_flags:
        return code, []

    # Flags. An infinity that came in overflows only if the format has to put a number or NaN in its place.
    number, nan = magnitude < carrier.infinity, magnitude > carrier.infinity
    overflow = beyond & (number if fmt.overflow_bits == fmt.infinity_bits else ~nan)
    inexact = overflow | flushed | (number & (rest != 0))
    # Tiny: below the smallest normal number even after rounding, if exponents had no end. Just below that number
    # such a format would keep one bit more: hence `drop - 1`.
    finer, _ = _round_off(significand, drop - 1, negative, options.rounding, draw, carrier)
    is_tiny = (magnitude < smallest_normal) & (finer < 2 ** (fmt.mantissa_bits + 1))
    underflow = flushed | (is_tiny & inexact)
    invalid = nan & (magnitude & 2 ** (carrier.mantissa_bits - 1) == 0)
    return code, [inexact, underflow, overflow, invalid, nan & False]


def _round_off(
    significand: Array, drop: Array, negative: Array, rounding: str, draw: Array | None, carrier: Carrier
) -> tuple[Array, Array]:
    """significand / 2^drop rounded to a whole number, and what fell off. draw: random bits, one below the width."""
    # If a number moves two places past its leading bit, all of it falls off, and that is less than half. To move it
    # farther changes nothing, and processors cannot shift by more than the width.
    shift = drop.clip(0, carrier.mantissa_bits + 2)
    kept = significand >> shift
    rest = significand - (kept << shift)
    if rounding == "nearest-even":
        away = 2 * rest + (kept & 1) > 1 << shift  # more than half; from exactly half an odd `kept`
    elif rounding == "nearest-away":
        away = 2 * rest >= 1 << shift
    elif rounding == "stochastic":
        # The probability rest / 2^drop, in units of 2^-31 or 2^-63. Here it does matter how far a number moves.
        away = (rest << (carrier.width - 1 - shift)) >> (drop - shift).clip(0, carrier.width - 1) > draw
    else:
        away = (rest > 0) & _outward(negative, rounding)
    return kept + away, rest


def _outward(negative: Array, rounding: str) -> Array:
    """True where a directed rounding leads away from zero."""
    if rounding == "toward-zero":
        return negative & False
    return negative if rounding == "down" else ~negative


# Decoding.


def decode_integers(bits: Array, fmt: BitLayout, carrier: Carrier) -> Array:
    """The numbers that bits (of any integer type) stand for, as the carrier's: those that it has not are rounded."""
    # A subnormal number is computed below. It must be normal in the carrier, unless it has the same bits there.
    lowest = fmt.min_exponent - fmt.mantissa_bits
    if carrier == FLOAT32 and not (is_within_float32(fmt) and (fmt.bias == carrier.bias or lowest >= -126)):
        return narrowed(decode_integers(bits, fmt, FLOAT64))
    bits = cast(bits, carrier.integer)
    code = bits & (2 ** (fmt.width - 1) - 1)
    mantissa = (code & (2**fmt.mantissa_bits - 1)) << (carrier.mantissa_bits - fmt.mantissa_bits)

    # Normal numbers: move the code to its place, and change the bias.
    result = _carried(code, fmt, carrier)
    # Field 0: zero and the subnormal numbers.
    is_low = code < 2**fmt.mantissa_bits
    if not fmt.subnormals:
        result = where(is_low, 0, result)
    elif carrier.bias != fmt.bias:  # the carrier has a leading 1 there: 0.mantissa = 1.mantissa - 1, exactly
        with_one = view(mantissa + _carried(2**fmt.mantissa_bits, fmt, carrier), carrier.floating)
        result = where(is_low, view(with_one - fmt.smallest_normal, carrier.integer), result)
        if lowest < -1022:  # some are subnormal in float64, too: so many times its smallest one, 2^-1074
            result = where(code < 2 ** (-1022 - lowest), code << (lowest + 1074), result)
    # Above the largest number.
    if fmt.infinities or fmt.nans:
        quiet_nan = carrier.infinity | 2 ** (carrier.mantissa_bits - 1) | mantissa
        result = where(code > fmt.max_bits, quiet_nan, result)
        if fmt.infinities:
            result = where(code == fmt.infinity_bits, carrier.infinity, result)
    # The sign.
    result |= ((bits >> (fmt.width - 1)) & 1) << (carrier.width - 1)
    return view(result, carrier.floating)


# float32 and float64. The processor's own casts take subnormal numbers for 0 if some library has set it to.


def widened(x: Array) -> Array:
    """float32 as float64: a decoding."""
    return decode_integers(view(x, FLOAT32.integer), FP32, FLOAT64)


def narrowed(x: Array) -> Array:
    """float64 rounded to float32: an encoding."""
    code, _ = encode_integers(view(x, FLOAT64.integer), 0, FP32, Options("nearest-even", 0, False))
    return view(cast(code, FLOAT32.integer), FLOAT32.floating)


def is_within_float32(fmt: BitLayout) -> bool:
    """Whether every number of the format is a float32, subnormal ones (down to 2^-149) included."""
    return fmt.max_exponent <= 127 and fmt.min_exponent - fmt.mantissa_bits >= -149
