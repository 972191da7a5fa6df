"""How many collectives a step takes, and on what: one a unit, the root unit being one of them.

stage 3   forward: a gather for each unit     backward: a gather for each but the root, a reduce-scatter for each
"""

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, Zero1, Zero2, Zero3
from tests.support.helpers import SMALL, batch, run
from tests.support.small_models import decay

UNITS = ["root", "blocks.0", "blocks.1", "blocks.2"]  # of the GPT
BLOCKS = UNITS[1:]


def step_of(comm, stage, make, data, options):
    """Of which units the collectives of a second step are, in order: {(phase, operation): labels}."""
    model = stage(make(), comm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, phase = {}, ""
    comm.observers.append(lambda operation, label, began: found.setdefault((phase, operation), []).append(label))
    for step in range(2):  # in the first it learns the order
        found.clear()
        phase = "forward"
        loss = model(*data(step))
        phase = "backward"
        loss.backward()
        phase = "step"
        if model.sync:
            optimizer.step()
        optimizer.zero_grad()
    return found


def counted(stage, make=lambda: GPT(SMALL), data=batch, world_size=2, **options):
    calls = run(world_size, step_of, stage, make, data, options)
    assert all(rank == calls[0] for rank in calls), "ranks differ"
    return calls[0]


GATHER, AGAIN = ("forward", "all_gather"), ("backward", "all_gather")
SCATTER, REDUCE = ("backward", "reduce_scatter"), ("backward", "all_reduce")
BACKWARD = BLOCKS[::-1]  # gathered again: the root stays
REDUCED = [*BACKWARD, "root"]
ZERO3 = {GATHER: UNITS, AGAIN: BACKWARD, SCATTER: REDUCED}


class Partial(nn.Module):
    """A frozen block at the start, which no gradient passes, and one in the middle; a block that is half frozen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 2)
        for frozen in (self.blocks[0], self.blocks[2], self.blocks[3].bias):
            frozen.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.out(x).square().mean()


class Quiet(Zero3):
    """As in `no_sync`."""

    def forward(self, *args):
        self.sync = False
        return super().forward(*args)


HALF = ["blocks.3", "blocks.3 (frozen)"]  # what trains and what does not are two buffers
STEPS_OF = {
    "DDP": (DDP, {}, {REDUCE: ["root"]}),  # all units fit into one bucket
    "Zero1": (Zero1, {}, {GATHER: UNITS, SCATTER: REDUCED}),
    "Zero2": (Zero2, {}, {GATHER: UNITS, SCATTER: REDUCED}),
    "Zero3": (Zero3, {"prefetch": 0}, ZERO3),
    "ahead": (Zero3, {"prefetch": 2}, ZERO3),
    "groups": (Zero3, {"group_by": decay}, ZERO3),
    "BF16": (Zero3, {"dtype": torch.bfloat16}, ZERO3),
    "offload": (Zero3, {"offload": True}, ZERO3),
    "kept": (Zero3, {"reshard_after_forward": False}, {GATHER: UNITS, SCATTER: REDUCED}),
    "hybrid": (Zero3, {"world_size": 4, "sharding_factor": 2}, ZERO3 | {REDUCE: REDUCED}),
    "no_sync": (Quiet, {}, {GATHER: UNITS, AGAIN: BACKWARD}),
    "frozen": (  # is gathered where a gradient passes, and never reduced
        Zero3,
        {"make": Partial, "data": lambda step: (torch.ones(2, 6),)},
        {
            GATHER: ["root", "blocks.0 (frozen)", "blocks.1", "blocks.2 (frozen)", *HALF[::-1]],
            AGAIN: [*HALF, "blocks.2 (frozen)", "blocks.1"],
            SCATTER: ["blocks.3", "blocks.1", "root"],
        },
    ),
}


@pytest.mark.parametrize("name", STEPS_OF)
def test_a_step_takes_a_collective_for_each_unit(name):
    stage, options, expected = STEPS_OF[name]
    assert counted(stage, **options) == expected
