"""Recomputation holds at most what PyTorch's holds, and frees it without the garbage collector."""

import dataclasses
import functools
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as theirs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from minizero import GPT
from minizero.memory import Ledger
from minizero.models.gpt import RECOMPUTE
from minizero.recompute import checkpoint
from minizero.recompute.frame import Stop
from tests.support.helpers import SMALL, batch, slow
from tests.support.recompute_ways import WAYS, block, no_collector, plain, selective, vectors

WAYS_TO_FREE = ["sequential", *slow("by_function", "by_hooks", "checkpoint", "verified", "selective", "nested")]


@pytest.mark.parametrize("way", WAYS_TO_FREE)
@pytest.mark.parametrize("backward", [True, False])
def test_memory_returns_without_the_garbage_collector(way, backward):
    class Function:
        def __init__(self):
            self.module = block()

        def __call__(self, x):
            return self.module(x).exp()  # which saves its own result

    with no_collector():
        fn, x = Function(), vectors().requires_grad_()
        h = x * 1
        y = WAYS[way](fn, h)
        alive = [weakref.ref(thing) for thing in (fn, h, y, h.untyped_storage(), y.untyped_storage())]
        if backward:
            y.sum().backward()
        del fn, h, y
        assert [reference() for reference in alive] == [None] * 5


@pytest.mark.parametrize("way", ["by_hooks", "checkpoint"])
def test_what_ends_a_second_forward_does_not_live_on(way):
    """From Python 3.12 on a generator that swallows it would keep it, with the tensors of all frames behind it."""
    with no_collector():
        WAYS[way](nn.Sequential(nn.Linear(8, 8), nn.RReLU()), torch.ones(2, 8, requires_grad=True)).sum().backward()
        assert not [thing for thing in gc.get_objects() if type(thing) is Stop]


def step_bytes(way, monkeypatch):
    """The peak in all, and of what recomputation is about."""
    monkeypatch.setitem(RECOMPUTE, "theirs", way)
    model = GPT(dataclasses.replace(SMALL, layers=8, recompute="theirs"))
    with Ledger(model) as ledger:
        model(*batch(0)).backward()
    return ledger.peak["total"], ledger.peak["activations"] + ledger.peak["temporary"]


OPERATORS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]


@pytest.mark.slow
def test_the_peak_is_at_most_pytorchs(monkeypatch):
    measure = partial(step_bytes, monkeypatch=monkeypatch)
    ours = measure(checkpoint)
    for use_reentrant in (True, False):
        other = measure(partial(theirs, use_reentrant=use_reentrant))
        assert ours[0] <= other[0] and ours[1] <= other[1]
    assert ours[1] < 0.5 * measure(plain)[1]
    contexts = partial(create_selective_checkpoint_contexts, OPERATORS)
    middle = measure(selective)
    other = measure(partial(theirs, use_reentrant=False, context_fn=contexts))
    assert ours[1] < middle[1] < other[1] and middle[0] <= other[0]  # without what is not needed again


def test_an_outer_function_holds_no_input_of_the_inner_ones():
    """Two levels of √√: x, three inputs and the output."""

    def held(way):
        four = lambda x: functools.reduce(lambda x, _: way(torch.tanh, x), range(4), x)  # noqa: E731
        with Ledger() as ledger:
            y = functools.reduce(lambda y, _: checkpoint(four, y), range(4), torch.randn(1000, requires_grad=True))
            return ledger.current["total"] // y.nbytes

    assert held(checkpoint) == held(plain) == 4 + 1


def test_what_is_kept_goes_when_it_has_been_used():
    with Ledger() as ledger:
        column, row = torch.ones(1000, 1, requires_grad=True), torch.ones(1, 1000)
        y = selective(lambda column: (column @ row).exp().sin(), column).sum()
        column.register_hook(lambda _: held.append(ledger.current["total"]))
        held = [ledger.current["total"]]
        y.backward()
    assert held[1] < held[0], "the product is no longer there when the gradient of the input has been made"


def test_a_result_behind_all_that_backward_needs_is_not_kept():
    x, row = torch.ones(1000, 1, requires_grad=True), torch.ones(1, 1000, requires_grad=True)
    with Ledger() as ledger:
        y = selective(lambda x: x.sin() @ row, x).sum()
        assert y.requires_grad and ledger.current["total"] < 1000 * 1000 * 4
