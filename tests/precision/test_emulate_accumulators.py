"""With an accumulator, emulated sums and products are rounded and added one by one, in order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precision import accumulate
from precision.emulate import emulate
from precision.formats import BF16, FP16, FP32, TF32


@pytest.mark.parametrize("accumulator", [FP16, BF16, TF32])
def test_products_are_rounded_and_added_one_by_one(accumulator):
    torch.manual_seed(0)
    a, b, c = (FP16.quantize(torch.randn(*shape)) for shape in ((3, 50), (50, 2), (3, 2)))
    with emulate(FP16, accumulator):
        product, with_c, total = a @ b, torch.addmm(c, a, b), b.sum(0)
        with_vectors, linear = torch.stack([a @ b[:, 0], a @ b[:, 1]], 1), F.linear(a, b.t())
        one_by_one = torch.tensor([[row @ column for column in b.t()] for row in a])
        convolved = F.conv2d(a.view(3, 50, 1, 1), b.t().reshape(2, 50, 1, 1))
    assert torch.equal(product, accumulate.matmul(a, b, accumulator)) and torch.equal(product, convolved[..., 0, 0])
    assert torch.equal(product, with_vectors) and torch.equal(product, linear) and torch.equal(product, one_by_one)
    assert torch.equal(product, accumulate.dot(a[:, None], b.t(), accumulator))
    assert torch.equal(total, accumulate.sum(b, 0, accumulator))
    assert torch.equal(with_c, FP16.quantize(c + product)) or accumulator == TF32  # whose sum has more bits
    assert not torch.equal(product, FP16.quantize(a @ b)) or accumulator == TF32


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), ((2, 1), (0, 1), 1)])
def test_convolutions_with_an_accumulator(stride, padding, dilation):
    """An accumulator of many bits must give PyTorch's convolution and gradients; FP16 gives nearly that, not quite."""
    torch.manual_seed(0)
    x, w, b = (FP16.quantize(torch.randn(*shape)) for shape in ((2, 3, 7, 6), (4, 3, 3, 2), (4,)))
    results = []
    for accumulator in (FP32, TF32, FP16):
        inputs = [each.clone().requires_grad_() for each in (x, w, b)]
        with emulate(FP16, accumulator):
            y = F.conv2d(*inputs, stride, padding, dilation)
            y.backward(torch.ones_like(y) / 4)
        results.append([y.detach(), *(each.grad for each in inputs)])
    exact, nearly, half = results
    for one, other, another in zip(exact, nearly, half, strict=True):
        assert one.shape == other.shape == another.shape
        size = one.abs().max()
        assert (one - other).abs().max() < 0.004 * size and (one - another).abs().max() < 0.004 * size
    assert not torch.equal(exact[0], half[0]) and not torch.equal(exact[2], half[2])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(2, 1, 3, 3), groups=2), "one group.*accumulator at FP32"),
        (lambda: F.conv1d(torch.ones(1, 2, 5), torch.ones(1, 2, 3)), "2-d"),
        (lambda: F.conv_transpose2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)), "not transposed"),
        *[
            (call, "would add in FP32, not in the accumulator: write")
            for call in (
                lambda: F.avg_pool1d(ROWS, 3),
                lambda: F.adaptive_avg_pool3d(torch.ones(1, 1, 4, 4, 4), 2),
                lambda: F.embedding_bag(AT[None], torch.ones(4, 3), mode="mean"),
                lambda: F.bilinear(ROWS, ROWS, torch.ones(1, 6, 6)),
                lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3),
                lambda: F.fold(torch.ones(1, 4, 9), (4, 4), 2),
                lambda: nn.LSTM(6, 2)(ROWS),
                lambda: torch.segment_reduce(ROWS[0], "sum", lengths=torch.tensor([6])),
                lambda: torch.zeros(3).scatter_reduce_(0, AT, ROWS[0], "mean"),
                lambda: torch.zeros(3).scatter_(0, AT, ROWS[0], reduce="add"),
                lambda: torch.bincount(AT, ROWS[0]),
                lambda: torch.addbmm(torch.ones(2, 2), torch.ones(2, 2, 3), torch.ones(2, 3, 2)),
                lambda: ROWS.cumsum(1),
            )
        ],
    ],
)
def test_what_is_not_simulated_says_so(call, words):
    with emulate(FP16, accumulator=FP16), pytest.raises(NotImplementedError, match=words):
        call()


# Their relatives. Of whole numbers as small as these all sums are exact, so they are PyTorch's.

AT, ROWS = torch.tensor([0, 2, 2, 1, 2, 0]), torch.arange(-3.0, 3).repeat(2, 1)
RELATIVES = {
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0], beta=2, alpha=3),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "addmm_": lambda x: torch.ones(2, 2).addmm_(x, x.t(), beta=3),
    "sum, out": lambda x: torch.sum(x, 1, out=torch.empty(0)),
    "nansum": lambda x: torch.nansum(x.where(x != 2, torch.nan), 1, keepdim=True),
    "trace": lambda x: (x.t() @ x).trace(),
    "index_select": lambda x: x.index_select(1, AT),
    "indexing": lambda x: x[:, AT],
    "embedding": lambda x: F.embedding(AT, x.t(), padding_idx=1),
    "by frequency": lambda x: F.embedding(AT, x.t(), scale_grad_by_freq=True) * 6,
    "scatter_add": lambda x: torch.ones(2, 3).scatter_add(1, AT.expand(2, 6), x),
    "scatter_add of some": lambda x: torch.ones(2, 3).scatter_add(1, AT[None, 1:], x.detach()),
    "index_put_": lambda x: torch.ones(3, 2).index_put_((AT, torch.zeros_like(AT)), x[0], accumulate=True),
    "one number put": lambda x: torch.ones(3).index_put((AT,), x[0, 0], accumulate=True),
    "put_": lambda x: torch.ones(3).put_(AT, x[0], accumulate=True),
    "assigned": lambda x: torch.ones(6).index_put((AT[:2],), x[0, :2]),
    "factors": lambda x: torch.addmm(torch.ones(2, 2), x, x.t(), beta=0.5, alpha=4),
    "factors of a batch": lambda x: torch.baddbmm(torch.ones(1, 2, 2), x[None], x.t()[None], beta=0.5, alpha=4),
    "beta of 0": lambda x: torch.addmm(torch.full((2, 2), torch.nan), x, x.t(), beta=0),
    "sum of nothing": lambda x: torch.zeros(0).sum(),
    "mean of nothing": lambda x: torch.zeros(0).mean(),
    "means of nothing": lambda x: torch.zeros(2, 0).mean(1),
    "no means": lambda x: torch.zeros(0, 3).mean(1),
    "sums of nothing": lambda x: torch.zeros(0, 3).sum(0, keepdim=True),
    "product of nothing": lambda x: torch.zeros(2, 0) @ torch.zeros(0, 3),
    "vector of nothing": lambda x: torch.zeros(2, 0) @ torch.zeros(0),
    "sum of one": lambda x: torch.tensor(2.0).sum(),
    "sum of one, keepdim": lambda x: torch.tensor(2.0).sum(0, keepdim=True),
    "mean of one": lambda x: torch.tensor(2.0).mean(-1),
    "another dtype": lambda x: torch.ones(3).half().sum(dtype=torch.float32),
    "mean in another dtype": lambda x: torch.ones(3).mean(dtype=torch.float64),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_they_and_their_relatives_give_pytorchs_numbers_and_gradients(name):
    results = []
    for accumulator in (FP32, FP16):
        x = ROWS.clone().requires_grad_("out" not in name)
        with emulate(FP16, accumulator):
            y = RELATIVES[name](x)
            if y.requires_grad:
                (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


LONG = {  # 3,000 ones
    "sum": lambda ones: ones.sum(),
    "of rows": lambda ones: ones[:, None].expand(3000, 2).sum(0)[1],
    "mean": lambda ones: ones.mean().double() * 3000,
    "bmm": lambda ones: torch.bmm(ones.view(1, 1, -1), ones.view(1, -1, 1)),
    "baddbmm": lambda ones: torch.baddbmm(torch.zeros(1, 1, 1), ones.view(1, 1, -1), ones.view(1, -1, 1)),
    "linear": lambda ones: F.linear(ones[None], ones[None], ones[:1]),
    "conv2d": lambda ones: F.conv2d(ones.view(1, 30, 10, 10), ones.view(1, 30, 10, 10)),
    "convolution's weight": lambda ones: gradients_of_convolution(ones)[0],
    "convolution's bias": lambda ones: gradients_of_convolution(ones)[1],
    "of float16": lambda ones: ones.half().sum(dtype=torch.float32),
    "addmv_": lambda ones: torch.zeros(1).addmv_(ones[None], ones),
    "mm, out": lambda ones: torch.mm(ones[None], ones[:, None], out=torch.empty(1, 1)),
    "a sum of bool": lambda ones: torch.sum(ones.bool(), dtype=torch.float32),
    "scatter_add": lambda ones: torch.zeros(1).scatter_add(0, torch.zeros(3000, dtype=torch.long), ones),
    "index_put": lambda ones: torch.zeros(2).index_put((ones.long(),), ones, accumulate=True)[1],
    "embedding": lambda ones: torch.autograd.grad(F.embedding(ones.long(), NARROW).sum(), NARROW)[0][1],
}
NARROW = torch.ones(2, 1, requires_grad=True)


def gradients_of_convolution(ones):
    parameters = [torch.ones(1, 1, 1, 1, requires_grad=True), torch.ones(1, requires_grad=True)]
    return torch.autograd.grad(F.conv2d(ones.view(1, 1, 50, 60), *parameters).sum(), parameters)


@pytest.mark.parametrize("name", LONG)
def test_relatives_of_sums_and_products_stop_at_2048(name):
    with emulate(FP16, accumulator=FP16):
        assert LONG[name](torch.ones(3000)).item() == pytest.approx(2048, rel=2**-11)


# Of any format, shape and dtype.


def test_values_of_fp32_are_added_in_an_fp16_accumulator_and_rounded_once():
    """2^-24 + (1 + 2^-11), and (1 + 2^-12)², are just above half-way from 1 to the next number of FP16."""
    x = torch.tensor([[1 + 2.0**-12]])
    with emulate(FP32, accumulator=FP16):
        total = torch.tensor([2.0**-24, 1 + 2.0**-11]).sum()
        products = x @ x, torch.bmm(x[None], x[None]), x @ x[0], x[0] @ x[0], F.conv2d(x[None, None], x[None, None])
    assert total == 1 + FP16.epsilon
    assert {product.item() for product in products} == {1 + FP16.epsilon}


def test_dimensions_are_added_in_order_whatever_the_order_they_are_named_in():
    torch.manual_seed(0)
    x = FP16.quantize(torch.randn(40, 5, 40))
    with emulate(FP16, accumulator=FP16):
        assert torch.equal(x.sum((2, 0)), x.sum((0, 2))) and torch.equal(x.mean((-1, 0)), x.mean((0, 2)))
        assert torch.equal(x.sum((0, 2)), x.transpose(1, 2).reshape(1600, 5).sum(0))


def test_gradients_of_a_convolutions_input_are_added_in_the_accumulator_too():
    """A pixel gets a term from each channel, and one from each window that it is in."""
    one, row = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.zeros(1, 1, 1, 5, requires_grad=True)
    with emulate(FP16, accumulator=FP16):
        F.conv2d(one, torch.ones(2100, 1, 1, 1)).backward(torch.ones(1, 2100, 1, 1))
        F.conv2d(row, torch.tensor([[[[2048.0, 1, 1]]]])).backward(torch.ones(1, 1, 1, 3))
    assert one.grad.item() == 2048
    assert row.grad.flatten().tolist() == [2048, 2048, 2048, 2, 1]  # the third: 2048 + 1 + 1
