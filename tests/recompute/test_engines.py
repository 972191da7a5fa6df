"""Inside the engines recomputation changes no loss and no traffic."""

import dataclasses

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, Zero1, Zero2, Zero3
from minizero.memory import Ledger
from minizero.recompute import checkpoint
from tests.support.helpers import SMALL, run, slow, steps
from tests.support.recompute_ways import nested, plain, selective, sequential, vectors, verified


def train(comm, stage, recompute, dtype):
    model = stage(GPT(dataclasses.replace(SMALL, layers=6, recompute=recompute)), comm, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = steps(model, optimizer, [0])
    with Ledger(model, optimizer) as ledger:
        losses += steps(model, optimizer, [1])
    return losses, comm.bytes_sent, ledger.peak["activations"]


@pytest.mark.parametrize("stage", [Zero3, *slow(DDP, Zero1, Zero2)])
@pytest.mark.parametrize("dtype", [None, *slow(torch.bfloat16)])
def test_every_stage_has_the_same_losses_and_traffic_with_less_activations(stage, dtype):
    results = {way: run(2, train, stage, way, dtype)[0] for way in ("none", "full", "selective")}
    losses, sent, activations = results["none"]
    for way, most in (("full", 0.15), ("selective", 0.75)):
        assert results[way][:2] == (losses, sent)
        assert 0 < results[way][2] < most * activations


@pytest.mark.slow
def test_a_function_of_several_units_and_verify_under_stage_3():
    class Blocks(nn.Module):
        def __init__(self, way):
            super().__init__()
            torch.manual_seed(0)
            self.blocks, self.way = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), way

        def forward(self, x):
            first, second, third, fourth = self.blocks
            x = self.way(lambda x: torch.sin(second(first(x))), x)
            return self.way(lambda x: fourth(third(x)) + second(x), x).square().mean()

    def losses(comm, stage, model):
        import copy

        model = stage(copy.deepcopy(model), comm)
        return steps(model, torch.optim.AdamW(model.parameters(), lr=0.1), range(2), lambda step: [vectors(8, 6, step)])

    expected = run(2, losses, Zero3, Blocks(plain))
    for way in (checkpoint, verified, nested, selective, sequential):
        assert run(2, losses, Zero3, Blocks(way)) == expected
