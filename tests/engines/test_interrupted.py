"""Forwards and sums that end early, are skipped, or are another engine's: as in the plain module."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minizero import DDP, Zero3
from tests.support.helpers import STAGES
from tests.support.small_models import Blocks, check, on_ranks, seeded, vectors


def recomputed_as_a_whole(model, x, rank):
    """The second forward is stopped early, in the middle of the model."""
    return checkpoint(model, x, use_reentrant=False).square().mean()


def evaluated_before_the_step(model, x, rank):
    """Stage 3 gathers block 1 ahead, which the evaluation skips. The loop's next collective must not meet it."""
    model(x).square().mean().backward()
    with torch.no_grad():
        model(x, order=(0,))
    assert not isinstance(model, Zero3) or not model.ahead.gathering


def a_part_called_by_itself_raises(model, x, rank):
    with contextlib.suppress(RuntimeError):
        getattr(model, "module", model).blocks[1](x[:, :3])
    return model(x).square().mean()


def summed_and_dropped_in_part(model, x, rank):
    """Of the sum under no_sync one parameter's is dropped, and another's is made anew."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        model(x).square().mean().backward()
    parameters = dict(model.named_parameters())
    first, second = parameters["blocks.0.0.weight"], parameters["out.weight"]
    first.grad, second.grad = None, second.grad / 2
    return model(x).mean()


LOOPS = [(recomputed_as_a_whole, STAGES), (a_part_called_by_itself_raises, STAGES)]
LOOPS += [(evaluated_before_the_step, [Zero3]), (summed_and_dropped_in_part, [DDP])]


@pytest.mark.parametrize(("loop", "stages"), LOOPS)
def test_it_is_as_in_the_plain_module(loop, stages):
    check(seeded(Blocks), forward=loop, steps=4, stages=stages)


@on_ranks([Zero3])
def test_a_part_that_raised_is_released_again(model, comm):
    a_part_called_by_itself_raises(model, vectors(0), comm.rank).backward()
    assert [unit.replica.untyped_storage().nbytes() for unit in model.units] == [0] * 4


@on_ranks([DDP])
def test_a_backward_for_another_engines_parameters_sends_nothing(model, comm):
    other = DDP(nn.Linear(1, 1), comm)
    other(model(vectors(comm.rank))).mean().backward(inputs=list(model.parameters()))
    assert [p.grad for p in other.parameters()] == [None, None] and all(p.grad.any() for p in model.parameters())


@on_ranks([Zero3], reshard_after_forward=False)
def test_a_shard_written_to_is_not_undone_by_a_forward_that_skips_it(model, comm):
    model(vectors(0))
    before = model.gather_state_dict()
    with torch.no_grad():
        for shard in model.parameters():
            shard.add_(1)
        model(vectors(0), order=(0,))
    assert all((value - before[name]).min() > 0.9 for name, value in model.gather_state_dict().items())
