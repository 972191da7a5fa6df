"""Emulation and autograd: what a graph saves, in the format's bytes, once; what it recomputes and accumulates."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minizero.memory import Ledger
from minizero.models import images
from minizero.models.networks import NETWORKS
from precision.emulate import emulate
from precision.formats import BF16, FP8_E4M3, FP16, FP32, TF32, FloatFormat
from tests.support.emulated import kept_bytes, on_grid


def test_a_graph_can_be_gone_through_after_the_block():
    x = torch.full((3,), 0.3, requires_grad=True)
    with emulate(FP16):
        y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, FP16.quantize(FP16.quantize(x.detach()).exp()))


def test_a_changed_parameter_is_an_error_as_in_pytorch():
    layer = nn.Linear(3, 3)
    x = torch.ones(1, 3, requires_grad=True)
    with emulate(FP16):
        loss = layer(x).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="changed in place.*call backward before optimizer.step"):
            loss.backward()


def test_what_was_saved_stays_when_the_tensor_is_changed():
    """The bits are a copy, so that backward finds each version; PyTorch, which keeps the tensor, refuses this."""
    x = torch.full((3,), 0.25, requires_grad=True)
    with emulate(FP16):
        a = x * 1
        before = a.square()
        a.add_(1)
        (before + a.square()).sum().backward()
    assert x.grad.tolist() == [2 * 0.25 + 2 * 1.25] * 3


@pytest.mark.parametrize("cube", [lambda x: x**3, lambda x: (x.float() ** 3).to(x.dtype)], ids=["plain", "an island"])
def test_gradients_of_gradients(cube):
    x = torch.tensor([0.7, -1.3], requires_grad=True)
    with emulate(FP16):
        (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
        first.sum().backward()
    assert torch.allclose(first, 3 * x.detach() ** 2, rtol=2e-3) and on_grid(FP16, first)
    assert torch.allclose(x.grad, 6 * x.detach(), rtol=2e-3) and on_grid(FP16, x.grad)


def test_recomputation_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layers, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        with emulate(FP16):
            (checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)).square().mean().backward()
        gradients.append([p.grad for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_accumulate_in_the_format():
    w = torch.ones(1, requires_grad=True)
    with emulate(FP16):
        for factor in (2048.0, 1.0, 1.0):
            (w * factor).sum().backward()
    assert w.grad.item() == 2048


# Bytes.


@pytest.mark.parametrize(
    ("fmt", "share"),
    [(FP16, 1 / 2), (BF16, 1 / 2), (FloatFormat(4, 11), 1 / 2), (FP8_E4M3, 1 / 4), (FP32, 1), (TF32, 1)],
)
def test_what_autograd_saves_takes_the_formats_bytes(fmt, share):
    x = torch.randn(4000, requires_grad=True)

    def forward():
        return x.exp().sigmoid().tanh().sum()

    assert kept_bytes(forward, contextlib.nullcontext()) == 3 * 4 * 4000
    assert kept_bytes(forward, emulate(fmt)) == 3 * 4 * 4000 * share


def test_what_several_operators_save_is_stored_once():
    """As PyTorch does: a tensor, its transpose, its slices are one storage; an input is saved as it comes."""
    x = torch.randn(3000)
    w = torch.randn(3000, requires_grad=True)

    def forward():
        a = (x * w).exp()  # saved by exp
        matrix = a.view(30, 100)
        product = matrix @ matrix.t()  # saves both
        return product.sum() + a.square().sum() + a[:50].square().sum()

    assert kept_bytes(forward, contextlib.nullcontext()) == 4 * 3000
    assert kept_bytes(forward, emulate(FP16)) == 2 * 3000 + 2 * 3000  # x as well, which was in FP32 before


def test_a_slice_of_a_large_input_is_saved_alone():
    dataset, w = torch.randn(1000, 100), torch.randn(100, requires_grad=True)
    assert kept_bytes(lambda: (dataset[:3] * w).sum(), emulate(FP16)) == 2 * 300


def test_parameters_are_kept_without_a_copy():
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    frozen = nn.Linear(200, 200, bias=False).requires_grad_(False)
    x = torch.randn(2, 200)
    assert kept_bytes(lambda: frozen(model(x)).sum(), emulate(FP16)) == 2 * 2 * 2 * 200  # the inputs of two layers


def test_what_was_saved_is_freed_with_the_graph():
    x = torch.randn(1000, requires_grad=True)
    with Ledger() as ledger, emulate(FP16):
        out = x.exp().sin().sum()
        held = ledger.current["total"]
        out.backward()
        del out
        gc.collect()
        assert held == 2 * 1000 + 4 and ledger.current["total"] == 4 * 1000  # the gradient


@pytest.mark.parametrize(
    ("name", "ledger_first"),
    [("alexnet", True), ("alexnet", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in NETWORKS)],
)
def test_the_ledger_sees_half_the_activations(name, ledger_first):
    x, y = images.load("train")[0][:8], images.load("train")[1][:8]
    measured = []
    for fmt in (FP32, FP16):
        torch.manual_seed(0)
        model, contexts = NETWORKS[name](), [emulate(fmt)]
        ledger = Ledger(model)
        contexts.insert(0 if ledger_first else 1, ledger)
        with contexts[0], contexts[1]:
            F.cross_entropy(model(x), y).backward()
        measured.append(ledger.peak)
    plain, half = measured
    assert 0.5 <= half["activations"] / plain["activations"] < 0.53
    assert half["parameters"] == plain["parameters"] and half["gradients"] == plain["gradients"]
