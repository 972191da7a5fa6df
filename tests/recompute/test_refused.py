"""A function that cannot be run again is refused at the call, and the error says what to write instead."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from minizero.recompute import RecomputeMismatch, checkpoint, set_enabled
from tests.support.recompute_ways import nested, selective, vectors, verified


def changes_its_input(x):
    return x.mul_(2).exp()


def draws_from_numpy(x):
    return x * float(np.random.rand())


def no_gradient(x):
    return x.detach()


@pytest.mark.parametrize("way", [checkpoint, verified, selective, nested])
@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (changes_its_input, RecomputeMismatch, "tensor 0 of its arguments in place.*out-of-place"),
        (draws_from_numpy, RecomputeMismatch, "NumPy's global generator.*draw them with torch"),
        (no_gradient, ValueError, "nothing with a gradient, though tensor 0 of its arguments asks.*without detach"),
        (lambda x: None, ValueError, "returns nothing with a gradient"),
        (lambda x: (x.argmax(), 3, "text"), ValueError, "returns nothing with a gradient"),
    ],
)
def test_bad_functions_are_refused_at_the_call(way, fn, error, words):
    with pytest.raises(error, match=words):
        way(fn, vectors().requires_grad_() * 1)


def test_a_parameter_that_no_gradient_can_reach():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(ValueError, match="Detached returns nothing with a gradient, though parameter weight asks"):
        checkpoint(Detached(8, 8), vectors())
    module = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="though something in it asks"):
        checkpoint(lambda x: module(x).detach(), vectors())
    checkpoint(module.requires_grad_(False), vectors())  # where nobody asks, nothing is wrong


def test_functional_transforms_are_refused():
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch.func's transforms .* call the function without"):
            transform(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3, requires_grad=True))
    with set_enabled(False):
        assert torch.equal(
            torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3)), torch.ones(3).cos()
        )
    x = torch.ones(3, requires_grad=True)  # a backward in a batch is none of them
    (rows,) = torch.autograd.grad(nested(torch.sin, x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, torch.diag(torch.ones(3).cos()))


def test_numpys_generator_is_watched_to_the_last_number():
    """Normal numbers are made in pairs: the second is drawn without a trace in the generator's words."""
    x = vectors().requires_grad_()
    np.random.seed(0)
    np.random.randn()
    for _ in range(3):
        with pytest.raises(RecomputeMismatch, match="NumPy"):
            checkpoint(lambda x: x * float(np.random.randn()), x)
    checkpoint(lambda x: x * float(np.random.default_rng(0).random()), x)  # made inside: the same each time
    checkpoint(draws_from_numpy, x, preserve_rng_state=False)


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), lambda: random.sample(range(9), 2)[0]])
def test_pythons_generator_is_watched_to_the_last_number(draw):
    """Here too the second normal number of a pair leaves the words as they are."""
    x = vectors().requires_grad_()
    for _ in range(3):
        with pytest.raises(RecomputeMismatch, match="Python's global generator"):
            checkpoint(lambda x: x * draw(), x)
    checkpoint(lambda x: x * random.Random(0).random(), x)
    checkpoint(lambda x: x * draw(), x, preserve_rng_state=False)
