"""Operators with an accumulator of few bits inside of an emulation: of any format, shape and dtype."""

import pytest
import torch
from torch.nn import functional as F

from precision import accumulate
from precision.emulate import emulate
from precision.formats import FP16, FP32


def test_values_of_fp32_are_added_in_an_fp16_accumulator_and_rounded_once():
    """2^-24 + (1 + 2^-11), and (1 + 2^-12)², are just above half-way from 1 to the next number of FP16."""
    x = torch.tensor([[1 + 2.0**-12]])
    with emulate(FP32, accumulator=FP16):
        total = torch.tensor([2.0**-24, 1 + 2.0**-11]).sum()
        products = x @ x, torch.bmm(x[None], x[None]), x @ x[0], x[0] @ x[0], F.conv2d(x[None, None], x[None, None])
    assert total == 1 + FP16.epsilon
    assert {product.item() for product in products} == {1 + FP16.epsilon}


def test_a_vector_is_multiplied_as_a_matrix_is():
    torch.manual_seed(0)
    a, b = FP16.quantize(torch.randn(3, 300)), FP16.quantize(torch.randn(300))
    with emulate(FP16, accumulator=FP16):
        assert torch.ones(3000) @ torch.ones(3000) == 2048
        by_matrix, by_vector, each = a @ b[:, None], a @ b, [row @ b for row in a]
        linear = F.linear(b, a)
    assert torch.equal(by_vector, by_matrix[:, 0]) and torch.equal(linear, by_vector)
    assert torch.equal(by_vector, torch.stack(each)) and each[0].shape == ()
    assert torch.equal(by_vector, accumulate.dot(a, b.expand(3, 300), FP16))
    assert not torch.equal(by_vector, FP16.quantize(a @ b))


def test_factors_of_what_is_added():
    a, b, c = torch.full((2, 1), 2.0), torch.full((1, 2), 3.0), torch.full((2, 2), 10.0)
    nan = torch.full((2, 2), torch.nan)
    with emulate(FP16, accumulator=FP16):
        assert torch.addmm(c, a, b, beta=0.5, alpha=4).unique().tolist() == [29]
        assert torch.baddbmm(c[None], a[None], b[None], beta=0.5, alpha=4).unique().tolist() == [29]
        assert torch.addmm(nan, a, b, beta=0).unique().tolist() == [6]
        long = torch.ones(1, 1, 2100)
        assert torch.baddbmm(torch.zeros(1, 1, 1), long, long.mT).item() == 2048


def test_dimensions_are_added_in_order_whatever_the_order_they_are_named_in():
    torch.manual_seed(0)
    x = FP16.quantize(torch.randn(40, 5, 40))
    with emulate(FP16, accumulator=FP16):
        assert torch.equal(x.sum((2, 0)), x.sum((0, 2))) and torch.equal(x.mean((-1, 0)), x.mean((0, 2)))
        assert torch.equal(x.sum((0, 2)), x.transpose(1, 2).reshape(1600, 5).sum(0))


def test_nothing_and_a_single_number():
    calls = [
        lambda: torch.zeros(0).sum(),
        lambda: torch.zeros(0).mean(),
        lambda: torch.zeros(2, 0).mean(1),
        lambda: torch.zeros(0, 3).sum(0, keepdim=True),
        lambda: torch.zeros(0, 3).mean(1),
        lambda: torch.zeros(2, 0) @ torch.zeros(0, 3),
        lambda: torch.zeros(2, 0) @ torch.zeros(0),
        lambda: torch.tensor(2.0).sum(),
        lambda: torch.tensor(2.0).sum(0, keepdim=True),
        lambda: torch.tensor(2.0).mean(-1),
    ]
    for call in calls:
        with emulate(FP16, accumulator=FP16):
            result = call()
        torch.testing.assert_close(result, call(), equal_nan=True)


def test_a_dtype_that_is_asked_for():
    with emulate(FP16, accumulator=FP16):
        total = torch.ones(2100, dtype=torch.float16).sum(dtype=torch.float32)
        mean = torch.ones(2100).mean(dtype=torch.float64)
    assert total.dtype == torch.float32 and total == 2048 and mean.dtype == torch.float64


def test_gradients_of_a_convolutions_input_are_added_in_the_accumulator_too():
    """A pixel gets a term from each channel, and one from each window that it is in."""
    one, row = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.zeros(1, 1, 1, 5, requires_grad=True)
    with emulate(FP16, accumulator=FP16):
        F.conv2d(one, torch.ones(2100, 1, 1, 1)).backward(torch.ones(1, 2100, 1, 1))
        F.conv2d(row, torch.tensor([[[[2048.0, 1, 1]]]])).backward(torch.ones(1, 1, 1, 3))
    assert one.grad.item() == 2048
    assert row.grad.flatten().tolist() == [2048, 2048, 2048, 2, 1]  # the third: 2048 + 1 + 1


def test_transposed_convolutions_say_that_they_are_not_simulated():
    with emulate(FP16, accumulator=FP16), pytest.raises(NotImplementedError, match="not transposed"):
        F.conv_transpose2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
