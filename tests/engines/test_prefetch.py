"""Gathering ahead: the same bits, the memory of one unit more, and never more under way than was asked for."""

import functools
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minizero import GPT, World, Zero2, Zero3, all_reduce
from minizero.ranks.errors import RankFailed
from tests.support.failures import failure_of
from tests.support.helpers import SMALL, batch, exactly, run, slow, train
from tests.support.small_models import Blocks, fit, on_ranks, seeded, vectors
from tests.support.stage_bytes import BLOCK, ROOT, TOTAL, measure, most


def watch(thing, method, before=lambda unit: None, after=lambda unit: None):
    """Call `before` and `after` around each `thing.method(unit)`."""
    call = getattr(thing, method)
    setattr(thing, method, lambda unit: (before(unit), call(unit), after(unit))[1])


ahead = functools.partial(functools.partial, Zero3)  # with these options, as a stage for `helpers.train`


@pytest.mark.parametrize(
    "size, options, dtype",
    [(2, {}, None)]
    + slow((2, {"reshard_after_forward": False}, torch.bfloat16), (4, {"sharding_factor": 2}, torch.bfloat16))
    + slow((2, {"sharding_factor": 1}, None)),
)
def test_neither_prefetch_nor_offload_changes_bits_or_traffic(size, options, dtype):
    expected = run(size, train, ahead(prefetch=0, **options), 3, clip=0.5, dtype=dtype)
    for prefetch, offload in ((1, False), (9, False), (1, True), (0, True)):
        stage = ahead(prefetch=prefetch, offload=offload, **options)
        exactly(run(size, train, stage, 3, clip=0.5, dtype=dtype), expected)


@on_ranks([ahead(prefetch=number) for number in (1, 2)], make=lambda: GPT(SMALL))
def test_the_next_units_are_under_way_while_this_one_computes(model, comm):
    """Each is gathered once in forward and once in backward, the root once."""
    lane, log, early, under_way = model.ahead, [], set(), []

    def before_fill(unit):
        log.append(unit.name)
        time.sleep(0.01)

    watch(model, "fill", before=before_fill)
    watch(lane, "start", after=lambda unit: under_way.append(len(lane.gathering)))
    watch(lane, "gather", before=lambda unit: early.add(unit.name) if unit in lane.gathering else None)
    for _ in range(3):
        for seen in (log, early, under_way):
            seen.clear()
        model(*batch(comm.rank, size=2)).backward()
        model.zero_grad()
    blocks = [f"blocks.{i}" for i in range(3)]
    assert log == ["root", *blocks, *reversed(blocks)] and early == {*blocks} and max(under_way) == lane.depth


@on_ranks([Zero3], make=lambda: GPT(SMALL))
def test_in_backward_the_next_unit_comes_when_little_of_this_ones_gradient_is_missing(model, comm):
    """By then most of its activations are gone, whose place the replica takes. And the last reduction has ended."""
    missing = []

    def begins(unit):
        begun = [u for u in model.units[1:] if u.gradient.full is not None]
        if begun and unit.replica_is_stale():
            owed = model.backward.owed[begun[0]]
            missing.append(sum(begun[0].parameters[number].numel() for number in owed) / begun[0].size)

    def puts(unit):
        assert unit.gradient.full is not None or model.ahead.reducing is None

    watch(model.ahead, "start", before=begins)
    watch(model.ahead, "before_put", after=puts)
    for _ in range(2):
        missing.clear()
        model(*batch(comm.rank, size=2)).backward()
        model.zero_grad()
    assert len(missing) == 2 and all(0 < share <= 1 / 3 for share in missing)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_peak_is_three_units_and_prefetch_adds_none(prefetch):
    _, curve, *_ = run(4, measure, ahead(prefetch=prefetch))[0]
    shards = TOTAL  # FP32, a quarter of the parameters
    for sample in curve:
        beyond = sample["parameters"] + sample["gradients"] - shards - 4 * ROOT * 2
        assert beyond <= 3 * 4 * BLOCK + shards
    for phase in ("forward", "backward"):
        units = (1 + prefetch) * BLOCK + ROOT
        assert most(curve, "parameters", phase) - shards == pytest.approx(4 * units, rel=1e-3), (
            "this block and the next"
        )
    assert 0 < max(s["communication"] for s in curve) <= 2 * BLOCK + 64, "the lane's buffers are counted too"


def test_other_collectives_of_the_user_do_not_meet_the_lanes():
    def work(comm, prefetch):
        net = seeded(Blocks)()
        for block in net.blocks:
            block.register_forward_pre_hook(lambda _, args: all_reduce(args[0].detach(), comm, "mean"))
        return fit(comm, Zero3, lambda: net, prefetch=prefetch)

    exactly(run(2, work, 0), run(2, work, 2))


def skipping(model, x, rank, order, short):
    """A block is skipped once. Of the one after it rank 1 has few gradients: only rank 0 has begun to gather it."""
    model.step = getattr(model, "step", -1) + 1
    block = model.module.blocks[short]
    block.forward = (lambda x: x * block[2].bias) if rank == 1 else block.forward
    return model(x, order=order if model.step == 2 else (0, 1, 2)).square().mean()


def in_two_checkpoints(model, x, rank):
    """The blocks get a second gradient when they have been reduced."""
    again = lambda block, x: checkpoint(block, x, use_reentrant=True)  # noqa: E731
    return model(x.requires_grad_(), order=(1, 2, 1, 2), call=again).square().mean()


@pytest.mark.parametrize(("order", "short"), [((0, 2), 2), ((1, 2), 1)])
def test_ranks_gather_in_one_order_though_some_lack_gradients(order, short):
    loop = functools.partial(skipping, order=order, short=short)
    work = functools.partial(fit, make=seeded(Blocks), steps=4, forward=loop)
    for prefetch in (0, 1):
        exactly(run(2, work, stage=Zero2), run(2, work, stage=Zero3, prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_second_gradient_is_refused_in_the_same_words(prefetch):
    with pytest.raises(RankFailed, match="a second gradient for blocks.2 after it was reduced"):
        run(2, fit, Zero3, seeded(Blocks), forward=in_two_checkpoints, prefetch=prefetch)


@on_ranks([Zero3], make=lambda: Blocks(lambda net: [block[0].requires_grad_(False) for block in net.blocks]))
def test_one_block_ahead_is_all_units_of_the_block(model, comm):
    """What is frozen in a block is a unit of its own."""
    ahead = []
    for block in model.module.blocks:
        block[0].register_forward_pre_hook(lambda *_: ahead.append({unit.name for unit in model.ahead.gathering}))
    for _ in range(2):
        ahead.clear()
        model(vectors(0)).square().mean().backward()
    assert ahead == [{name, f"{name} (frozen)"} for name in ("blocks.1", "blocks.2")] + [set()]


@on_ranks(
    [ahead(prefetch=number) for number in (0, 1, 2)],
    make=lambda: Blocks(lambda net: setattr(net, "out", nn.Identity())),
)
def test_a_wrong_guess_costs_no_more_than_was_gathered_ahead(model, comm):
    """It is found out when the first block is used: then nothing more is guessed in that pass."""
    filled, counts = [], []
    watch(model, "fill", before=filled.append)
    for order in ((2, 1), (2, 1), (0, 0, 1), (0, 0, 1), (1, 2)):
        filled.clear()
        with torch.no_grad():
            model(vectors(0), order=order)
        counts.append(len(filled))
    assert counts == [2, 2, 3, 3, 2]


@on_ranks([Zero3], make=lambda: GPT(SMALL))
def test_memory_is_not_taken_from_a_gather_that_is_under_way(model, comm):
    model(*batch(comm.rank, size=2)).backward()
    release, filled = model.release, []

    def watched(unit):
        under_way = unit in model.ahead.gathering
        release(unit)
        assert not under_way or unit.name in filled

    watch(model, "fill", before=lambda unit: time.sleep(0.05), after=lambda unit: filled.append(unit.name))
    model.release = watched
    model.module.blocks[0].attention.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*batch(comm.rank, size=2))
    assert "blocks.1" in filled and not any(unit.replica.untyped_storage().nbytes() for unit in model.units)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_ends_the_others_and_the_lanes(where):
    def work(comm):
        model = Zero3(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), comm, prefetch=2)
        for step in range(3):
            if comm.rank == 1 and step == 2:
                fails = lambda _, __, out: 1 / 0 if where == "forward" else out.register_hook(lambda _: 1 / 0) and None  # noqa: E731
                model.module[2].register_forward_hook(fails)
            model(torch.ones(2, 8)).sum().backward()
            model.zero_grad()

    failed = failure_of(World(3, device="cpu"), work)  # and no CommTimeout: nobody waits in vain
    assert failed.rank == 1 and isinstance(failed.__cause__, ZeroDivisionError)
