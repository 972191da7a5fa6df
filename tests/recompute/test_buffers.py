"""The second run changes no buffer: a norm counts each batch once."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.memory import Ledger
from minizero.recompute import RecomputeMismatch, checkpoint, is_recomputing
from tests.support.recompute_ways import WAYS, as_plain, equal, plain, vectors

NORMS = {  # and whether the input asks for a gradient
    "used twice": (lambda norm, linear: lambda x: norm(norm(x).sin() * 2).exp(), True),
    "frozen: nothing of it is saved": (lambda norm, linear: nn.Sequential(norm.requires_grad_(False), linear), False),
}


@pytest.mark.parametrize("use", NORMS)
@as_plain(*list(WAYS)[1:])  # by_function needs a gradient of its input
def test_a_norm_counts_each_batch_once(way, use):
    torch.manual_seed(0)
    make, trains = NORMS[use]
    norm, linear, x = nn.BatchNorm1d(8), nn.Linear(8, 8), vectors().requires_grad_(trains)
    way(make(norm, linear), x * 1).sum().backward()
    return [*norm.buffers(), *(t.grad for t in (x, *linear.parameters()) if t.grad is not None)]


def test_other_threads_go_on_training():
    mine, others = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def fn(x):
        if is_recomputing():
            ThreadPoolExecutor(1).submit(others, vectors()).result()
        return mine(x).exp().sin()

    checkpoint(fn, vectors().requires_grad_()).sum().backward()
    assert (mine.num_batches_tracked, others.num_batches_tracked) == (1, 1)


class Centred(nn.Module):
    """Takes its own running mean off, after it has updated that in one of several ways."""

    def __init__(self, update):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.update, self.inner = nn.Linear(8, 8), update, nn.Module()
        for module in (self, self.inner):
            module.register_buffer("mean", torch.zeros(8))
        self.register_buffer("late", None)

    def forward(self, x):
        self.update(self, x.detach().mean(0))
        return (self.linear(x) - self.mean - self.inner.mean - (0 if self.late is None else self.late)).sin()


def assigned(module, mean):
    module.mean = 0.9 * module.mean + 0.1 * mean


def made_late(module, mean):
    module.late = mean if module.late is None else module.late + mean


STATEFUL = {
    "in place": lambda: Centred(lambda module, mean: module.mean.mul_(0.9).add_(mean, alpha=0.1)),
    "assigned": lambda: Centred(assigned),
    "through .data": lambda: Centred(lambda module, mean: module.mean.data.mul_(0.9).add_(mean, alpha=0.1)),
    "data replaced": lambda: Centred(lambda module, mean: setattr(module.mean, "data", module.mean + mean)),
    "of a module inside": lambda: Centred(lambda module, mean: module.inner.mean.add_(mean)),
    "made late": lambda: Centred(made_late),
    "in evaluation too": lambda: Centred(lambda module, mean: module.mean.add_(mean)).eval(),
    "spectral norm": lambda: nn.utils.spectral_norm(Centred(lambda *_: None).linear),
    "spectral norm as a parametrization": lambda: nn.utils.parametrizations.spectral_norm(Centred(assigned).linear),
}


CALLS = {
    "a module": lambda module, way, x: way(module, x),
    "a function": lambda module, way, x: way(lambda x: module(x).exp(), x),
    "a partial": lambda module, way, x: way(partial(nn.Module.__call__, module), x),
    "a method": lambda module, way, x: way(module.forward if isinstance(module, Centred) else module.__call__, x),
}


WAYS_TO_CALL = [(call, way) for call in CALLS for way in ("by_hooks", "checkpoint")]
WAYS_TO_CALL += [("a module", way) for way in ("by_function", "verified", "everything kept", "nested")]


@pytest.mark.parametrize(("call", "way"), WAYS_TO_CALL)
@pytest.mark.parametrize("make", STATEFUL)
def test_a_module_that_changes_its_own_buffers(make, call, way):
    """Two forwards before the backwards, one of which goes through its graph again."""

    def results(way):
        module, x = STATEFUL[make](), vectors().requires_grad_()
        losses = [CALLS[call](module, way, x * factor).square().sum() for factor in (1, 2)]
        for number, retain in ((1, False), (0, True), (0, False)):
            losses[number].backward(retain_graph=retain)
        return [x.grad, *(p.grad for p in module.parameters()), *module.buffers(), *losses]

    assert equal(results(WAYS[way]), results(plain))


class Reaches(nn.Module):
    """Runs a module that it does not contain."""

    def __init__(self, norm):
        super().__init__()
        self.outside = [norm]

    def forward(self, x):
        return self.outside[0](x).exp()


REACHED = {
    "a method": lambda norm: norm.forward,
    "a partial of a method": lambda norm: partial(norm.forward),
    "a method in a closure": lambda norm: lambda x: norm.forward(x).exp(),
    "a bound method in a closure": lambda norm: (lambda forward: lambda x: forward(x).exp())(norm.forward),
    "a function in a closure": lambda norm: (lambda inner: lambda x: inner(x).exp())(lambda x: norm.forward(x)),
    "a default": lambda norm: lambda x, norm=norm: norm.forward(x).exp(),
    "a global": lambda norm: eval("lambda x: norm.forward(x).exp()", {"norm": norm}),
    "a module outside of a module": Reaches,
}


@pytest.mark.parametrize("how", REACHED)
def test_the_statistics_of_a_norm_however_it_is_reached(how):
    norm = nn.BatchNorm1d(8)
    checkpoint(REACHED[how](norm), vectors().requires_grad_()).sum().backward()
    assert norm.num_batches_tracked == 1


class Adds(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.register_buffer("shared", shared)

    def forward(self, x):
        self.shared.add_(1.0)
        return x * 1


class Subtracts(Adds):
    def forward(self, x):
        return (x - self.shared).sin()


@pytest.mark.parametrize("call", ["a module", "a method", "a function"])
@as_plain("by_function", "by_hooks", "checkpoint", "nested")
def test_a_buffer_that_two_modules_share_is_one_buffer(way, call):
    """One module writes to it, the other reads it, which is seen for the first time after that write."""
    shared, x = torch.zeros(8), vectors().requires_grad_()
    network = nn.Sequential(Adds(shared), Subtracts(shared))
    fn = {"a module": network, "a method": network.forward}.get(call, lambda x: network[1](network[0](x)))
    for _ in range(2):
        way(fn, x).sum().backward()
    return [x.grad, shared]


def test_a_buffer_without_a_size_is_refused():
    norm = nn.LazyBatchNorm1d()
    with pytest.raises(ValueError, match="Call `forward` with a dummy batch"):  # PyTorch's own words
        checkpoint(norm, vectors().requires_grad_())
    norm(vectors())
    checkpoint(norm, vectors().requires_grad_()).sum().backward()
    assert norm.num_batches_tracked == 2


def test_of_buffers_only_those_that_change_are_kept():
    """A mask is none of them. While the block runs for the first time there is a copy."""
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())
    module.register_buffer("mask", torch.ones(1000, 1000))
    x = vectors().requires_grad_()
    with Ledger(module) as ledger:
        y = checkpoint(module, x * 1)
        held = ledger.current["total"]
        y.sum().backward()
    assert 4_000_000 < held < 4_002_000


class Shifted(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.ones(size))

    def forward(self, x):
        return F.dropout((x + self.mean).round().sin() * x, 0.5 if self.training else 0.1).tanh()


CHANGES = {
    "in place": lambda module: module.mean.mul_(-3),
    "through data": lambda module: module.mean.data.mul_(-3),
    "the mode": lambda module: module.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
@as_plain()
def test_what_somebody_changes_after_the_first_run_does_not_reach_the_second(way, change):
    torch.manual_seed(0)
    module, x = Shifted(8), vectors().requires_grad_()
    y = way(module, x * 1)
    CHANGES[change](module)
    y.sum().backward()
    return x.grad, module.mean


@pytest.mark.parametrize("way", WAYS)
def test_a_large_buffer_is_not_kept_but_a_write_to_it_is_refused_by_name(way):
    module, x = Shifted(2**15), vectors(width=2**15).requires_grad_()
    y = WAYS[way](module, x * 1)
    module.mean.add_(1)
    with pytest.raises(RecomputeMismatch, match="the buffer 'mean' was changed in place"):
        y.sum().backward()
