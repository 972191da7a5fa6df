"""Emulation leaves autograd's own rules as they are: what a graph saves, recomputes and accumulates."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from precision.emulate import emulate
from precision.formats import FP16
from tests.support.emulated import on_grid


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
