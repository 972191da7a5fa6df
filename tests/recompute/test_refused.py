"""A function that cannot be run again is refused at the call, and the error says what to write instead."""

import random

import numpy as np
import pytest
import torch

from minizero.recompute import RecomputeMismatch, checkpoint, checkpoint_sequential, set_enabled
from minizero.schedules import every_k
from tests.support.recompute_ways import nested, selective, vectors, verified


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
