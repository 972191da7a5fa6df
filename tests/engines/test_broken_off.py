"""What is left of an engine: nothing once it is gone, and nothing of a backward that broke off after zero_grad()."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from minizero import Zero3, barrier
from minizero.engines.timeline import Timeline
from tests.support.failures import until
from tests.support.helpers import STAGES, run


class Breaks(torch.autograd.Function):
    """Breaks off every backward in which `broken` is set."""

    broken = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaks.broken:
            raise ArithmeticError("broken off")
        return gradient


def layers(breaks=None):
    """Four of them; in the second a backward may break off."""
    generator = torch.Generator().manual_seed(0)
    found = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for parameter in found.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if breaks is not None:
        found[breaks].register_forward_hook(lambda _, __, out: Breaks.apply(out))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_nobody_holds_goes_with_its_memory_and_its_threads(stage):
    def work(comm, gone):
        model = stage(layers(), comm)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        gone += [weakref.ref(model), weakref.ref(model.units[0].master)]

    gone, before = [], set(threading.enumerate())
    run(2, work, gone)
    gc.collect()
    assert len(gone) == 4 and all(reference() is None for reference in gone)
    assert until(lambda: set(threading.enumerate()) <= before), threading.enumerate()


def after_a_break(comm, prefetch):
    """The gradient of the backward after one that broke off, and what the first has left for it."""
    model = Zero3(layers(breaks=1), comm, prefetch=prefetch)
    x = torch.ones(2, 6) + comm.rank
    for broken in (True, False):
        loss = model(x).square().mean()
        barrier(comm)
        Breaks.broken = broken
        barrier(comm)
        if broken:
            with pytest.raises(ArithmeticError):
                loss.backward()
            model.zero_grad()
        else:
            backward = model.backward  # of the forward above, which has thrown away the one that raised
            loss.backward()
    return [shard.grad.clone() for shard in model.parameters()], backward


def without_a_break(comm):
    model = Zero3(layers(), comm, prefetch=0)
    model(torch.ones(2, 6) + comm.rank).square().mean().backward()
    return [shard.grad.clone() for shard in model.parameters()]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_zero_grad_clears_what_a_backward_that_broke_off_has_left(prefetch):
    for (mine, backward), expected in zip(run(2, after_a_break, prefetch), run(2, without_a_break), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))
        assert backward is None


def test_one_timeline_inside_another():
    def work(comm):
        model = Zero3(layers(), comm)
        with Timeline(model) as outer:
            with Timeline(model) as inner:
                model(torch.ones(2, 6)).sum().backward()
            seen = len(inner.events)
            model(torch.ones(2, 6)).sum().backward()
        assert 0 < seen == len(inner.events) < len(outer.events)
        return set(vars(model)) & {"gather", "reduce", "release"}

    assert run(2, work) == [set(), set()]


def test_no_computation_is_recorded_after_the_last_use_of_a_unit_that_is_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x):
            return (self.blocks[0](x) * self.blocks[0](2 * x)).sum()  # no input closes a use: both end together

    def work(comm):
        model = Zero3(Twice(), comm, prefetch=0)
        with Timeline(model) as timeline:
            model(torch.ones(2, 6)).backward()
        return timeline.in_use, timeline.computing

    assert run(2, work) == [([], None)] * 2
