"""Gradients for inputs, as leaves and otherwise: the plain run's bits, and no unit is kept longer than it computes."""

import functools

import pytest
import torch
from torch import nn

from minizero import Zero2, Zero3, recompute
from tests.support.helpers import exactly, run, slow


class Block(nn.Module):
    """Weights are multiples of 64 bytes, so that a view of a flat buffer is aligned as a tensor of its own is."""

    def __init__(self, way):
        super().__init__()
        self.way, self.early, self.late = way, nn.Linear(16, 16), nn.Linear(16, 16)
        self.own, self.attention = nn.Parameter(torch.empty(4, 16)), nn.MultiheadAttention(16, 2)

    def forward(self, *args, **kwargs):
        return self.way(self, *args, **kwargs)


def plain(self, x):
    return self.late(self.early(x).tanh()) + x


def late(self, x, scale=2.0):
    """The gradient of x is complete before the early layer has begun."""
    return self.late(self.early(self.own).tanh() + x) * scale


def either(self, x):
    return self.late(x).tanh() + self.early(self.own)


def in_place(self, x, h):
    """What it returns as x has the first gradient of all."""
    x += self.early(h).tanh()
    return x, self.late(h)


def caches(self, x, keys):
    """Its keys, which later blocks use, get into an argument."""
    keys.append(self.early(x).tanh())
    return sum(keys) + self.late(x)


def attends(self, x):
    """Attention computes otherwise where query, key and value are one tensor."""
    assert x.requires_grad
    return self.attention(x, x, x)[0]


def chain(model, x):
    for block in model.blocks:
        x = block(x)
    return x


def several(model, x):
    return sum(block(x) for block in model.blocks)


def with_others(model, x):
    h = model.into(x)
    for block in model.blocks:
        h = block(x=h) + block(x=x)
    return h


def own_leaf(model, x):
    return x + sum(block(model.query) for block in model.blocks)


def two_inputs(model, x):
    h, x = x, 1 * x
    for block in model.blocks:
        x, h = block(x, h)
    return x + h


def in_a_list(model, x):
    keys = [x]
    for block in model.blocks:
        x = block(x, keys)
    return x


def recomputed(model, x):
    for block in model.blocks:
        x = recompute.by_function(block, x)  # whose backward makes a leaf of it
    return x


ENGINES = [
    Zero2,
    Zero3,
    functools.partial(Zero3, prefetch=0),
    functools.partial(Zero3, offload=True, sharding_factor=2),
]
CASES = [(way, use) for way in (plain, late, either) for use in (chain, several, with_others, own_leaf)]
CASES += [(plain, recomputed), (attends, several), (in_place, two_inputs), (caches, in_a_list)]


class Model(nn.Module):
    def __init__(self, way, use):
        super().__init__()
        self.blocks, self.use = nn.ModuleList(Block(way) for _ in range(3)), use
        self.into, self.out, self.query = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.empty(4, 16))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)

    def forward(self, x):
        return self.out(self.use(self, x))


def gradients(model):
    """The input's: of two backwards, added up, and what `autograd.grad` says."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        model(x).square().mean().backward()
    return [x.grad, *torch.autograd.grad(model(x).square().mean(), x)]


@pytest.mark.accuracy
@pytest.mark.parametrize("way, use", CASES, ids=lambda part: part.__name__)
def test_an_input_that_is_a_leaf_has_the_plain_runs_gradient(way, use):
    def work(comm, engine):
        model = engine(Model(way, use), comm)
        return gradients(model), model.clip_grad_norm_(1e9).item()

    alone = Model(way, use)
    expected = gradients(alone)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
    for engine in ENGINES:
        for found, found_norm in run(2, work, engine):
            exactly(found, expected)
            assert found_norm == pytest.approx(norm, rel=1e-5), "the parameters'"


HOOKS = ("register_full_backward_hook", *slow("register_full_backward_pre_hook"))


@pytest.mark.parametrize("use", [chain, recomputed, in_a_list, *HOOKS])
def test_no_unit_stays_gathered_longer_than_it_computes(use):
    """Neither for a leaf nor for a second input, whose gradient comes in the end, nor for a hook."""

    def work(comm):
        module = Model(caches if use is in_a_list else plain, chain if isinstance(use, str) else use)
        for block in module.blocks if isinstance(use, str) else ():
            getattr(block, use)(lambda *_: None)
        model = Zero3(module, comm, prefetch=0)
        gather, whole = model.gather, []

        def watched(unit):
            gather(unit)
            whole.append(sum(not unit.replica_is_stale() for unit in model.units if unit.module is not model.module))

        model.gather = watched
        gradients(model)
        return max(whole)

    assert run(2, work) == [1, 1]
