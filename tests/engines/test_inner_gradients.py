"""A gradient that only goes through units, to an input, is no backward: nothing is reduced, sent or left behind."""

import gc

import pytest
import torch
from torch import nn

from minizero import DDP, Zero1, Zero2, Zero3
from minizero.engines.any_model.uses import Use
from minizero.recompute import checkpoint
from tests.support.helpers import run
from tests.support.small_models import SAME_BITS


class Guided(nn.Module):
    """Goes down an energy, as a sampler does, and then on."""

    def __init__(self, steps):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.steps, self.energy, self.last = steps, nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x):
        for _ in range(self.steps):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                energy = self.energy[1](self.energy[0](inner).tanh()).square().sum()
                (slope,) = torch.autograd.grad(energy, inner)
            x = x - 0.1 * slope
        return self.last(self.energy[1](self.energy[0](x)))


def train(comm, stage, options, steps):
    """Losses and gradients of two steps, bytes sent in each, and .grad after a forward alone."""
    model = stage(Guided(steps), comm, **options)
    model(torch.ones(2, 4) * (1 + comm.rank))
    alone, found = [shard.grad for shard in model.parameters()], []
    for number in range(2):
        sent = comm.bytes_sent
        loss = model(torch.ones(2, 4) * (1 + comm.rank + number)).square().mean()
        loss.backward()
        found.append((loss.item(), [shard.grad.clone() for shard in model.parameters()], comm.bytes_sent - sent))
        model.zero_grad()
    return alone, found


@pytest.mark.parametrize(("stage", "options"), SAME_BITS)
def test_inside_a_forward_it_neither_reduces_nor_touches_grad(stage, options):
    plain = Guided(1)
    for (alone, found), rank in zip(run(2, train, stage, options, 1), range(2)):
        assert alone == [None] * len(alone), "no backward of the model has run"
        losses = [plain(torch.ones(2, 4) * (1 + rank + number)).square().mean().item() for number in range(2)]
        assert [loss for loss, *_ in found] == pytest.approx(losses, rel=1e-5)
        assert all(gradient.any() for gradient in found[0][1])
    if stage is not Zero3:  # which has to gather for it
        assert [sent for *_, sent in found] == [sent for *_, sent in run(2, train, stage, options, 0)[1][1]]


@pytest.mark.parametrize("stage", [DDP, Zero1, Zero2])
def test_one_rank_may_do_it_alone(stage):
    """A stage that keeps replicas sends nothing for it: say, rank 0 draws which inputs matter."""

    def work(comm):
        model = stage(Guided(0), comm)
        if comm.rank == 0:
            x = torch.ones(2, 4, requires_grad=True)
            inner = model.module.energy[0](x).sum()
            assert torch.autograd.grad(inner, x)[0].any()
        model(torch.ones(2, 4)).sum().backward()
        return torch.cat([shard.grad.view(-1) for shard in model.parameters()]).norm().item()

    assert all(norm > 0 for norm in run(2, work))


@pytest.mark.accuracy
def test_a_second_forward_that_is_stopped_leaves_no_use_behind():
    """Recompute ends a block's second forward by an exception, as soon as it has what it needs."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x)
            return x.sum()

    def work(comm):
        model, counts = Zero3(Recomputed(), comm), []
        for _ in range(4):
            model(torch.ones(2, 4)).backward()
            model.zero_grad()
            gc.collect()
            counts.append(sum(type(thing) is Use for thing in gc.get_objects()))
        return counts

    counts = run(1, work)[0]
    assert counts[-1] == counts[1], "nothing grows from step to step"
