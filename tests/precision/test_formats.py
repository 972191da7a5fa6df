"""Formats: which exist, what their numbers are, and the conversion of one number at a time."""

import math
import struct
from fractions import Fraction

import pytest
import torch

from precision import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from precision.one_number import decode_one, encode_one

TORCH_TYPES = {FP16: torch.float16, BF16: torch.bfloat16, FP32: torch.float32}
TORCH_TYPES |= {FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}


def nan64(payload, sign=0):
    """A float64 NaN with this payload, signalling if it is small."""
    return struct.unpack(">d", (sign << 63 | 0x7FF << 52 | payload).to_bytes(8, "big"))[0]


# What a format is.


@pytest.mark.parametrize("fmt", TORCH_TYPES)
def test_limits_are_those_of_torch(fmt):
    theirs = torch.finfo(TORCH_TYPES[fmt])
    ours = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon)
    least = theirs.smallest_normal * theirs.eps
    assert ours == (theirs.max, theirs.smallest_normal, least, theirs.eps)


def test_limits_of_others():
    assert TF32.width == 19 and (TF32.max, TF32.epsilon) == (2.0**128 - 2.0**117, 2.0**-10)
    assert FloatFormat(2, 1, infinities=False, nans=False).max == 6  # FP4: 0, ½, 1, 1½, 2, 3, 4, 6
    assert FloatFormat(4, 3, infinities=False, bias=8).max == 224
    assert FloatFormat(5, 10, subnormals=False).smallest_subnormal == FP16.smallest_normal
    assert FloatFormat(4, 3).max == 240  # as IEEE 754 would have it; E4M3 gains an octave by having no infinity
    assert FloatFormat(5, 10) == FP16 and FloatFormat(5, 10).bias == 15


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 0), {}, "at least 1 bit of exponent"),
        ((0, 7), {}, "at least 1 bit of exponent"),
        ((5, -1), {}, "no fewer than 0"),
        ((5, 11), {}, "has 17 bits: at most 16"),
        ((11, 52), {}, "has 64 bits: at most 16"),
        ((5, 0), {}, "tells NaN from infinity"),
        ((1, 2), {}, "no code for a normal number"),
        ((1, 0), {"nans": False}, "no code for a normal number"),
        ((12, 3), {}, "float64, from which"),
        ((5, 10), {"bias": 1024}, "between 2.-1023 and"),  # the first below 2^-1022
        ((5, 10), {"bias": -994}, "and 2.1024"),
        ((5, 10), {"bias": -2000}, "float64, from which"),
        ((5.0, 10), {}, "must be whole numbers"),
        ((5, 10), {"bias": "15"}, "must be whole numbers"),
    ],
)
def test_formats_that_cannot_exist(arguments, options, message):
    with pytest.raises(TypeError if "whole" in message else ValueError, match=message) as error:
        FloatFormat(*arguments, **options)
    assert f"FloatFormat({arguments[0]}, {arguments[1]})" in str(error.value)


# One number at a time.


def test_one_bit_of_precision():
    """Without mantissa there is no even digit to choose in a tie: IEEE 754, 4.3.1, takes the larger magnitude."""
    powers = FloatFormat(5, 0, nans=False)
    assert [decode_one(encode_one(x, powers)[0], powers) for x in (1.5, 3.0, 6.0, 2.9)] == [2, 4, 8, 2]
    assert encode_one(powers.smallest_normal / 2, powers)[0] == 0  # which is even


def test_nan_keeps_sign_and_payload():
    assert encode_one(nan64(0x7 << 49), FP16) == (0x7F80, set())
    assert encode_one(nan64(0x155 << 42, sign=1), FP16) == (0xFF55, {"invalid"})
    assert encode_one(nan64(1), FP16) == (0x7E00, {"invalid"})  # its payload has no place: still a NaN
    assert encode_one(nan64(1, sign=1), FP8_E4M3) == (0xFF, {"invalid"})
    decoded = struct.unpack(">Q", struct.pack(">d", decode_one(0xFD55, FP16)))[0]
    assert decoded == 0xFFF << 52 | 0x355 << 42


def test_a_format_with_the_range_of_float64():
    wide = FloatFormat(11, 4)
    assert encode_one(wide.smallest_subnormal, wide) == (1, set())
    assert encode_one(5e-324, wide, "up") == (1, {"inexact", "underflow"})
    assert encode_one(wide.smallest_normal, wide)[0] == 16 and encode_one(wide.max, wide)[0] == wide.max_bits


def test_where_overflow_goes():
    saturating = FloatFormat(4, 3, infinities=False, saturate=True)
    only_infinity, neither = FloatFormat(4, 3, nans=False), FloatFormat(3, 2, infinities=False, nans=False)
    for x, fmt, value in (
        (464.1, FP8_E4M3, math.nan),
        (math.inf, FP8_E4M3, math.nan),
        (1e9, saturating, 448.0),
        (-math.inf, saturating, -448.0),
        (464.1, only_infinity, math.inf),
        (1e9, FloatFormat(5, 2, saturate=True), 57344.0),
        (1e9, neither, 28.0),
        (-math.inf, neither, -28.0),
    ):
        bits, flags = encode_one(x, fmt)
        assert decode_one(bits, fmt) == pytest.approx(value, abs=0, nan_ok=True)
        assert flags == {"inexact", "overflow"}
    assert encode_one(464.0, FP8_E4M3) == (0x7E, {"inexact"})  # a tie with 480, the NaN's place, goes to even
    assert decode_one(encode_one(1e9, FP8_E4M3, "toward-zero")[0], FP8_E4M3) == 448
    assert encode_one(math.inf, FP16, "toward-zero") == (0x7C00, set())


def test_without_subnormals():
    normal_only = FloatFormat(5, 10, subnormals=False)
    assert encode_one(-3e-5, normal_only) == (0x8000, {"inexact", "underflow"})
    assert math.copysign(1, decode_one(0x83FF, normal_only)) == -1 and decode_one(0x83FF, normal_only) == 0
    assert decode_one(0x0400, normal_only) == 2.0**-14


def test_stochastic_rounds_away_below_the_distance():
    x = 1 + 2.0**-10 * 0.25
    assert encode_one(x, FP16, "stochastic", draw=Fraction(1, 4) - Fraction(1, 10**30))[0] == 0x3C01
    assert encode_one(x, FP16, "stochastic", draw=Fraction(1, 4))[0] == 0x3C00
    assert encode_one(-x, FP16, "stochastic", draw=0.1)[0] == 0xBC01


def test_what_encode_one_refuses():
    with pytest.raises(ValueError, match="has no NaN: replace"):
        encode_one(math.nan, FloatFormat(3, 2, infinities=False, nans=False))
    with pytest.raises(ValueError, match="unknown rounding 'nearest': use one of nearest-even"):
        encode_one(1.0, FP16, "nearest")
