"""Arithmetic on bit patterns: its steps, the results against two other implementations, and what it accepts."""

import shutil

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precision import arithmetic
from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from tests.support.helpers import slow
from tests.support.oracles import FLAGS, ROUNDINGS, boundaries, by_float64, softfloat

OPERANDS = {"add": 2, "subtract": 2, "multiply": 2, "divide": 2, "fma": 3, "sqrt": 1}

# Of each kind of special number there is one in the quick ones; the others are combinations.
FORMATS = {
    "FP16": FP16,
    "E4M3": FP8_E4M3,
    "numbers only": FloatFormat(4, 3, infinities=False, nans=False),
    "no mantissa": FloatFormat(7, 0, infinities=False),
    "three bits": FloatFormat(1, 1, infinities=False, nans=False),
    "BF16 flushing": FloatFormat(8, 7, subnormals=False),
}
COMBINATIONS = {
    "E5M2 saturating": FloatFormat(5, 2, saturate=True),
    "without NaN": FloatFormat(4, 3, nans=False),
    "another bias": FloatFormat(4, 3, bias=11, infinities=False),
    "all below 1": FloatFormat(3, 4, bias=9),
    "all above 1": FloatFormat(3, 4, bias=-3, subnormals=False),
    "one bit of mantissa": FloatFormat(6, 1),
    "BF16": BF16,
    "E1M14": FloatFormat(1, 14, infinities=False),
    "E9M6": FloatFormat(9, 6, bias=200),
}


def assert_same(theirs, operation, fmt, rounding, *operands):
    """Equal bits and flags; any quiet NaN is as good as another."""
    bits, flags = getattr(arithmetic, operation)(*operands, fmt, rounding, return_flags=True)
    expected, raised = theirs
    nan = expected & 2 ** (fmt.width - 1) - 1 > (fmt.infinity_bits or fmt.max_bits)
    np.testing.assert_array_equal(bits[~nan], expected[~nan])
    assert (bits[nan] & 2 ** (fmt.width - 1) - 1 >= (fmt.nan_bits or 0)).all()
    for name in FLAGS:
        np.testing.assert_array_equal(getattr(flags, name), raised[name], name)


def assert_as_float64(operation, fmt, rounding, *operands):
    theirs = by_float64(operation, fmt, rounding, *operands)
    invalid = theirs[1]["invalid"]
    if not fmt.nans and invalid.any():
        with pytest.raises(ValueError, match="no NaN"):
            getattr(arithmetic, operation)(*operands, fmt, rounding)
        operands = [x[~invalid] for x in operands]
        theirs = by_float64(operation, fmt, rounding, *operands)
    assert_same(theirs, operation, fmt, rounding, *operands)


def draw(operation, fmt, count, seed=0):
    """Patterns of the format's own dtype: half anything, half boundaries, and all combinations of special numbers.

    To half of the products that fma adds to, it adds nearly what leaves their rounding error: the low bits alone.
    """
    generator = np.random.default_rng(seed)
    dtype = np.uint8 if fmt.width <= 8 else np.uint16
    near = boundaries(fmt)

    def mixed():
        anything = generator.integers(2**fmt.width, size=count)
        return np.where(generator.random(count) < 0.5, anything, generator.choice(near, count)).astype(dtype)

    drawn = [mixed() for _ in range(OPERANDS[operation])]
    if operation == "fma":
        product = arithmetic.multiply(*(x % (fmt.max_bits + 1) for x in drawn[:2]), fmt)
        near = (product ^ dtype(2 ** (fmt.width - 1))) + generator.integers(-2, 3, count) & 2**fmt.width - 1
        drawn[2] = np.where(generator.random(count) < 0.5, near, drawn[2]).astype(dtype)
    one, signalling = int(fmt.encode(np.float32(fmt.smallest_normal * 2))), (fmt.infinity_bits or fmt.max_bits - 1) + 1
    special = {0, 1, 2**fmt.mantissa_bits, one, fmt.max_bits, fmt.max_bits + 1, signalling, 2 ** (fmt.width - 1) - 1}
    special = np.array(sorted(special | {code | 1 << (fmt.width - 1) for code in special}), dtype)
    every = np.meshgrid(*[special] * len(drawn), indexing="ij")
    return [np.concatenate([x, y.ravel()]) for x, y in zip(drawn, every)]


# Against two other implementations.


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("operation", OPERANDS)
def test_fp16_is_softfloats(operation, rounding):
    pytest.importorskip("softfloatpy")
    operands = draw(operation, FP16, 2000, seed=1)
    assert_same(softfloat(operation, rounding, *operands), operation, FP16, rounding, *operands)


MANY = 10_000_000  # beside these `make exhaustive` takes all pairs, with one rounding
ROWS = [(name, 10_000) for name in FORMATS]
ROWS += slow(*((name, 10_000) for name in COMBINATIONS), mark=pytest.mark.slow)
ROWS += slow(("FP16", MANY), mark=pytest.mark.exhaustive)


@pytest.mark.parametrize("operation", OPERANDS)
@pytest.mark.parametrize("name, count", ROWS)
def test_every_format_is_float64_rounded_once(name, count, operation):
    """Of 8 bits every pair there is, and of 16 every number that has a root."""
    fmt = (FORMATS | COMBINATIONS)[name]
    operands = draw(operation, fmt, count)
    if len(operands) < 3 and fmt.width * len(operands) <= 16:
        patterns = np.arange(2**fmt.width, dtype=operands[0].dtype)
        operands = [x.ravel() for x in np.meshgrid(*[patterns] * len(operands), indexing="ij")]
    for rounding in ROUNDINGS:
        assert_as_float64(operation, fmt, rounding, *operands)


def compiled(operation):
    """The steps of `operation` as one loop of machine code, bits to bits; as they are without a C++ compiler."""

    def steps(a, b):
        return operation.__wrapped__(a, b)[0]

    return torch.compile(steps) if shutil.which("g++") or shutil.which("clang++") else steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation, own", [("add", torch.add), ("multiply", torch.mul)], ids=["add", "multiply"])
def test_every_pair(operation, own):
    """torch computes in float32 and rounds that: products are exact there, and sums have 24 ≥ 2 · 11 + 2 bits."""
    steps, rows = compiled(getattr(arithmetic, operation)), 16
    patterns = torch.arange(2**16, dtype=torch.int32)
    numbers = patterns.to(torch.uint16).view(torch.float16)
    for start in range(0, 2**16, rows):
        block = slice(start, start + rows)
        expected = own(numbers[block, None], numbers)
        expected = expected.view(torch.int16).masked_fill_(expected.isnan(), 0x7E00)
        bits = steps(patterns[block, None], patterns).to(torch.int16)
        assert torch.equal(bits, expected), f"{operation}: rows {start} to {start + rows}"


@pytest.mark.parametrize("name", ["FP16", "E4M3", "BF16 flushing"])
def test_compare_is_the_order_of_numbers(name):
    fmt = FORMATS[name]
    special = boundaries(fmt)
    a, b = special[:: 1 + special.size // 1024, None], special[:: 1 + special.size // 1024][None, :]
    x, y = fmt.decode(a), fmt.decode(b)
    expected = np.where(np.isnan(x) | np.isnan(y), 2, np.sign(np.nan_to_num(x > y) * 1 - (x < y) * 1))
    result = arithmetic.compare(a, b, fmt)
    assert result.dtype == np.int8
    assert set(expected.ravel()) == {-1, 0, 1, 2}
    np.testing.assert_array_equal(result, expected)


# Whole numbers only.


class Dtypes(TorchDispatchMode):
    """Collects the dtypes of the tensors that come out of torch's operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append(getattr(result, "dtype", torch.bool))
        return result


@pytest.mark.parametrize("operation", [*OPERANDS, "compare"])
def test_no_float_anywhere(operation):
    operands = draw("add" if operation == "compare" else operation, FP16, 1000)
    with Dtypes() as dtypes:
        dtypes.seen = []
        getattr(arithmetic, operation)(*map(torch.from_numpy, operands))
    assert len(dtypes.seen) > 8 and not any(d.is_floating_point or d.is_complex for d in dtypes.seen)


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
