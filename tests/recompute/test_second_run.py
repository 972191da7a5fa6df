"""A function runs again only if backward needs it, as far as it must, and in the surroundings of its first run."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minizero.recompute import by_function, by_hooks, checkpoint, is_recomputing, set_enabled
from tests.support.recompute_ways import Counted, Operators, equal, nested, plain, selective, vectors, verified

# How often, and how far.


def test_what_is_frozen_is_not_run_again():
    prefix, trained = Counted(nn.Linear(8, 8)).requires_grad_(False), Counted(nn.Linear(8, 8))
    suffix = Counted(nn.Linear(8, 8)).requires_grad_(False)  # its backward needs its weight only
    x = checkpoint(prefix, vectors())
    checkpoint(suffix, checkpoint(trained, x)).sum().backward()
    assert (prefix.calls, trained.calls, suffix.calls) == (1, 2, 1)
    assert trained.module.weight.grad is not None and not x.requires_grad
    x = nested(lambda x: prefix(x), vectors())  # whose inputs the outer one holds for it, asks for no gradient
    assert prefix.calls == 2 and not x.requires_grad


@pytest.mark.parametrize(("way", "again"), [(checkpoint, 1), (by_hooks, 1), (by_function, 2), (selective, 0)])
def test_the_second_forward_stops_before_the_last_product(way, again):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    y = way(module, vectors().requires_grad_()).sum()
    with Operators() as operators:
        y.backward()
    assert operators.names.count("addmm") == again


def test_nesting_runs_each_level_again_once():
    inner, outer = Counted(nn.Tanh()), []

    def fn(x):
        outer.append(is_recomputing())
        return checkpoint(inner, checkpoint(inner, x)).exp()

    x = vectors().requires_grad_()
    checkpoint(fn, x).sum().backward()
    assert outer == [False, True]
    # Twice in the first forward; in the second up to what exp saved; and each once for its own backward.
    assert inner.calls == 2 + 2 + 2


def test_a_function_that_catches_exceptions_does_not_catch_the_stop():
    def fn(x):
        try:
            return x.exp().sin()
        except Exception:
            return x

    x = vectors().requires_grad_()
    checkpoint(fn, x).sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


def test_the_switch_turns_all_of_it_off():
    counted = Counted(nn.Tanh())

    def calls(way):
        counted.calls = 0
        way(counted, vectors().requires_grad_()).sum().backward()
        return counted.calls

    for way in (checkpoint, selective, verified):
        with set_enabled(False):
            assert calls(way) == 1
        assert calls(way) == 2
    set_enabled(False)
    try:
        assert calls(checkpoint) == 1
    finally:
        set_enabled(True)
    assert calls(checkpoint) == 2


def test_the_flag_says_when_it_is_the_second_run():
    seen = []

    def fn(x):
        inner = checkpoint(lambda x: x.exp().sin(), x)
        (slope,) = torch.autograd.grad(inner.sum(), x)  # which is a second run inside a second run
        seen.append(is_recomputing())
        return (x * slope).exp().sin()

    y = checkpoint(fn, vectors().requires_grad_() * 1)
    assert not is_recomputing()
    y.sum().backward()
    assert seen == [False, True] and not is_recomputing()


# The surroundings of the first run.


def test_autocast_and_the_default_device_are_those_of_the_first_run():
    seen = []

    def gradients(way):
        def fn(x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_device()))
            return torch.tanh(module(torch.tanh(module(x))))

        module, x = nn.Linear(8, 8), vectors().requires_grad_()
        module.load_state_dict(nn_state)
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            y = way(fn, x)
        y.float().sum().backward()
        return [y.detach(), x.grad, module.weight.grad]

    nn_state = nn.Linear(8, 8).state_dict()
    expected = gradients(plain)
    assert expected[0].dtype == torch.bfloat16
    for way in (checkpoint, by_function, verified):
        seen.clear()
        assert equal(gradients(way), expected)
        assert seen == 2 * [(True, torch.bfloat16, torch.device("meta"))]


def test_autocast_that_is_off_in_forward_is_off_in_backward():
    def gradient(way):
        torch.manual_seed(0)
        x, module = vectors().requires_grad_(), nn.Linear(8, 8)
        y = way(lambda x: module(x).exp(), x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            y.backward()
        return [x.grad]

    assert equal(gradient(checkpoint), gradient(plain))


def test_grad_mode():
    counted = Counted(nn.Tanh())
    with torch.no_grad():
        assert not checkpoint(counted, vectors().requires_grad_()).requires_grad
    with torch.inference_mode():
        mask = checkpoint(counted, vectors())
    assert counted.calls == 2

    def fn(x, mask):
        with torch.no_grad():
            scale = x.norm()
        return (x / scale).exp() + mask

    gradients = []
    for way in (plain, checkpoint, nested_in_mask := lambda fn, x, m: checkpoint(lambda a: checkpoint(fn, a, m), x)):
        x = vectors().requires_grad_()
        way(fn, x * 1, mask).sum().backward()
        gradients.append(x.grad)
    assert equal(gradients[:1], gradients[1:2]) and equal(gradients[:1], gradients[2:])
    assert nested_in_mask


def test_under_fake_tensors():
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU())
        for way in (checkpoint, selective, by_function):
            way(module, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert module[0].weight.grad.shape == (8, 8)
