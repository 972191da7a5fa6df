"""How many collectives a step takes, on what and of how many bytes: one a unit, the root unit being one of them.

stage 3   forward: a gather for each unit     backward: a gather for each but the root, a reduce-scatter for each
"""

import contextlib

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, Zero1, Zero2, Zero3
from minizero.ranks.agreement import agreement
from tests.support.helpers import SMALL, batch, run
from tests.support.small_models import decay

STEPS = 2  # the first is the one that learns the order
UNITS = ["root", "blocks.0", "blocks.1", "blocks.2"]  # of the GPT
BLOCKS = UNITS[1:]


@pytest.fixture
def counted(monkeypatch):
    """A function that trains for some steps and returns the last one's collectives: (phase, operation, label)."""
    logs = [[] for _ in range(4)]

    @contextlib.contextmanager
    def recorded(comm, operation, tensor=None, **details):
        if comm.size > 1:  # alone, a rank agrees with itself
            nbytes = 0 if tensor is None else tensor.nbytes
            logs[comm.ranks[comm.rank]].append((comm, operation, details.get("label", ""), nbytes))
        with agreement(comm, operation, tensor, **details):
            yield

    monkeypatch.setattr("minizero.ranks.collectives.agreement", recorded)

    def step_of(comm, stage, make, data, options):
        model = stage(make(), comm, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            logs[comm.rank].clear()
            sent = comm.bytes_sent
            loss = model(*data(step))
            forward = list(logs[comm.rank])
            loss.backward()
            both = list(logs[comm.rank])
            if model.sync:
                optimizer.step()
            optimizer.zero_grad()
            assert logs[comm.rank] == both, "the optimizer needs nobody"
        assert both[: len(forward)] == forward
        assert sum(bytes_of(*call) for call in both) == comm.bytes_sent - sent
        backward = both[len(forward) :]
        phases = {"forward": forward, "backward": backward}
        calls = [(phase, operation, label) for phase, calls in phases.items() for _, operation, label, _ in calls]
        return sorted(calls, key=lambda call: call[:2])  # gathers and reductions of one time come in any order

    def count(stage, make=lambda: GPT(SMALL), data=batch, world_size=2, **options):
        calls = run(world_size, step_of, stage, make, data, options)
        assert all(rank == calls[0] for rank in calls), "ranks differ"
        return calls[0]

    return count


def bytes_of(comm, operation, label, nbytes):
    """What a rank sends: the shard to each other rank, or the whole without its own chunk, or that and the chunks."""
    n = comm.size
    chunks = nbytes * (n - 1) // n
    return {"all_gather": nbytes * (n - 1), "reduce_scatter": chunks, "all_reduce": 2 * chunks}[operation]


def labels(calls):
    """Of which units, in order: {(phase, operation): labels}."""
    found = {}
    for phase, operation, label in calls:
        found.setdefault((phase, operation), []).append(label)
    return found


GATHER, AGAIN = ("forward", "all_gather"), ("backward", "all_gather")
SCATTER, REDUCE = ("backward", "reduce_scatter"), ("backward", "all_reduce")
BACKWARD = BLOCKS[::-1]  # gathered again: the root stays
REDUCED = [*BACKWARD, "root"]
ZERO3 = {GATHER: UNITS, AGAIN: BACKWARD, SCATTER: REDUCED}
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
    "of one rank": (Zero3, {"sharding_factor": 1}, {REDUCE: REDUCED}),
}


@pytest.mark.parametrize("name", STEPS_OF)
def test_a_step_takes_a_collective_for_each_unit(name, counted):
    stage, options, expected = STEPS_OF[name]
    assert labels(counted(stage, **options)) == expected


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


def test_what_is_frozen_is_gathered_where_a_gradient_passes_and_never_reduced(counted):
    calls = labels(counted(Zero3, Partial, lambda step: (torch.ones(2, 6),)))
    half = ["blocks.3", "blocks.3 (frozen)"]  # what trains and what does not are two buffers
    frozen = ["blocks.0 (frozen)", "blocks.1", "blocks.2 (frozen)"]
    assert sorted(calls[GATHER]) == sorted(["root", *frozen, *half])
    assert sorted(calls[AGAIN]) == sorted([*frozen[1:], *half])
    assert calls[SCATTER] == ["blocks.3", "blocks.1", "root"]


def test_no_sync_only_gathers(counted):
    class Quiet(Zero3):
        def forward(self, *args):
            self.sync = False
            return super().forward(*args)

    assert labels(counted(Quiet)) == {GATHER: UNITS, AGAIN: BACKWARD}
