"""Gathering ahead: the same bits, the memory of one unit more, and never more under way than was asked for."""

import functools
import time

import pytest
import torch
from torch import nn

from minizero import GPT, RankFailed, World, Zero3, all_reduce
from tests.support.helpers import SMALL, batch, run, same, slow, train
from tests.support.stage_bytes import BLOCK, ROOT, TOTAL, measure

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
        found = run(size, train, ahead(prefetch=prefetch, offload=offload, **options), 3, clip=0.5, dtype=dtype)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[0] == theirs[0] and mine[2] == theirs[2] and same(mine[1], theirs[1])


def gathers(comm, prefetch, steps=3):
    """What the last step gathered, in order, how many of them overlapped computation, and the most under way."""
    model = Zero3(GPT(SMALL), comm, prefetch=prefetch)
    lane = model.ahead
    fill, start, gather = model.fill, lane.start, lane.gather
    log, early, most = [], set(), 0

    def slow(unit):
        log.append(unit.name)
        time.sleep(0.01)
        fill(unit)

    def counted(unit):
        nonlocal most
        start(unit)
        most = max(most, len(lane.gathering))

    def watched(unit):
        if unit in lane.gathering:
            early.add(unit.name)
        gather(unit)

    model.fill, lane.start, lane.gather = slow, counted, watched
    for _ in range(steps):
        log.clear()
        early.clear()
        most = 0
        model(*batch(comm.rank, size=2)).backward()
        model.zero_grad()
    return log, early, most


@pytest.mark.parametrize("prefetch", [1, 2])
def test_the_next_units_are_under_way_while_this_one_computes(prefetch):
    names, early, most = run(2, gathers, prefetch)[0]
    blocks = [f"blocks.{i}" for i in range(3)]
    assert names == ["root", *blocks, *reversed(blocks)], "each once in forward and in backward, the root once"
    assert early == set(blocks) and most == prefetch


def test_in_backward_the_next_unit_comes_when_little_of_this_ones_gradient_is_missing():
    """By then most of its activations are gone, whose place the replica takes. And the last reduction has ended."""

    def work(comm):
        model = Zero3(GPT(SMALL), comm)
        start, before_put, missing = model.ahead.start, model.ahead.before_put, []

        def begins(unit):
            before_put(unit)
            assert unit.gradient.full is not None or model.ahead.reducing is None

        def watched(unit):
            begun = [u for u in model.units if u.module and u.gradient is not None and u.gradient.full is not None]
            if begun and unit.replica_is_stale():
                owed = model.backward.owed[begun[0]]
                missing.append(sum(begun[0].parameters[number].numel() for number in owed) / begun[0].size)
            start(unit)

        model.ahead.start, model.ahead.before_put = watched, begins
        for _ in range(2):
            missing.clear()
            model(*batch(comm.rank, size=2)).backward()
            model.zero_grad()
        return missing

    missing = run(2, work)[0]
    assert len(missing) == 2 and all(0 < share <= 1 / 3 for share in missing)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_peak_is_three_units_and_prefetch_adds_none(prefetch):
    _, _, curve = run(4, measure, ahead(prefetch=prefetch))[0]
    shards = TOTAL  # FP32, a quarter of the parameters
    for sample in curve:
        beyond = sample["parameters"] + sample["gradients"] - shards - 4 * ROOT * 2
        assert beyond <= 3 * 4 * BLOCK + shards
    for phase in ("forward", "backward"):
        most = max(s["parameters"] for s in curve if s.phase == phase)
        units = (1 + prefetch) * BLOCK + ROOT
        assert most - shards == pytest.approx(4 * units, rel=1e-3), "this block and the next"
    assert 0 < max(s["communication"] for s in curve) <= 2 * BLOCK + 64, "the lane's buffers are counted too"


def test_other_collectives_of_the_user_do_not_meet_the_lanes():
    class Chatty(nn.Module):
        def __init__(self, comm):
            super().__init__()
            self.comm, self.linear = comm, nn.Linear(50, 50)

        def forward(self, x):
            return self.linear(all_reduce(x, self.comm, "mean"))

    def work(comm, prefetch):
        torch.manual_seed(0)
        model = Zero3(nn.Sequential(*(Chatty(comm) for _ in range(4))), comm, prefetch=prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(torch.ones(2, 50) * (comm.rank + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([value.view(-1) for value in model.gather_state_dict().values()])

    assert torch.equal(run(2, work, 0)[0], run(2, work, 2)[0])


class Branching(nn.Module):
    """Uses its blocks in an order that changes from call to call."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        order = [[0, 1, 2, 3], [3, 1], [2, 2, 0], [0, 1, 2, 3, 1], [1]][self.calls % 5]
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def test_an_order_that_changes_is_learnt_anew():
    def work(comm, prefetch):
        model = Zero3(Branching(), comm, prefetch=prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(12):
            if step == 5:
                model(torch.ones(3, 6))  # a forward without backward, before a step
            loss = model(torch.full((3, 6), 0.1 * (comm.rank + step)))
            if step != 7:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(2, work, 0)
    assert expected[0][0] != expected[0][5]
    for prefetch in (1, 5):
        assert run(2, work, prefetch) == expected


def extra_gathers(comm, prefetch):
    """Gathers of the forward that goes another way, and of the next one, which goes that way again."""
    model = Zero3(Branching(), comm, prefetch=prefetch)
    fill, filled = model.fill, []
    model.fill = lambda unit: (filled.append(unit.name), fill(unit))
    counts = []
    for calls in (0, 0, 1, 1):  # blocks 3, 1 twice, then 2, 2, 0 twice
        model.module.calls = calls
        filled.clear()
        with torch.no_grad():
            model(torch.ones(1, 6))
        counts.append(len(filled))
    return counts


def test_a_wrong_guess_costs_no_more_than_was_gathered_ahead():
    right = [2, 2, 3, 3]
    assert run(2, extra_gathers, 0)[0] == right
    # The wrong one is found out when block 2 is used: then nothing more is guessed in that pass.
    assert run(2, extra_gathers, 1)[0] == run(2, extra_gathers, 2)[0] == right


def test_memory_is_not_taken_from_a_gather_that_is_under_way():
    def work(comm):
        model = Zero3(GPT(SMALL), comm)
        model(*batch(comm.rank, size=2)).backward()
        fill, release, log = model.fill, model.release, []

        def slow(unit):
            time.sleep(0.05)
            fill(unit)
            log.append(unit.name)

        def watched(unit):
            under_way = unit in model.ahead.gathering
            release(unit)
            assert not under_way or unit.name in log

        def fails(*_):
            raise ArithmeticError("here")

        model.fill, model.release = slow, watched
        model.module.blocks[0].attention.register_forward_hook(fails)
        with pytest.raises(ArithmeticError):
            model(*batch(comm.rank, size=2))
        return "blocks.1" in log, sum(unit.replica.untyped_storage().nbytes() for unit in model.units)

    assert run(2, work) == [(True, 0)] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_ends_the_others_and_the_lanes(where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            if where == "forward" and rank == 1:
                raise ArithmeticError("here")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.rank == 1:
                raise ArithmeticError("here")
            return gradient, None

    def work(comm):
        model = Zero3(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), comm, prefetch=2)
        for step in range(3):
            x = torch.ones(2, 8)
            for index, layer in enumerate(model.module):
                fails = index == step == 2
                layer.register_forward_hook(lambda _, __, out, f=fails: Fails.apply(out, comm.rank) if f else out)
            model(x).sum().backward()
            model.zero_grad()

    with pytest.raises(RankFailed) as failed:  # and no CommTimeout: nobody waits in vain
        World(3, device="cpu").run(work)
    assert failed.value.rank == 1 and isinstance(failed.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("prefetch", [-1, 1.5, "2"])
def test_what_is_no_number_of_units_is_refused(prefetch):
    with pytest.raises(RankFailed, match="prefetch: .* whole number of units"):
        run(1, lambda comm: Zero3(GPT(SMALL), comm, prefetch=prefetch))
