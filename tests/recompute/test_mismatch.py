"""A second run that differs from the first is an error that names the difference."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.recompute import RecomputeMismatch, by_hooks, checkpoint, checkpoint_sequential, set_enabled
from minizero.schedules import every_k
from tests.support.recompute_ways import nested, selective, sequential, vectors, verified

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


def changes_its_input(x):
    return x.mul_(2).exp()


def draws_from_numpy(x):
    return x * float(np.random.rand())


@pytest.mark.parametrize("way", [checkpoint, verified, selective, nested])
@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (changes_its_input, RecomputeMismatch, "tensor 0 of its arguments in place.*out-of-place"),
        (draws_from_numpy, RecomputeMismatch, "NumPy's global generator.*draw them with torch"),
    ],
)
def test_bad_functions_are_refused_at_the_call(way, fn, error, words):
    with pytest.raises(error, match=words):
        way(fn, vectors().requires_grad_() * 1)


@pytest.mark.parametrize("way", [checkpoint, verified, selective, nested])
def test_what_brings_no_gradient_is_returned_as_it_is(way):
    x = vectors().requires_grad_()
    for fn in (torch.detach, torch.argmax, lambda x: None, lambda x: (x.argmax(), 3, "text")):
        result = way(fn, x)
        assert type(result) is type(fn(x)) and not getattr(result, "requires_grad", False)


def test_functional_transforms_are_refused():
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch.func's transforms .* call the function without"):
            transform(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3, requires_grad=True))
    with set_enabled(False):
        gradient = torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3))
        assert torch.equal(gradient, torch.ones(3).cos())
    x = torch.ones(3, requires_grad=True)  # a backward in a batch is none of them
    (rows,) = torch.autograd.grad(nested(torch.sin, x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, torch.diag(torch.ones(3).cos()))


def test_functional_transforms_inside_are_refused():
    """PyTorch's own message names saved tensor hooks, which the caller has never heard of."""
    x, schedule = vectors().requires_grad_(), every_k(2, 1)

    def slopes(x):
        return x * torch.func.jacrev(lambda y: y.sin().sum())(x)

    for way in (checkpoint, verified, nested, lambda fn, x: checkpoint_sequential([fn, torch.sin], x, schedule)):
        with pytest.raises(NotImplementedError, match=r"torch.func's transforms .* nor be called inside"):
            way(slopes, x)
    with pytest.raises(NotImplementedError, match=r"torch.func's transforms"):
        torch.func.grad(lambda x: checkpoint_sequential([torch.sin, torch.sin], x, schedule).sum())(x)
    with pytest.raises(RuntimeError, match="of its own"):
        checkpoint(lambda x: (_ for _ in ()).throw(RuntimeError("of its own")), x)


@pytest.mark.parametrize(
    ("whose", "draw", "made"),
    [
        ("NumPy's", np.random.rand, lambda: np.random.default_rng(0).random()),
        ("NumPy's", np.random.randn, lambda: np.random.default_rng(0).random()),
        ("Python's", random.random, lambda: random.Random(0).random()),
        ("Python's", lambda: random.gauss(0, 1), lambda: random.Random(0).random()),
        ("Python's", lambda: random.sample(range(9), 2)[0], lambda: random.Random(0).random()),
    ],
)
def test_other_generators_are_watched_to_the_last_number(whose, draw, made):
    """Normal numbers are made in pairs: the second is drawn without a trace in the generator's words."""
    x = vectors().requires_grad_()
    for _ in range(3):
        with pytest.raises(RecomputeMismatch, match=f"{whose} global generator"):
            checkpoint(lambda x: x * float(draw()), x)
    checkpoint(lambda x: x * made(), x)  # made inside: the same each time
    checkpoint(lambda x: x * float(draw()), x, preserve_rng_state=False)
