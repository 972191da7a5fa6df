"""A second run that differs from the first is an error that names the difference."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.recompute import RecomputeMismatch, by_hooks, checkpoint
from tests.support.recompute_ways import selective, sequential, vectors, verified

# With `verify`, which compares values.


@pytest.mark.parametrize("way", [checkpoint, verified])
def test_only_verify_sees_other_values_and_names_the_operator(way):
    scale, x = torch.ones(8), vectors().requires_grad_()
    y = way(lambda x: ((x.exp() + 1) * scale).sin(), x)
    scale.fill_(2)
    if way is verified:
        with pytest.raises(RecomputeMismatch, match=r"operator 2 .*aten::mul,.*gave other values"):
            y.sum().backward()
    else:  # notices a change of shape, as PyTorch's, but not of values
        y.sum().backward()
        assert not torch.equal(x.grad, (x.exp() + 1).cos() * x.exp())


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, turn: x.exp() * np.random.default_rng(turn).random(), "aten::mul, gave other values"),
        (lambda x, turn: x.exp() * torch.tensor([1, 2])[turn], "aten::select|aten::mul, gave other values"),
        (lambda x, turn: torch.where(x > turn, x, 2 * x).exp(), "aten::gt, gave other values"),
        (lambda x, turn: (x.exp() if turn else x.sin()).exp(), "aten::exp, was not run by the first"),
        (lambda x, turn: (x + float(torch.ones(1) * turn)).exp(), "aten::mul, gave other values"),
    ],
)
def test_verify_sees_every_kind_of_value(fn, words):
    turns = iter(range(2))
    y = verified(lambda x: fn(x, next(turns)).sin(), vectors().requires_grad_())
    with pytest.raises(RecomputeMismatch, match=words):
        y.sum().backward()


def test_verify_accepts_a_weight_that_autocast_had_cast_before():
    layer, x = nn.Linear(8, 8), vectors().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = verified(lambda h: layer(layer(h).tanh()), layer(x))
    y.sum().backward()
    assert x.grad is not None


def test_verify_accepts_what_is_the_same():
    def fn(x):
        x = torch.where(x > 0, x, torch.full_like(x, float("nan"))).nan_to_num() + torch.empty(3, 8).fill_(2).sum()
        return F.dropout(x).to(torch.bfloat16).exp()[torch.randperm(5)]

    verified(fn, vectors().requires_grad_()).sum().backward()


# Without it too.


CACHE = []


def with_a_cache(x, n):
    CACHE[n:] = [x.detach()]
    return (x @ torch.cat(CACHE).t()).softmax(-1) @ torch.cat(CACHE)


@pytest.mark.parametrize("way", [by_hooks, checkpoint, verified, selective, sequential])
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, n: x[:, : 3 + n].exp().sin(), r"was \(5, 3\) float32 on cpu in the first .*is \(5, 4\) float32"),
        (lambda x, n: x.to([torch.float32, torch.float64][n]).exp().sin(), "is .* float64 on cpu in the second"),
        (lambda x, n: x.exp().sin() if n == 0 else x.exp(), "saved 2 tensors .* first forward and 1 in the second"),
        (with_a_cache, "a cache that grows with each forward .* use_cache=False"),
    ],
)
def test_a_function_that_changes_between_the_runs(way, fn, words):
    turns = iter(range(2))
    y = way(lambda x: fn(x, next(turns)), vectors().requires_grad_())
    with pytest.raises(RecomputeMismatch, match=words if way is checkpoint else "second"):
        y.sum().backward()


def test_what_is_changed_between_forward_and_backward():
    module, x = nn.Linear(8, 8), vectors().requires_grad_()
    for way in (checkpoint, sequential):
        h = x * 1
        y = way(lambda h: h.exp().sin(), h)
        h.mul_(2)
        with pytest.raises(RecomputeMismatch, match="argument of .* was changed in place between forward and backward"):
            y.sum().backward()

    y = checkpoint(module, x * 1).sum()
    y.backward(retain_graph=True)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RecomputeMismatch, match=r"parameter of shape .* step the optimizer after backward"):
        y.backward()
