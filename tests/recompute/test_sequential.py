"""A schedule run on real layers: the plain run's numbers, the plan's forwards, and no byte more than the plan says."""

from collections import deque
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.memory import Ledger
from minizero.recompute import RecomputeMismatch, checkpoint, checkpoint_sequential, is_recomputing
from minizero.schedules import Schedule, Stage, Step, binomial, every_k, recursive_halving, sqrt_n
from tests.support.recompute_ways import equal, everything, vectors

SCHEDULES = {
    "everything": lambda n: every_k(n, n),
    "every_2": lambda n: every_k(n, 2),
    "sqrt_n": sqrt_n,
    "halving": recursive_halving,
    "one slot": lambda n: binomial(n, 1),
    "three slots": lambda n: binomial(n, 3),
}


class Layer(nn.Module):
    """Of several operators, with dropout and running statistics. Notes its calls; a list would be put back."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), deque()

    def forward(self, x):
        self.calls.append(is_recomputing())
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2)


def chain(n):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(n)))


def by_plain(layers, x, schedule):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_numbers_are_the_plain_runs_and_forwards_the_plans(name, n):
    schedule = SCHEDULES[name](n)
    expected = everything(chain(n), partial(by_plain, schedule=None))
    layers = chain(n)
    assert equal(everything(layers, partial(checkpoint_sequential, schedule=schedule)), expected)
    calls = [layer.calls for layer in layers]
    assert sum(map(len, calls)) == 2 * (schedule.advances + n)
    assert all(count.count(False) == 2 for count in calls)  # the first of each pass


def live_bytes(layers, sample, schedule):
    """The most that the chain holds at once."""
    weight = torch.ones_like(by_plain(layers, sample, None)).detach()
    leaf = sample.clone().requires_grad_()
    with Ledger() as ledger:
        x = leaf * 1  # a tensor in the middle of a model, which nobody else holds
        y = checkpoint_sequential(layers, x, schedule)
        del x
        loss = (y * weight).sum()
        del y
        loss.backward()
    return max(sample["activations"] + sample["temporary"] for sample in ledger.curve)


def expected(schedule):
    """What a chain of equal stages y = tanh(x) holds in its worst step, in units of x, step by step from the plan.

    tanh saves its output only, so while its backward makes the gradient of x, x itself is gone unless it is kept:
    one less than the plan's. And in the first sweep no gradient waits yet.
    """
    worst, values, first_sweep = 0, iter(schedule.curve), True
    for action, _ in schedule.steps:
        if action in ("forward", "backward"):
            less = action == "backward" or first_sweep
            worst = max(worst, next(values) - less)
            first_sweep = first_sweep and action == "forward"
    return worst


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_byte_of_a_uniform_chain(name):
    for n in (1, 2, 5, 16):
        schedule = SCHEDULES[name](n)
        live = live_bytes([torch.tanh] * n, torch.zeros(1000), schedule)
        assert round(live / 4000) == expected(schedule), (n, repr(schedule))


def test_the_tape_of_an_advance_is_not_held_beside_a_large_gradient():
    """Stage 0 has a long tape, and runs again while a gradient waits: both at once are more than the plan's worst."""

    def long_tape(x):
        for _ in range(40):
            x = torch.tanh(x)
        return x

    layers = [long_tape, torch.tanh, lambda x: x.expand(12, -1).tanh(), lambda x: x.sum(0).tanh()]
    stages = [Stage(40, 80, 1, 40), Stage(1, 2, 1, 0), Stage(1, 2, 1, 12, output=12), Stage(1, 2, 12, 0, output=1)]
    schedule = binomial(4, 1).on(stages)
    live = live_bytes(layers, torch.zeros(1000), schedule)
    assert live <= schedule.peak * 4000 + 100 == 44 * 4000 + 100


# As a part of a larger model, and of a larger backward.


def test_under_a_checkpoint_and_with_checkpoints_inside():
    def gradients(way):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(6)))
        x = vectors().requires_grad_()
        way(layers, x * 1).sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters())]

    schedule = binomial(6, 2)
    inside = lambda m, x: checkpoint_sequential([partial(checkpoint, layer) for layer in m], x, schedule)  # noqa: E731
    around = partial(checkpoint, partial(checkpoint_sequential, schedule=schedule))
    expected = gradients(lambda m, x: m(x))
    assert equal(gradients(inside), expected) and equal(gradients(around), expected)


def test_a_second_backward_starts_again():
    def gradients(way):
        layers, x = chain(7), vectors().requires_grad_()
        torch.manual_seed(3)
        y = way(layers, x * 1).square().sum()
        y.backward(retain_graph=True)
        last = torch.autograd.grad(y, layers[6].linear.weight, retain_graph=True)
        some = torch.autograd.grad(y, [layers[5].linear.weight, layers[2].linear.weight], retain_graph=True)
        (once,) = torch.autograd.grad(y, x, create_graph=True)
        (once.square().sum() + y).backward()
        return [*last, *some, x.grad, *(p.grad for p in layers.parameters())]

    expected = gradients(lambda m, x: m(x))
    for name in ("every_2", "halving", "one slot"):
        assert equal(gradients(partial(checkpoint_sequential, schedule=SCHEDULES[name](7))), expected)


@pytest.mark.parametrize("place", [1, 2, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_after_a_failure_backward_can_come_again(place, name):
    fails = []

    def fail(x):
        if is_recomputing() and not fails:
            fails.append(True)
            raise KeyError("once")
        return torch.tanh(x)

    def gradients(way):
        layers, x = [*chain(6)], vectors().requires_grad_()
        layers.insert(place, fail)
        torch.manual_seed(3)
        y = way(layers, x * 1, SCHEDULES[name](7)).sum()
        state = torch.get_rng_state()
        if way is not by_plain:
            with pytest.raises(KeyError):
                torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(torch.get_rng_state(), state)
        return torch.autograd.grad(y, [x, layers[0].linear.weight])

    assert equal(gradients(checkpoint_sequential), gradients(by_plain))


def test_frozen_layers_at_the_start_are_not_run_again():
    layers = chain(6)
    layers[:3].requires_grad_(False)
    checkpoint_sequential(layers, vectors(), every_k(6, 6)).sum().backward()
    assert [len(layer.calls) for layer in layers] == [1, 1, 1, 2, 2, 1]
    assert all((p.grad is not None) == (i >= 3) for i, layer in enumerate(layers) for p in layer.parameters())


# What cannot be done.


def test_bad_input():
    layers, x = chain(4), vectors().requires_grad_()
    with pytest.raises(ValueError, match="the schedule is for 3 stages, there are 4 layers"):
        checkpoint_sequential(layers, x, sqrt_n(3))
    with pytest.raises(TypeError, match="x must be one tensor, not tuple"):
        checkpoint_sequential(layers, (x,), sqrt_n(4))
    with pytest.raises(TypeError, match=r"layer 1 \(.*lambda.*\) gave tuple: each must take and give one tensor"):
        checkpoint_sequential([layers[0], lambda x: (x, x)], x, sqrt_n(2))
    with pytest.raises(RecomputeMismatch, match=r"layer 2 \(ReLU\) changes its input in place.*inplace=False"):
        checkpoint_sequential([*layers[:2], nn.ReLU(inplace=True), layers[2]], x, sqrt_n(4))
    twice = [Step("keep", 0), *(Step("forward", i) for i in (0, 0, 1))]
    twice += [Step("backward", 2), Step("forward", 0), Step("backward", 1), Step("backward", 0)]
    with pytest.raises(ValueError, match="the steps come to forward 0 where forward 1 is due"):
        checkpoint_sequential(layers[:3], x, Schedule(twice, [Stage(1, 2, boundary=1, tape=0)] * 3))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_layer_that_calls_backward_inside_itself(place, name):
    """pytorch#102223. The last layer, whose tape is built at once, may do so."""

    def slope(x):
        y = x.detach().requires_grad_()
        y.cos().sum().backward()
        return x * y.grad

    layers, x = [torch.sin, torch.tanh], vectors().requires_grad_()
    layers.insert(place, slope)
    if place < 2:
        with pytest.raises(NotImplementedError, match="a layer calls backward .* inside itself.*call checkpoint on"):
            checkpoint_sequential(layers, x, SCHEDULES[name](3))
    else:
        outputs = (way(layers, x, SCHEDULES[name](3)) for way in (by_plain, checkpoint_sequential))
        gradients = [torch.autograd.grad(out.sum(), x) for out in outputs]
        assert equal(*gradients)
