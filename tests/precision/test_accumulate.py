"""Sums with accumulators of few bits: each step is the simulated operation."""

import functools

import numpy as np
import pytest
import torch

from precision import accumulate, arithmetic
from precision.accumulate import batch_norm_statistics, dot, matmul, softmax
from precision.emulate import emulate
from precision.formats import BF16, FP8_E5M2, FP16, FP32, FloatFormat

E6M9 = FloatFormat(6, 9)  # one that torch does not have
ACCUMULATORS = {"FP16": FP16, "BF16": BF16, "E6M9": E6M9}
METHODS = ("sequential", "pairwise", "kahan")
U = FP16.epsilon / 2


def numbers(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float16)


def rounded(bits, fmt):
    """What a sum in `fmt` gives in the end: an FP16 number."""
    return FP16.decode(FP16.encode(fmt.decode(bits)))


# Each step, by the bits.


def add_bits(method, bits, fmt):
    """The sum of a list of patterns, with `arithmetic` alone."""
    add, subtract = functools.partial(arithmetic.add, fmt=fmt), functools.partial(arithmetic.subtract, fmt=fmt)
    if method == "sequential":
        return functools.reduce(add, bits, 0)
    if method == "pairwise":
        while len(bits) > 1:
            bits = [add(*bits[i : i + 2]) if i + 1 < len(bits) else bits[i] for i in range(0, len(bits), 2)]
        return add(0, bits[0])
    total = compensation = 0
    for x in bits:
        x = subtract(x, compensation)
        new = add(total, x)
        compensation = subtract(subtract(new, total), x)
        total = new
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accumulator", ACCUMULATORS.values(), ids=ACCUMULATORS)
def test_every_addition_is_the_simulated_one(method, accumulator):
    for x in (*(numbers(n, seed=n, scale=2.0 ** (n % 5)) for n in (1, 2, 7, 20)), np.full(3, 60_000, np.float16)):
        x = x if accumulator == FP16 else accumulator.quantize(x.astype(np.float32)).astype(np.float16)
        bits = [int(b) for b in accumulator.encode(x)]
        expected = rounded(add_bits(method, bits, accumulator), accumulator)
        np.testing.assert_array_equal(accumulate.sum(x, accumulator=accumulator, method=method), expected)


@pytest.mark.parametrize("accumulator", ACCUMULATORS.values(), ids=ACCUMULATORS)
def test_every_product_is_the_simulated_one(accumulator):
    a, b = (accumulator.quantize(numbers(24, seed=i).astype(np.float32)).astype(np.float16) for i in (1, 2))
    products = arithmetic.multiply(accumulator.encode(a), accumulator.encode(b), accumulator)
    expected = rounded(add_bits("sequential", [int(p) for p in products], accumulator), accumulator)
    assert dot(a, b, accumulator) == expected


def test_every_step_of_a_softmax_is_the_simulated_one():
    x = numbers(20, seed=10, scale=3.0)
    bits = FP16.encode(x)
    difference = arithmetic.subtract(bits, FP16.encode(x.max()))
    powers = FP16.encode(np.exp(FP16.decode(difference).astype(np.float64)))
    expected = arithmetic.divide(powers, add_bits("sequential", [int(p) for p in powers], FP16))
    np.testing.assert_array_equal(FP16.encode(softmax(x, accumulator=FP16)), expected)


def test_every_step_of_a_statistic_is_the_simulated_one():
    x = numbers(21, 10, seed=11)
    bits, count = FP16.encode(x), FP16.encode(np.float16(21))
    mean = arithmetic.divide(add_bits("sequential", list(bits), FP16), count)
    deviation = arithmetic.subtract(bits, mean)
    squares = arithmetic.multiply(deviation, deviation)
    variance = arithmetic.divide(add_bits("sequential", list(squares), FP16), count)
    np.testing.assert_array_equal(batch_norm_statistics(x, FP16), FP16.decode(np.stack([mean, variance])))
    # A count that FP16 has not becomes one that it has; the sum stops at 2048.
    assert batch_norm_statistics(np.ones((2101, 1)), FP16)[0] == FP16.quantize(np.float64(2048 / 2100))


def test_terms_may_have_more_bits_than_the_accumulator():
    """2^-24 + (1 + 2^-8) is just above half-way from 1 to the next number of BF16; in float32 it would be half-way."""
    assert accumulate.sum(np.array([2.0**-24, 1 + 2.0**-8]), accumulator=BF16) == 1 + 2.0**-7
    assert accumulate.sum(np.array([0, 1 + 2.0**-8]), accumulator=BF16) == 1


@pytest.mark.parametrize("accumulator", [FP32, FP16], ids=["FP32", "FP16"])
def test_torchs_rounding_is_the_formats(accumulator):
    """After one operation on numbers of the format, also on the way from float64 by way of float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200_000, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = accumulator.quantize(a * 100), accumulator.quantize(b)
    round_ = accumulate.rounding_to(accumulator)
    for result in (a + b, a - b, a * b, a / b):
        assert torch.equal(round_(result), accumulator.quantize(result))
    assert accumulate.rounding_to(E6M9) == E6M9.quantize


def test_fp32_is_float32_one_after_the_other():
    x = numbers(3000, seed=3)
    assert accumulate.sum(x) == np.float16(np.add.accumulate(x.astype(np.float32))[-1])
    y = numbers(3000, seed=4)
    products = x.astype(np.float32) * y.astype(np.float32)
    assert (products == x.astype(np.float64) * y.astype(np.float64)).all()  # 11 bits by 11 make 22
    assert dot(x, y) == np.float16(np.add.accumulate(products)[-1])


@pytest.mark.accuracy
def test_an_emulation_around_it_changes_nothing():
    """`emulate` rounds what a model computes, not what this module computes a rounding with."""
    ones = torch.ones(1, 2100)
    with emulate(FP16):  # which would stop at 2048
        assert accumulate.sum(ones) == dot(ones, ones) == matmul(ones, ones.T) == 2100
        assert softmax(ones).tolist()[0] == [FP16.quantize(np.float64(1 / 2100))] * 2100
        assert batch_norm_statistics(ones.T) == (1, 0)


# The values, in FP32, against PyTorch's.


def test_softmax_and_matmul_are_the_known_functions():
    x, y = (torch.from_numpy(numbers(*shape, seed=7)) for shape in ((2, 3, 30), (30, 2)))
    expected = torch.softmax(x.double(), 1)
    torch.testing.assert_close(softmax(x, dim=1).double(), expected, rtol=1.01 * U, atol=FP16.smallest_subnormal)
    product = matmul(x, y)
    assert product.dtype == torch.float16 and product.shape == (2, 3, 2)
    torch.testing.assert_close(product.double(), x.double() @ y.double(), rtol=1.01 * U, atol=1e-5)
    for accumulator in (FP32, FP16, FP8_E5M2):
        assert torch.equal(matmul(x, y, accumulator), dot(x[:, :, None], y.T, accumulator))


def test_statistics_are_the_known_ones():
    x = torch.from_numpy(numbers(6, 3, 5, 4, seed=8))
    mean, variance = batch_norm_statistics(x)
    assert mean.dtype == torch.float32 and mean.shape == (3,)
    torch.testing.assert_close(mean, x.float().mean((0, 2, 3)))
    torch.testing.assert_close(variance, x.float().var((0, 2, 3), unbiased=False))
    mean, variance = batch_norm_statistics(x.numpy(), FP16)
    assert isinstance(mean, np.ndarray) and mean.dtype == np.float32 and (FP16.quantize(variance) == variance).all()


# What goes in and comes out.


def test_kinds_dtypes_and_dimensions():
    x = numbers(3, 4, 5, seed=9)
    for dtype in (np.float16, np.float32, np.float64):
        result = accumulate.sum(x.astype(dtype), dim=1)
        assert isinstance(result, np.ndarray) and result.dtype == dtype and result.shape == (3, 5)
        np.testing.assert_array_equal(result, accumulate.sum(torch.from_numpy(x), dim=-2).numpy())
    assert accumulate.sum(x, 0, FP16, "kahan").shape == (4, 5)
    assert isinstance(accumulate.sum(x[0, 0]), np.float16)
    assert accumulate.sum(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert accumulate.sum([0.5, 0.25]) == 0.75
    for method in METHODS:
        assert accumulate.sum(np.zeros((2, 0)), method=method).tolist() == [0, 0]
        assert accumulate.sum(np.array([7.0]), accumulator=FP16, method=method) == 7
    for x, dim in ((np.zeros((2, 0)), -1), (np.zeros((0, 4), np.float16), 0), (torch.zeros(2, 0, 3), 1)):
        result = softmax(x, dim)
        assert result.shape == x.shape and result.dtype == x.dtype and type(result) is type(x)
    weights = torch.ones(3, requires_grad=True)
    assert not dot(weights, weights).requires_grad


def test_values_are_rounded_to_fp16_first_and_last():
    assert accumulate.sum(np.full(3, 1 + 2.0**-11)) == 3  # each a tie that goes to 1; otherwise 3 + 2^-9
    assert accumulate.sum(np.array([2048.0, 1.0])) == 2048 and accumulate.sum(np.array([2048.0, 1.0, 1.0])) == 2050


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: accumulate.sum(np.ones(3), method="neumaier"), ValueError, "unknown method 'neumaier'.*pairwise"),
        (lambda: accumulate.sum(np.ones(3), dim=1), ValueError, r"no dimension 1 in shape \(3,\)"),
        (lambda: accumulate.sum(np.float16(1)), ValueError, "no dimension -1"),
        (lambda: accumulate.sum(np.ones((2, 3)), dim=(0, -2)), ValueError, r"sum: .* dimensions, not \(0, -2"),
        (lambda: accumulate.sum(np.ones((2, 3)), dim=()), ValueError, "sum: .* different dimensions"),
        (lambda: accumulate.sum(np.ones(3), dim=0.0), TypeError, "sum: .* a whole number or a tuple of them, not 0.0"),
        (lambda: softmax(np.ones((2, 3)), dim=(0, 1)), TypeError, r"softmax: .* a whole number, not \(0, 1\)"),
        (lambda: softmax(np.ones(3), dim=None), TypeError, "softmax: dim must be a whole number, not None"),
        (lambda: dot(np.ones((2, 3)), np.ones((4, 3))), ValueError, r"dot: \(2, 3\) and \(4, 3\) are not"),
        (lambda: matmul(np.ones((5, 2, 2, 3)), np.ones((4, 1, 3, 2))), ValueError, "matmul: .* are not"),
        (lambda: accumulate.sum(np.ones(3, int)), TypeError, "sum: .*int64"),
        (lambda: accumulate.sum(np.ones(3), accumulator=torch.float16), TypeError, "FloatFormat.*torch.float16"),
        (lambda: dot(np.ones(3), np.ones(4)), ValueError, r"\(3,\) and \(4,\)"),
        (lambda: dot(np.ones(3), np.float16(1)), ValueError, r"\(\)"),
        (lambda: matmul(np.ones(3), np.ones((3, 2))), ValueError, r"\(3,\) and \(3, 2\)"),
        (lambda: matmul(np.ones((2, 3)), np.ones((2, 3))), ValueError, "k, n"),
        (lambda: softmax(np.ones((2, 3)), dim=2), ValueError, "softmax: there is no dimension 2"),
        (lambda: batch_norm_statistics(np.ones(3)), ValueError, r"\(N, C, …\), not \(3,\)"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
