"""Processes give the bits that threads give, random numbers included."""

import pytest
import torch
from torch import nn

from minizero.recompute import checkpoint
from tests.support import processes
from tests.support.helpers import STAGES, run, same, train

STEPS = 10


class Forgetful(nn.Module):
    """Dropout in every block, whose forward may be run twice."""

    def __init__(self, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x) if self.recompute else block(x))
        return x.square().mean()


def losses_with_dropout(wrap, seed, recompute):
    """All ranks have the same data: what differs is what they draw."""
    torch.manual_seed(0)
    model = wrap(Forgetful(recompute))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch.manual_seed(seed)
    losses = []
    for step in range(5):
        loss = model(torch.full((4, 8), 1.0 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def dropout(comm):
    """Losses by (stage, seed of its own, recompute), and those of a single process."""
    found = {
        (stage.__name__, own, recompute): losses_with_dropout(
            lambda module, stage=stage: stage(module, comm), 7 + own * comm.rank, recompute
        )
        for stage in STAGES
        for own in (False, True)
        for recompute in (False, True)
    }
    return found, losses_with_dropout(lambda module: module, 7, False)


def both(comm):
    return [train(comm, stage, STEPS, eps=1e-4) for stage in STAGES], dropout(comm)


@pytest.mark.slow
def test_threads_and_processes_agree(tmp_path):
    world_size = 3  # the fewest of which a sum has an order
    ranks = processes.run(both, world_size, tmp_path)
    threads = {stage: run(world_size, train, stage, STEPS, eps=1e-4) for stage in STAGES}
    for rank, (found, _) in enumerate(ranks):
        for stage, (losses, state, sent) in zip(STAGES, found):
            expected = threads[stage][rank]
            assert losses == expected[0] and sent == expected[2] and same(state, expected[1]), stage.__name__
    check_dropout([found for _, found in ranks])
    assert run(world_size, dropout) == [found for _, found in ranks]


def check_dropout(ranks):
    for found, alone in ranks:
        for (stage, own, recompute), losses in found.items():
            assert losses == found["DDP", own, False], f"{stage}, recompute={recompute}: other masks"
            if not own:  # who sees the same data and draws the same is a replica
                assert losses == pytest.approx(alone, rel=1e-5)
    first, others = ranks[0][0], [found for found, _ in ranks[1:]]
    assert all(found["Zero3", False, True] == first["Zero3", False, True] for found in others)
    assert all(found["Zero3", True, True][0] != first["Zero3", True, True][0] for found in others), "the same masks"
