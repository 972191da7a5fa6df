"""Islands: what a model computes in FP32 on its own stays FP32 under emulation, as in a half model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precision.emulate import emulate
from precision.formats import BF16, FP16, FP32
from tests.support.emulated import kept_bytes, on_grid


class LlamaNorm(nn.Module):
    """As in transformers, line by line; T5's and Gemma's below."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden_states.to(input_dtype)


class T5Norm(LlamaNorm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaNorm(LlamaNorm):
    def forward(self, x):
        wide = x.float()
        output = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (output * (1.0 + self.weight.float())).type_as(x)


class Softmax(LlamaNorm):
    """Of large scores, so that most weights are below 2^-25, which is 0 in FP16."""

    def forward(self, x):
        weights = F.softmax(x / x.detach().abs().max() * 20, dim=-1, dtype=torch.float32)
        return self.weight * (weights + 1e-30).log().to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """PyTorch's own, which is an island inside: the squares are above 65504."""

    def forward(self, x):
        return super().forward(x * 2.0**20)


@pytest.mark.parametrize("island", [LlamaNorm, T5Norm, GemmaNorm, Softmax, RMSNorm])
def test_an_island_of_a_model_stays_fp32_as_in_a_half_model(island):
    torch.manual_seed(0)
    x = FP16.quantize(0.01 * torch.randn(4, 8))
    model = nn.Sequential(nn.Linear(8, 8), island(8), nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(FP16.quantize(parameter * (0.01 if parameter.dim() else 1)))
    emulated = x.clone().requires_grad_()
    with emulate(FP16):
        out = model(emulated)
        out.backward(torch.full_like(out, 64.0))
    found = [out, emulated.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    own = x.half().requires_grad_()
    model.half()
    expected = model(own)
    expected.backward(torch.full_like(expected, 64.0))
    wanted = [expected, own.grad, *(p.grad for p in model.parameters())]
    for one, other in zip(found, wanted, strict=True):
        assert other.isfinite().all() and on_grid(FP16, one)
        # The kernels sum in other orders, so that some numbers round the other way.
        assert (one - other.float()).norm() <= 2**-9 * other.float().norm()


def test_where_an_island_begins_and_ends():
    x = torch.tensor([1 / 3, 300.0])
    with emulate(FP16):
        wide = x.float() / 7
        assert not on_grid(FP16, wide) and (x.float() ** 2)[1] == 90_000
        for still_wide in (wide.float(), wide * x, x - wide, wide.sum(), torch.cat([x, wide]), wide[:1].exp()):
            assert not on_grid(FP16, still_wide)
        for narrow in (wide.to(torch.float32), wide.type_as(x), wide.to(x), x * wide.sum(), wide @ x, x.mul(0.3)):
            assert on_grid(FP16, narrow)
        for wide in (x.type(torch.FloatTensor), x.type("torch.FloatTensor"), x.type(torch.float32)):
            assert not on_grid(FP16, wide / 7)
        for wide in (torch.softmax(x, -1, torch.float32), x.softmax(0, torch.float32), x.log_softmax(0, torch.float32)):
            assert not on_grid(FP16, wide / 7)
        assert on_grid(FP16, (x * 1).view(torch.float32) / 7), "a view converts nothing"
        x_and_more = x.clone()
        x_and_more += wide
        assert on_grid(FP16, x_and_more), "what is changed in place keeps its width"
        with emulate(FP32):
            assert (x.float() / 7)[0] == x[0] / 7
    assert x[0] == torch.tensor(1 / 3), "the input itself is left alone"


def test_integers_converted_to_float_are_wide():
    """The angles of a rotary embedding: position 2049 is no number of FP16, and neither are most angles."""
    frequencies, positions, mask = torch.tensor([1.0, 0.3]), torch.tensor([[2049], [3001]]), torch.tensor([True, False])

    def angles(frequencies):
        products = positions.float() * frequencies.float(), positions.float() @ frequencies[None, :].float()
        return [*products, torch.arange(3000, 3003, dtype=torch.float32), positions.half().float()]

    with emulate(FP16):
        found, narrow = angles(frequencies), mask.to(frequencies.dtype) * frequencies
        cosines = [angle.cos().to(torch.float32) for angle in found]
    for one, cosine, other in zip(found, cosines, angles(frequencies.half()), strict=True):
        assert other.dtype == torch.float32 and torch.equal(one, other)
        assert torch.equal(cosine, other.cos().half().float())
    assert on_grid(FP16, narrow)


def test_a_real_half_tensor_in_an_island_gets_a_narrow_gradient():
    x = torch.tensor([0.3, 300.0], requires_grad=True)
    with emulate(FP16):
        ((x * 0.3).half().float() ** 2 / 7).sum().backward()
    assert on_grid(FP16, x.grad)


@pytest.mark.parametrize("fmt, dtype", [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_the_smallest_number_of_a_dtype_is_the_formats_own(fmt, dtype):
    """As a mask's value it must be finite: the softmax of a row without any key would be NaN."""
    mask, island = torch.tensor([[True, True], [False, True]]), torch.ones(2, dtype=torch.int32)

    def masked(x):
        least = torch.finfo(x.dtype).min
        by_item = x * 1
        by_item[mask] = least
        return [
            x.masked_fill(mask, least).softmax(-1),
            torch.where(mask, torch.zeros((), dtype=x.dtype), least),
            torch.full((2,), fill_value=least, dtype=x.dtype),
            torch.tensor(least, dtype=x.dtype),
            x + mask.to(x.dtype) * least,
            x.clamp(max=-torch.inf).clamp(min=least),
            by_item,
            island.float().masked_fill(mask, torch.finfo(torch.float32).min),
        ]

    x = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    with emulate(fmt):
        found = masked(x)
    for one, other in zip(found, masked(x.to(dtype)), strict=True):
        assert torch.equal(one, other.float()) and one.isfinite().all()


def test_an_island_keeps_fp32_for_backward_and_no_more():
    x = torch.randn(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp().float().exp().to(x.dtype).exp().sum(), emulate(FP16)) == (2 + 4 + 2) * 1000
