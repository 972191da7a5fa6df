"""The options of stage 3, and what a model and a loop may do, in every combination: the training of one process."""

import pytest
import torch
from torch import nn

from minizero import DDP, Zero3, all_reduce
from precision.scaling import DynamicLossScaler
from tests.support.helpers import SLOW, exactly, relative_error, run
from tests.support.small_models import EDGES, LOOPS, OPTIONS, Blocks, fit, fit_plain, seeded

WORLD_SIZE = 4
MOST = ("two ahead", "kept until backward", "offload", "groups of 2, offload, kept")


def tied_frozen_and_unused(model):
    model.blocks[2][2].weight = model.blocks[0][2].weight
    model.blocks[1][0].weight.requires_grad_(False)
    model.blocks[0][0].requires_grad_(False)
    model.spare = nn.Linear(3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in MOST else pytest.param(n, marks=pytest.mark.soak) for n in OPTIONS])
@pytest.mark.parametrize("use", [*LOOPS, *EDGES], ids=lambda use: use.__name__)
def test_what_a_loop_may_do(name, use):
    options, size = OPTIONS[name], 4 if "groups" in name else 2
    make = seeded(lambda: Blocks(tied_frozen_and_unused))
    expected, start = fit_plain(make, forward=use), make().state_dict()
    assert relative_error(expected, start) > 1e-2
    state, *others = run(size, fit, Zero3, make, forward=use, **options)
    exactly(others, [state] * (size - 1))
    assert relative_error(state, expected) < 1e-5
    if "sharding_factor" not in options:  # whose sums have another order
        exactly(state, run(size, fit, Zero3, make, forward=use, prefetch=0)[0])
    for name in ("blocks.1.0.weight", "blocks.0.0.weight", "blocks.0.0.bias", "spare.weight", "spare.bias"):
        assert torch.equal(state[name], start[name]), f"{name} is frozen or unused"


def overflow(comm, stage, at, **options):
    """Four steps in FP16, of which the second overflows in one number: has each stepped, under which scale, to what?"""
    model = stage(seeded(lambda: nn.Linear(64, 1, bias=False))(), comm, dtype=torch.float16, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = DynamicLossScaler(16.0, growth_interval=100, combine=lambda flag: all_reduce(flag, comm, op="max"))
    trace, states = [], [model.gather_state_dict()["weight"]]
    for step in range(4):
        x = torch.ones(1, 64) / 8
        if step == 1 and comm.rank == 0:
            x[0, at] = 6e4  # times 16 it is no number of FP16, and the gradient of weight `at` is infinite
        scaler.scale(model(x).float().sum()).backward()
        infinite = any(not shard.grad.isfinite().all() for shard in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append((infinite, scaler.get_scale()))
        states.append(model.gather_state_dict()["weight"])
    return trace, states


@pytest.mark.parametrize("name", [name if name in MOST else pytest.param(name, marks=SLOW) for name in OPTIONS])
def test_an_overflow_in_one_shard_makes_all_ranks_skip(name):
    options, at = OPTIONS[name], 40  # of 64 numbers
    ranks = run(WORLD_SIZE, overflow, Zero3, at, **options)
    inside = options.get("sharding_factor", WORLD_SIZE)
    for rank, (trace, states) in enumerate(ranks):
        assert [infinite for infinite, _ in trace] == [False, rank % inside == at * inside // 64, False, False]
        assert [scale for _, scale in trace] == [16.0, 8.0, 8.0, 8.0]
        assert [torch.equal(a, b) for a, b in zip(states, states[1:])] == [False, True, False, False]
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(states, ranks[0][1]))
    _, expected = run(WORLD_SIZE, overflow, DDP, at)[0]
    assert relative_error({"weight": ranks[0][1][-1]}, {"weight": expected[-1]}) < 1e-6
