"""Arithmetic on bit patterns: its steps, the results against two other implementations, and what it accepts."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precision import arithmetic
from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from tests.support.arithmetic_cases import OPERANDS, apply, assert_same
from tests.support.oracles import FLAGS, ROUNDINGS, boundaries, by_float64, softfloat

EIGHT_BITS = {
    "E4M3": FP8_E4M3,
    "E5M2": FP8_E5M2,
    "E4M3 saturating": FloatFormat(4, 3, infinities=False, saturate=True),
    "E5M2 saturating": FloatFormat(5, 2, saturate=True),
    "without NaN": FloatFormat(4, 3, nans=False),
    "numbers only": FloatFormat(4, 3, infinities=False, nans=False),
    "without subnormals": FloatFormat(4, 3, subnormals=False),
    "another bias": FloatFormat(4, 3, bias=11, infinities=False),
    "all below 1": FloatFormat(3, 4, bias=9),
    "all above 1": FloatFormat(3, 4, bias=-3),
    "one bit of mantissa": FloatFormat(6, 1),
    "no mantissa": FloatFormat(7, 0, infinities=False),
    "one bit of exponent": FloatFormat(1, 6, infinities=False),
    "three bits": FloatFormat(1, 1, infinities=False, nans=False),
}
SIXTEEN_BITS = {
    "BF16": BF16,
    "BF16 flushing": FloatFormat(8, 7, subnormals=False),
    "E3M12": FloatFormat(3, 12),
    "E2M13": FloatFormat(2, 13),
    "E1M14": FloatFormat(1, 14, infinities=False),
    "E4M11": FloatFormat(4, 11),
    "E9M6": FloatFormat(9, 6, bias=200),
}


# These show each kind of special number there is; the others are combinations.
QUICK = ("E4M3", "numbers only", "no mantissa", "three bits", "BF16 flushing")


def kinds(formats):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in formats]


def assert_as_float64(operation, fmt, rounding, *operands):
    theirs = by_float64(operation, fmt, rounding, *operands)
    invalid = theirs[1]["invalid"]
    if not fmt.nans and invalid.any():
        with pytest.raises(ValueError, match="no NaN"):
            apply(operation, fmt, rounding, *operands)
        operands = [x[~invalid] for x in operands]
        theirs = by_float64(operation, fmt, rounding, *operands)
    assert_same(apply(operation, fmt, rounding, *operands), theirs, fmt, operands)


def draw(operation, fmt, count, seed=0):
    """Patterns in contiguous arrays of the format's own dtype, half of them anything, half boundaries."""
    generator = np.random.default_rng(seed)
    dtype = np.uint8 if fmt.width <= 8 else np.uint16
    special = boundaries(fmt)

    def mixed():
        is_any = generator.random(count) < 0.5
        return np.where(is_any, generator.integers(2**fmt.width, size=count), generator.choice(special, count))

    return [mixed().astype(dtype) for _ in range(OPERANDS[operation])]


def every_pair(fmt):
    patterns = np.arange(2**fmt.width, dtype=np.uint8)
    return [x.ravel() for x in np.meshgrid(patterns, patterns, indexing="ij")]


# Against two other implementations.


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("operation", OPERANDS)
def test_fp16_is_softfloats(operation, rounding):
    pytest.importorskip("softfloatpy")
    operands = draw(operation, FP16, 2000, seed=1)
    assert_same(apply(operation, FP16, rounding, *operands), softfloat(operation, rounding, *operands), FP16, operands)


@pytest.mark.parametrize("operation", OPERANDS)
def test_fp16_on_boundaries(operation):
    if operation == "sqrt":
        operands = [np.arange(2**16, dtype=np.uint16)]  # all there are
    else:
        operands = draw(operation, FP16, 20_000)
    for rounding in ROUNDINGS:
        assert_as_float64(operation, FP16, rounding, *operands)


def test_fma_gives_the_rounding_error_of_a_product():
    """a · b - round(a · b), of which nothing but the low bits is left: they move up by as many as 22 places."""
    a, b = (FP16.encode(np.exp2(np.random.default_rng(i).uniform(-2, 7, 20_000))) for i in (1, 2))
    product = arithmetic.multiply(a, b)
    error, flags = arithmetic.fma(a, b, product ^ 0x8000, return_flags=True)
    x, y, rounded = (FP16.decode(bits).astype(np.float64) for bits in (a, b, product))
    exact = x * y - rounded
    assert (np.abs(exact) > 0).mean() > 0.5
    near = (exact != 0) & (np.abs(exact) < 2.0**-15 * rounded)
    assert near.any()
    representable = exact % FP16.smallest_subnormal == 0
    np.testing.assert_array_equal(FP16.decode(error)[representable], exact[representable])
    np.testing.assert_array_equal(flags.inexact, ~representable)


@pytest.mark.parametrize("name", kinds(EIGHT_BITS))
def test_every_pair_of_eight_bits(name):
    fmt = EIGHT_BITS[name]
    for rounding in ROUNDINGS:
        for operation in ("add", "subtract", "multiply", "divide"):
            assert_as_float64(operation, fmt, rounding, *every_pair(fmt))
        assert_as_float64("sqrt", fmt, rounding, np.arange(2**fmt.width, dtype=np.uint8))
        assert_as_float64("fma", fmt, rounding, *draw("fma", fmt, 10_000))


@pytest.mark.parametrize("name", kinds(SIXTEEN_BITS))
def test_other_formats_of_sixteen_bits(name):
    fmt = SIXTEEN_BITS[name]
    for rounding in ROUNDINGS:
        for operation in OPERANDS:
            assert_as_float64(operation, fmt, rounding, *draw(operation, fmt, 10_000))


@pytest.mark.parametrize("fmt", [FP16, FP8_E4M3, SIXTEEN_BITS["BF16 flushing"]], ids=["FP16", "E4M3", "BF16 flushing"])
def test_compare_is_the_order_of_numbers(fmt):
    special = boundaries(fmt)
    a, b = special[:: 1 + special.size // 1024, None], special[:: 1 + special.size // 1024][None, :]
    x, y = fmt.decode(a), fmt.decode(b)
    expected = np.where(np.isnan(x) | np.isnan(y), 2, np.sign(np.nan_to_num(x > y) * 1 - (x < y) * 1))
    result = arithmetic.compare(a, b, fmt)
    assert result.dtype == np.int8
    assert set(expected.ravel()) == {-1, 0, 1, 2}
    np.testing.assert_array_equal(result, expected)


# Special cases, by their names.

ZERO, ONE, INF, NAN, SIGNALLING = 0, 0x3C00, 0x7C00, 0x7E00, 0x7D00
MINUS_ZERO, MINUS_ONE, MINUS_INF = (0x8000 | bits for bits in (ZERO, ONE, INF))
LARGEST, SMALLEST, SMALLEST_NORMAL = 0x7BFF, 0x0001, 0x0400


@pytest.mark.parametrize(
    "operation, operands, expected, raised",
    [
        ("add", (INF, MINUS_INF), NAN, "invalid"),
        ("subtract", (INF, INF), NAN, "invalid"),
        ("subtract", (ONE, ONE), ZERO, ""),
        ("add", (MINUS_ZERO, MINUS_ZERO), MINUS_ZERO, ""),
        ("add", (ZERO, MINUS_ZERO), ZERO, ""),
        ("add", (LARGEST, LARGEST), INF, "overflow inexact"),
        ("multiply", (MINUS_ONE, ZERO), MINUS_ZERO, ""),
        ("multiply", (ZERO, INF), NAN, "invalid"),
        ("multiply", (SMALLEST, SMALLEST), ZERO, "underflow inexact"),
        ("multiply", (SMALLEST_NORMAL, 0x3BFF), SMALLEST_NORMAL, "underflow inexact"),  # a midpoint just below it
        ("multiply", (0x3BE0, 0x0410), SMALLEST_NORMAL, "inexact"),  # that was tiny before it was rounded
        ("divide", (ONE, MINUS_ZERO), MINUS_INF, "divide_by_zero"),
        ("divide", (ZERO, ZERO), NAN, "invalid"),
        ("divide", (INF, INF), NAN, "invalid"),
        ("divide", (INF, ZERO), INF, ""),
        ("divide", (MINUS_ONE, INF), MINUS_ZERO, ""),
        ("divide", (NAN, ZERO), NAN, ""),
        ("sqrt", (MINUS_ZERO,), MINUS_ZERO, ""),
        ("sqrt", (MINUS_ONE,), NAN, "invalid"),
        ("sqrt", (INF,), INF, ""),
        ("fma", (ZERO, INF, NAN), NAN, "invalid"),
        ("fma", (INF, ONE, MINUS_INF), NAN, "invalid"),
        ("fma", (LARGEST, LARGEST, MINUS_INF), MINUS_INF, ""),
        ("fma", (ONE, NAN, INF), NAN, ""),
        ("add", (SIGNALLING, ONE), NAN, "invalid"),
        ("add", (0xFE01, ONE), NAN, ""),
    ],
)
def test_special_cases_of_ieee_754(operation, operands, expected, raised):
    bits, flags = apply(operation, FP16, "nearest-even", *operands)
    assert f"{bits:#06x}" == f"{expected:#06x}"
    assert {name for name in FLAGS if flags[name]} == set(raised.split())


# Whole numbers only.


class Dtypes(TorchDispatchMode):
    """Collects the dtypes of all tensors that go into torch's operators, and come out."""

    def __init__(self):
        super().__init__()
        self.seen, self.operators = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values(), result):
            if isinstance(value, torch.Tensor):
                self.seen.add(value.dtype)
        self.operators.add(str(func))
        return result


@pytest.mark.parametrize("operation", [*OPERANDS, "compare"])
def test_no_float_anywhere(operation):
    fmt = FP16
    operands = [torch.from_numpy(x) for x in draw({"compare": "add"}.get(operation, operation), fmt, 1000)]
    with Dtypes() as dtypes:
        getattr(arithmetic, operation)(*operands)
    assert len(dtypes.operators) > 8
    assert {dtype for dtype in dtypes.seen if dtype.is_floating_point or dtype.is_complex} == set()


# What goes in and comes out.


def test_kinds_of_operands():
    a, b = np.array([[0x3C00], [0x4000]]), np.array([0x3C00, 0, 0xBC00], np.uint16)
    expected = np.array([[0x4000, 0x3C00, 0], [0x4200, 0x4000, 0x3C00]])
    result = arithmetic.add(a, b)
    assert isinstance(result, np.ndarray) and result.dtype == np.uint16
    np.testing.assert_array_equal(result, expected)
    for dtype in (torch.int32, torch.int64, torch.uint16):
        tensor = arithmetic.add(torch.from_numpy(a).to(dtype), torch.from_numpy(b))
        assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint16
        np.testing.assert_array_equal(tensor.numpy(), expected)
    mixed = arithmetic.add(torch.from_numpy(a), b, return_flags=True)
    assert isinstance(mixed[0], torch.Tensor) and isinstance(mixed[1].inexact, torch.Tensor)
    number = arithmetic.add(0x3C00, 0x3C00, return_flags=True)
    assert type(number[0]) is int and type(number[1].inexact) is bool
    assert type(arithmetic.compare(0x3C00, 0)) is int
    scalar = arithmetic.add(np.uint16(0x3C00), 0x3C00)
    assert isinstance(scalar, np.uint16) and scalar == 0x4000
    assert arithmetic.add(torch.tensor(0x3C00), 0x3C00).shape == ()
    assert arithmetic.sqrt(np.zeros((0, 3), np.uint16)).shape == (0, 3)
    assert arithmetic.multiply(np.uint8(0x38), np.uint8(0x38), FP8_E4M3).dtype == np.uint8
    np.testing.assert_array_equal(arithmetic.add(b[::-1], b[::2][:1]), arithmetic.add(b[::-1].copy(), 0x3C00))


def test_operands_are_left_alone_and_large_ones_are_whole():
    a = draw("sqrt", FP16, 100_001)[0]
    before = a.copy()
    whole = arithmetic.add(a, a[::-1], return_flags=True)
    np.testing.assert_array_equal(a, before)
    for i in (0, 2**15 - 1, 2**15, 2**16 + 1, 100_000):
        bits, flags = arithmetic.add(int(a[i]), int(a[-1 - i]), return_flags=True)
        assert (bits, flags.inexact) == (whole[0][i], whole[1].inexact[i])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: arithmetic.add(2, np.float16([1])), TypeError, "operand 2 is float16.*encode"),
        (lambda: arithmetic.add(0, -1), ValueError, "operand 2 holds -1"),
        (lambda: arithmetic.sqrt(torch.tensor([256]), FP8_E5M2), ValueError, "256: .* 8 bits"),
        (lambda: arithmetic.add(0, 0, FP32), ValueError, "32 bits.*at most 16"),
        (lambda: arithmetic.compare(0, 0, TF32), ValueError, "19 bits"),
        (lambda: arithmetic.add(0, 0, "FP16"), TypeError, "FloatFormat"),
        (lambda: arithmetic.add(0, 0, FP16, "nearest"), ValueError, "unknown rounding 'nearest'.*nearest-even"),
        (lambda: arithmetic.add(0, 0, FP16, "stochastic"), ValueError, "stochastic"),
        (lambda: arithmetic.add(np.zeros(2, int), np.zeros(3, int)), ValueError, r"\(2,\) and \(3,\)"),
        (lambda: arithmetic.divide(0, 0, FloatFormat(4, 3, nans=False)), ValueError, "no NaN"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
