"""Any order of forwards and backwards trains as on one process, and any optimizer, group and scheduler."""

import contextlib

import pytest
import torch

from minizero import DDP, GPT, Zero1, Zero2, Zero3
from minizero.memory import Ledger
from tests.support.helpers import SMALL, STAGES, batch, relative_error, run, slow
from tests.support.small_models import (
    ENGINES,
    SHARDED,
    Blocks,
    check,
    decay,
    fit,
    fit_plain,
    refuses,
    seeded,
    vectors,
    wrapped,
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_broke_off_after_no_sync_leaves_the_average_of_before(stage):
    @wrapped(stage)
    def use(model, comm):
        x = vectors(0).chunk(comm.size)[comm.rank]
        model(x).square().mean().backward()
        average = [p.grad.clone() for p in model.parameters()]
        with model.no_sync():
            model(2 * x).square().mean().backward()
        out = model(x)
        model.module.out.weight.register_hook(lambda _: 1 / 0)  # the root's: every block has yet to come
        with pytest.raises(ZeroDivisionError):
            out.square().mean().backward()
        assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), average, strict=True))
        return True


@pytest.mark.parametrize("options", [{}, *slow({"dtype": torch.bfloat16}, {"group_by": decay})], ids="-".join)
@pytest.mark.parametrize("penalty_first", [False, True])
def test_a_penalty_over_the_parameters_in_each_backward(options, penalty_first):
    """Before or after the forward, and in a backward that no_sync holds back."""

    def loop(hold):
        def loss(model, x):
            terms = [lambda: model(x).square().mean(), lambda: 0.05 * sum(p.square().sum() for p in model.parameters())]
            one, other = terms[::-1] if penalty_first else terms
            return one() + other()

        def forward(model, x, rank):
            for _ in range(2):
                with model.no_sync() if hold else contextlib.nullcontext():
                    loss(model, x).backward()
            return loss(model, x)

        return forward

    expected = run(2, fit, DDP, seeded(Blocks), forward=loop(hold=False), **options)[0]
    for hold in (False,) if "dtype" in options else (False, True):  # in 16 bits it is rounded less often
        for stage, more in (*ENGINES.values(),)[:5] + ((Zero3, {"offload": True}),):
            found = run(2, fit, stage, seeded(Blocks), forward=loop(hold), **options, **more)[0]
            assert relative_error(found, expected) < 1e-5, (stage, more)


@pytest.mark.parametrize("stage", [Zero3, *slow(Zero1, Zero2)])
def test_an_optimizer_in_backward_steps_once_with_the_average_and_frees_it(stage):
    def trained(comm, in_backward):
        model = stage(GPT(SMALL), comm)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
        steps = []

        def step(shard):
            steps.append(shard)
            optimizers[shard].step()
            optimizers[shard].zero_grad()

        for shard in optimizers if in_backward else ():
            shard.register_post_accumulate_grad_hook(step)
        for number in range(2):
            x, y = (part.chunk(comm.size)[comm.rank] for part in batch(number))
            with Ledger(model) as ledger:
                model(x, y).backward()
            assert len(steps) == (number + 1) * len(optimizers) * in_backward
            for shard in () if in_backward else optimizers:
                step(shard)
            steps = steps if in_backward else []
        return model.gather_state_dict(), ledger.peak["gradients"]

    (expected, all_at_once), (state, one_by_one) = (run(2, trained, in_backward)[0] for in_backward in (False, True))
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert one_by_one < 0.7 * all_at_once


@pytest.mark.parametrize("stage", SHARDED)
def test_a_hook_on_a_shard_changes_its_average(stage):
    @wrapped(stage)
    def _(model, comm):
        model(vectors(comm.rank)).square().mean().backward()
        averages = [p.grad.clone() for p in model.parameters()]
        for shard in model.parameters():
            shard.register_hook(lambda average: average.clamp(-0.01, 0.01))
        model(vectors(comm.rank)).square().mean().backward()
        for shard, average in zip(model.parameters(), averages, strict=True):
            assert torch.equal(shard.grad, average.clamp(-0.01, 0.01) + average)


# Steps.


@pytest.mark.parametrize("stage", STAGES)
def test_group_by_never_mixes_values_in_a_shard(stage):
    def step(model, x, matrices, vectors):
        optimizer = torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": vectors}], lr=0.1)
        model(x).square().mean().backward()
        optimizer.step()

    def grouped(comm):
        model = stage(seeded(Blocks)(), comm, group_by=decay)
        groups = model.parameter_groups()  # every rank has each
        step(model, vectors(0).chunk(comm.size)[comm.rank], **groups)
        assert {*model.parameters()} == {shard for shards in groups.values() for shard in shards}
        return model.gather_state_dict(), {group: sum(p.numel() for p in shards) for group, shards in groups.items()}

    module = seeded(Blocks)()
    parts = {"matrices": [], "vectors": []}
    for name, parameter in module.named_parameters():
        parts[decay(name, parameter)].append(parameter)
    step(module, vectors(0), **parts)
    for world_size in (2, 3, 6):
        ranks = run(world_size, grouped)
        assert relative_error(ranks[0][0], module.state_dict()) < 1e-5
        for group, part in parts.items():
            found = sum(rank[1][group] for rank in ranks) // (world_size if stage is DDP else 1)
            assert 0 <= found - sum(p.numel() for p in part) <= 4 * world_size


def test_learning_rate_schedulers():
    def schedule(optimizer):
        """One that is made of others."""
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[1])

    check(seeded(Blocks), schedule=schedule)
    constant = fit_plain(seeded(Blocks))
    assert relative_error(fit_plain(seeded(Blocks), schedule=schedule), constant) > 1e-3


@refuses("was written to between backwards", [Zero1])
def test_a_write_to_what_no_sync_shows_is_told_if_a_penalty_comes_first(model, comm):
    with model.no_sync():
        model(vectors(0)).sum().backward()
        next(model.parameters()).grad.mul_(2)
        sum(p.square().sum() for p in model.parameters()).backward()
