"""Emulated 16 bits: every operator gives values on the format's grid, as PyTorch's own 16-bit kernels do."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precision.emulate import emulate
from precision.formats import BF16, FP8_E4M3, FP16, FP32, TF32
from tests.support.emulated import FORMATS_OF_16_BITS, Watch, everything, kept_bytes, on_grid


@pytest.mark.parametrize("fmt", [*FORMATS_OF_16_BITS, TF32, FP32], ids=lambda f: f"{f.exponent_bits}-{f.mantissa_bits}")
def test_every_operator_gives_values_of_the_format_forward_and_backward(fmt):
    model, inputs, labels = everything()
    with emulate(fmt), Watch(fmt) as watch:
        F.cross_entropy(model(*inputs), labels).backward()
    assert watch.count("forward") > 15 and watch.count("backward") > 15
    assert not watch.wrong("forward") and not watch.wrong("backward")
    gradients = [p.grad for p in model.parameters()]
    assert all(on_grid(fmt, gradient) for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) >= 8


def test_one_operator_rounds_what_it_reads_and_what_it_gives():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 40, 40, generator=generator)
    qx, qw = FP16.quantize(x), FP16.quantize(w)
    with emulate(FP16):
        results = x * w, x @ w, x.exp(), x.sum(), torch.cat([x, w]), torch.where(x > 0, x, 0.1), x.add(w, alpha=0.1)
    expected = qx * qw, qx @ qw, qx.exp(), qx.sum(), torch.cat([qx, qw]), torch.where(qx > 0, qx, 0.1), qx + 0.1 * qw
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, FP16.quantize(other))
    assert not on_grid(FP16, x), "the input itself is left alone"


def chain(x):
    y = (x * 1.7 - x.square()).relu() * x.abs().sqrt()
    return (y - 0.3 * x) / (1 + y.square())


BY_KERNELS = {
    "a chain": chain,
    "%": lambda x: x % 0.1,
    "%, reversed": lambda x: torch.remainder(1.7, x.detach()),
    "%, in place": lambda x: x.clone().remainder_(0.3),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "fmod, by what is 0": lambda x: torch.fmod(x, 1e-9),
    "compared with what it was filled with": lambda x: torch.full_like(x, 0.1) == 0.1,
    "compared with what it was clamped to": lambda x: x.clamp(max=0.3) >= 0.3,
    "above": lambda x: x > x[0].item() * 1.0001,
    "a large whole number": lambda x: x * 0 + 4096 == 4097,
    "threshold": lambda x: F.hardshrink(x, 0.3),
    "times": lambda x: x * 0.1,
    "over": lambda x: x / 0.3,
    "clamp": lambda x: x.clamp(-0.1, 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1e-3),
}


@pytest.mark.parametrize(("fmt", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])
@pytest.mark.parametrize("name", BY_KERNELS)
def test_as_pytorchs_own_16_bit_kernels(name, fmt, dtype):
    """Which compute in FP32 and round once, too: forward and the gradients. IEEE 754 defines every bit of these."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for given, context in ((x.float(), emulate(fmt)), (x, contextlib.nullcontext())):
        given.requires_grad_()
        with context:
            y = BY_KERNELS[name](given)
            gradient = torch.autograd.grad(y, given, torch.ones_like(y))[0] if y.requires_grad else y
        results.append((y.detach().float(), gradient.float()))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_a_network_as_in_pytorchs_float16():
    """Bit for bit, of whole numbers: every sum is exact in any order, also where a kernel adds some of it in FP16.

    Which it does for the samples of a batch, in the gradients of a convolution, on processors without float16.
    """
    generator = torch.Generator().manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AvgPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 5 * 5, 10))
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()
    x = torch.randint(-1, 2, (8, 1, 12, 12), generator=generator).float()
    results = []
    for dtype, context in (
        (torch.float32, emulate(FP16)),
        (torch.half, contextlib.nullcontext()),
        (torch.double, None),
    ):
        one = copy.deepcopy(model).to(dtype)
        with context or contextlib.nullcontext():
            out = one(x.to(dtype))
            out.backward(torch.ones_like(out))
        results.append([out.double(), *(p.grad.double() for p in one.parameters())])
    for emulated, own, wanted in zip(*results, strict=True):
        assert wanted.any() and torch.equal(own, wanted), "FP16 holds every number of this"
        assert torch.equal(emulated, wanted)


@pytest.mark.parametrize("fmt, number", [(FP32, 0.1), (FP16, 1 + 2**-11 + 2**-40)])  # by float32: a tie, to 1
def test_float64_is_rounded_once(fmt, number):
    x = torch.tensor(number, dtype=torch.float64)
    with emulate(fmt):
        found = x.clone()
    assert found == fmt.quantize(x) != x and found.dtype == torch.float64


def test_parameters_are_masters_when_the_step_is_outside():
    torch.manual_seed(0)
    layer = nn.Linear(20, 20)
    before = layer.weight.detach().clone()
    with emulate(FP16):
        layer(torch.ones(4, 20)).square().mean().backward()
        assert torch.equal(layer.weight, before), "using a parameter does not change it"
    torch.optim.SGD(layer.parameters(), lr=1e-6).step()
    assert not torch.equal(layer.weight, before), "a master keeps the small update"
    assert not on_grid(FP16, layer.weight)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_inside_leaves_values_of_the_format(optimizer, foreach):
    torch.manual_seed(0)
    layer = nn.Linear(9, 9)
    optimizer = optimizer(layer.parameters(), lr=0.01, foreach=foreach)
    before = layer.weight.detach().clone()
    with emulate(FP16), Watch(FP16) as watch:
        for _ in range(3):
            layer(torch.ones(4, 9)).square().mean().backward()
            optimizer.step()
    assert not watch.wrong("forward") and on_grid(FP16, layer.weight)
    assert (layer.weight - before).abs().max() > 0.001


def test_views_integers_and_out():
    x = torch.full((4, 4), 0.1)
    with emulate(FP16):
        y = x * 1
        row, flat = y[1], y.view(16)
        y.add_(0.01)
        assert row.untyped_storage() is y.untyped_storage() is flat.untyped_storage()
        counted = torch.arange(3000) + torch.ones(3000, dtype=torch.long)
        out = torch.empty(4, 4)
        torch.mul(x, x, out=out)
        values, indices = x.max(1)
        same = x.view(-1)
    assert on_grid(FP16, y) and torch.equal(row, y[1])
    assert counted[-1] == 3000 and indices.dtype == torch.long
    assert on_grid(FP16, out) and out[0, 0] != 0
    assert on_grid(FP16, values)
    assert same.untyped_storage() is x.untyped_storage() and x[0, 0] == torch.tensor(0.1)


def test_outputs_that_share_a_storage_are_all_rounded():
    """unbind of a product, and what LAPACK returns in one piece."""
    torch.manual_seed(0)
    with emulate(FP16):
        a, b = (torch.randn(2, 5) * 0.3).unbind()
        q, r = torch.linalg.qr(torch.randn(5, 5))
    assert all(on_grid(FP16, tensor) for tensor in (a, b, q, r))


def test_inference_mode_computes_the_same():
    """There a whole loss may come as one operator, which is taken apart."""
    model, inputs, labels = everything()
    model.eval()
    p, q = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)).softmax(1)
    results = []
    with emulate(FP16):
        for context in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()):
            with context:
                logits = model(*inputs)
                results.append((logits, F.cross_entropy(logits, labels), F.kl_div(q, p, reduction="none")))
    for one, other, with_graph in zip(*results):
        assert torch.equal(one, other) and torch.equal(one, with_graph.detach())


def test_a_storage_that_is_taken_over_is_the_same_with_the_same_values():
    outside = torch.tensor([1.1])
    with emulate(FP16):
        taken = torch.empty(0).set_(outside)
    assert taken.data_ptr() == outside.data_ptr() and outside == torch.tensor([1.1])


def test_running_statistics_stay_fp32():
    norm = nn.BatchNorm1d(3)
    torch.manual_seed(0)
    x = FP16.quantize(torch.randn(50, 3))
    with emulate(FP16):
        norm(x)
    assert torch.allclose(norm.running_mean, 0.1 * x.mean(0), rtol=1e-6)
    assert not on_grid(FP16, norm.running_mean)
    mean, variance = torch.zeros(3), torch.ones(3)
    with emulate(FP16):  # the form of the operator that says it writes to them
        torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert torch.equal(mean, norm.running_mean) and torch.equal(variance, norm.running_var)


def test_tensors_that_are_float16_already():
    """Zero3(module, dtype=torch.float16), say, computes in them: PyTorch's kernels do, and nothing is copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10)).half()
    x = torch.randn(30, 50).half()
    model(x).float().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with emulate(FP16):
        model(x).float().sum().backward()
    assert all(torch.equal(p.grad, g) and p.grad.dtype == torch.float16 for p, g in zip(model.parameters(), own))
    plain = kept_bytes(lambda: model(x).sum(), contextlib.nullcontext())
    assert kept_bytes(lambda: model(x).sum(), emulate(FP16)) == plain
    with emulate(FP8_E4M3):
        assert on_grid(FP8_E4M3, model(x))


@pytest.mark.parametrize("wrong", [torch.float16, "FP16", None, 16])
def test_what_is_no_format(wrong):
    with pytest.raises(TypeError, match="emulate: fmt must be a FloatFormat such as FP16"):
        with emulate(wrong):
            pass
    with pytest.raises(TypeError, match="emulate: accumulator must be"):
        with emulate(FP16, wrong):
            pass


@pytest.mark.parametrize(
    "compute, kind",
    [
        (lambda x: torch.fft.rfft(x), "complex64"),
        (lambda x: torch.view_as_complex(x) * 2, "complex64"),
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: x.float().to_sparse(), "sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged) * 2, "jagged"),
    ],
)
def test_what_nobody_rounds_is_refused_by_name(compute, kind):
    with pytest.raises(NotImplementedError, match=f"{kind}.*complex, sparse and jagged"):
        with emulate(FP16):
            compute(torch.ones(4, 2))


def test_complex_numbers_in_a_models_own_fp32_are_left_alone():
    """Llama's rotary embedding: the product is one of FP32 numbers, and is rounded where the model converts it."""
    x, turn = torch.randn(4, 2).half().float().requires_grad_(), torch.polar(torch.ones(4), torch.arange(4.0))
    with emulate(FP16):
        turned = torch.view_as_real(torch.view_as_complex(x.float()) * turn * turn)
        y = turned.flatten().type_as(x)
        y.sum().backward()
    whole = torch.view_as_real(torch.view_as_complex(x.detach().float()) * turn * turn)
    assert torch.equal(turned, whole) and torch.equal(y, whole.flatten().half().float())
    assert torch.equal(x.grad, x.grad.half().float())
