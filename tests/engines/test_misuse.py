"""A use that would train something else, or something wrong, is an error that says what to do."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from minizero import DDP, GPT, RankFailed, World, Zero1, Zero2, Zero3, barrier
from tests.support.helpers import SMALL, STAGES, relative_error, run
from tests.support.small_models import SHARDED, Blocks, fit, seeded, vectors, wrapped


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_built_before_wrapping_is_told_at_its_first_step(stage):
    def early(comm):
        module = seeded(Blocks)()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = stage(module, comm)
        model(vectors(0)).square().mean().backward()
        optimizer.step()
        return model.gather_state_dict()

    if stage is DDP:
        module = seeded(Blocks)()
        assert relative_error(run(2, early)[0], module.state_dict()) > 1e-4
    else:
        with pytest.raises(RankFailed, match=r"before the model was wrapped.*parameters\(\)"):
            run(2, early)


def test_optimizers_that_need_whole_tensors_are_refused_where_there_are_none():
    def step(comm, stage):
        model = stage(seeded(Blocks)(), comm)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(vectors(0)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    assert run(2, step, DDP)[0] > 0
    with pytest.raises(RankFailed, match="LBFGS.*whole tensors"):
        run(2, step, Zero2)


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_cannot_be_wrapped(stage):
    def wrap(make, **options):
        with pytest.raises(RankFailed) as failure:
            run(1, lambda comm: stage(make(), comm, **options))
        assert isinstance(failure.value.__cause__, ValueError)
        return str(failure.value.__cause__)

    def with_parameter(**options):
        module = nn.Linear(2, 2)
        module.register_parameter("more", nn.Parameter(torch.ones(2, **options), requires_grad=False))
        return module

    def with_buffer():
        module = nn.Linear(2, 2)
        module.register_buffer("row", module.weight.detach()[0])
        return module

    def with_hook():
        module = nn.Linear(2, 2)
        module.weight.register_post_accumulate_grad_hook(print)
        return module

    assert "no parameters that train" in wrap(nn.ReLU)
    assert "no parameters that train" in wrap(lambda: nn.Linear(2, 2).requires_grad_(False))
    assert "more is on the meta device" in wrap(lambda: with_parameter(device="meta"))
    assert "0.weight is lazy, and has no shape yet" in wrap(lambda: nn.Sequential(nn.LazyLinear(2)))
    assert "more is torch.complex64: keep real" in wrap(lambda: with_parameter(dtype=torch.complex64))
    assert "more is torch.int64: make it a buffer" in wrap(lambda: with_parameter(dtype=torch.int64))
    assert "row lies in the memory of weight" in wrap(with_buffer)
    assert "a hook of register_post_accumulate_grad_hook on weight" in wrap(with_hook)
    assert "float32, weight is torch.float64" in wrap(lambda: nn.Linear(2, 2).double())
    assert "dtype must be" in wrap(lambda: nn.Linear(2, 2), dtype=torch.float64)
    assert "wrapped in" in wrap(lambda: World(1, "cpu").run(lambda comm: stage(nn.Linear(2, 2), comm))[0].module)


@pytest.mark.parametrize("stage", STAGES)
def test_what_would_be_silently_wrong_is_refused(stage):
    def use(comm):
        model = stage(seeded(Blocks)(), comm)
        for wrong in (model.half, lambda: copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match=stage.__name__):
                wrong()
        for whole in (model, model.module, model.module.out, list(model.parameters())):
            with pytest.raises(RuntimeError, match="gather_state_dict"):
                pickle.dumps(whole)
        state = model.gather_state_dict()
        for change, message in (
            (lambda s: s.pop("out.bias"), "missing or unknown: out.bias"),
            (lambda s: s.update(extra=torch.zeros(1)), "missing or unknown: extra"),
            (lambda s: s.update({"out.bias": torch.zeros(2)}), r"out.bias \(2,\), here \(1,\)"),
        ):
            bad = dict(state)
            change(bad)
            with pytest.raises(ValueError, match=message):
                model.load_full_state_dict(bad)
        return True

    assert all(run(2, use))


def test_a_released_unit_cannot_be_used_by_accident():
    def use(comm):
        model = Zero3(seeded(Blocks)(), comm)
        weight = model.module.blocks[0][0].weight
        assert weight.untyped_storage().nbytes() == 0 and "Parameter" in repr(weight) and weight.numel() == 35
        uses = [
            lambda: F.linear(vectors(0), weight),
            lambda: torch.zeros(8, 8).lerp_(weight, 0.5),
            lambda: copy.deepcopy(model.module.blocks),
            lambda: nn.init.ones_(weight),
            lambda: weight.data,
            lambda: weight.T,
            lambda: weight.double(),
            lambda: setattr(weight, "data", torch.ones(8, 8)),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"Zero3: blocks\.0\.0\.weight, of the unit blocks\.0, is empty"):
                use()
        return True

    assert all(run(2, use))


def test_ranks_with_different_models_are_told_so():
    def build(comm):
        Zero1(GPT(SMALL if comm.rank != 1 else dataclasses.replace(SMALL, width=64)), comm)

    with pytest.raises(RankFailed, match="did the ranks build different models"):
        run(3, build)


@pytest.mark.parametrize("stage", SHARDED)
def test_uses_that_would_train_something_else_are_refused(stage):
    @wrapped(stage)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        first, second = model(vectors(0)).sum(), model(vectors(1)).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between its forward and its backward"):
            second.backward()
        optimizer.zero_grad()
        with model.no_sync():
            model(vectors(0)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="set_to_none=True"):
            model(vectors(0)).sum().backward()
        model.module.out.bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad changed in root: .* or use no_grad"):
            model(vectors(0))
        with pytest.raises(RuntimeError, match="before wrapping"):
            model.requires_grad_(False)
        with pytest.raises(ValueError, match="norm_type"):
            model.clip_grad_norm_(1.0, 0)
        with pytest.raises(RuntimeError, match="model.no_sync"):
            model.require_backward_grad_sync = False


@pytest.mark.parametrize("stage", SHARDED)
def test_what_does_not_reach_the_shards_is_refused(stage):
    saved = []

    @wrapped(stage)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()  # some loops begin so, and it does nothing
        model(vectors(0)).sum().backward(inputs=list(model.parameters()))
        with pytest.raises(RuntimeError, match=f"{stage.__name__}: a step without a backward. Had it inputs=?"):
            optimizer.step()
        model(vectors(0)).sum().backward()
        optimizer.step()
        for drop in (
            model.module.zero_grad,
            lambda: model.module.out.zero_grad(set_to_none=False),
            nn.Sequential(model).zero_grad,
            lambda: setattr(model.module.out.bias, "grad", None),
        ):
            with pytest.raises(RuntimeError, match=rf"{stage.__name__}: \S+ has no .grad, the shards have: .* itself"):
                drop()
        saved.extend([optimizer.state_dict()] if comm.rank == 0 else [])
        barrier(comm)
        optimizer.load_state_dict(saved[0])
        if comm.rank == 0:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"of rank 0 of 2, its shards are of rank 1 of 2: .*checkpoint"):
                optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_another_rank_is_refused(stage):
    module = seeded(Blocks)()
    with pytest.raises(RankFailed, match=rf"{stage.__name__}: 0.0.0.weight is another rank's: .*deepcopy"):
        run(2, lambda comm: stage(nn.Sequential(module.blocks), comm))


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_that_does_not_go_with_16_bits_is_named(stage):
    def buffered():
        return Blocks(lambda module: module.blocks[1].register_buffer("shift", torch.ones(7)))

    @wrapped(stage, buffered, dtype=torch.bfloat16)
    def _(model, comm):
        model.module.blocks[1].register_forward_pre_hook(lambda block, given: given[0] + block.shift)
        with pytest.raises(RuntimeError, match=rf"{stage.__name__}: .*same dtype.*torch.float32: cast blocks.1.shift"):
            model(vectors(0))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, weight):
        return weight * self.by


CHANGES = {
    "out.weight": lambda net: setattr(net.out, "weight", nn.Parameter(torch.ones(1, 7))),
    "out.parametrizations.weight.0.by": lambda net: parametrize.register_parametrization(net.out, "weight", Scale()),
    "blocks.3.weight": lambda net: net.blocks.append(nn.Linear(7, 7)),
    "out.bias": lambda net: setattr(net.out, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_was_changed_after_wrapping_is_named(stage, name):
    @wrapped(stage)
    def _(model, comm):
        with pytest.raises(RuntimeError, match=rf"{stage.__name__}: .*({name}.* after wrapping|out.weight.* is empty)"):
            CHANGES[name](model.module)
            model(vectors(0))


@pytest.mark.parametrize("stage", STAGES)
def test_what_no_sync_holds_back_is_neither_stepped_nor_clipped(stage):
    @wrapped(stage)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(vectors(0)).sum().backward()
        with model.no_sync():
            model(vectors(0)).sum().backward()
        for use in (optimizer.step, lambda: model.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match=rf"{stage.__name__}: no_sync\(\) holds the gradients back"):
                use()
        model(vectors(0)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()


@pytest.mark.parametrize("stage", SHARDED)
def test_old_replicas_are_not_read_between_a_step_and_the_next_forward(stage):
    @wrapped(stage)
    def _(model, comm):
        average = AveragedModel(seeded(Blocks)())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(vectors(0)).sum().backward()
        optimizer.step()
        for read in (copy.deepcopy, average.update_parameters, lambda module: module.out(vectors(0))):
            with pytest.raises(RuntimeError, match=rf"{stage.__name__}: .*is empty.*gather_state_dict"):
                read(model.module)
        model(vectors(0))


@pytest.mark.parametrize("stage", STAGES)
def test_shards_are_neither_moved_nor_frozen(stage):
    def move(shard):
        shard.data = shard.data.clone()  # as a moving average is swapped in

    for change, words in ((move, "no longer lies in its unit's memory"), (freeze, "requires_grad changed")):

        @wrapped(stage)
        def _(model, comm, change=change, words=words):
            change(next(model.parameters()))
            with pytest.raises(RuntimeError, match=words):
                model(vectors(0))


def freeze(shard):
    shard.requires_grad_(False)


@pytest.mark.parametrize("stage", SHARDED)
def test_what_was_loaded_is_not_read_from_old_replicas(stage):
    @wrapped(stage)
    def _(model, comm):
        model.load_full_state_dict({name: value + 1 for name, value in model.gather_state_dict().items()})
        with pytest.raises(RuntimeError, match="is empty"):
            copy.deepcopy(model.module)


def test_hooks_that_would_see_a_part_of_the_gradient_are_refused():
    for stage in STAGES:

        @wrapped(stage)
        def _(model, comm):
            model.module.out.bias.register_post_accumulate_grad_hook(print)
            with pytest.raises(ValueError, match="hook on out.bias would see this rank's gradient"):
                model(vectors(0))

    @wrapped(Zero2)
    def _(model, comm):
        shards = list(model.parameters())
        shards[0].register_hook(lambda gradient: 2 * gradient)
        loss = model(vectors(0)).sum() + shards[0].square().sum()
        with pytest.raises(RuntimeError, match="a hook on a shard, and a loss that uses the shard"):
            loss.backward()


def test_double_backward_is_refused_where_parameters_come_and_go():
    def penalty(model):
        x = vectors(0).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    def norm(model, comm):
        penalty(model)
        return model.clip_grad_norm_(1e9).item()

    def backward(model, comm):
        model(vectors(0)).square().sum().backward(create_graph=True)

    module = seeded(Blocks)()
    penalty(module)
    expected = nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()
    for stage in (DDP, Zero1, Zero2):
        assert wrapped(stage)(norm) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(RankFailed, match="an average over ranks.* use torch.autograd.grad"):
            wrapped(stage)(backward)
    for use in (norm, backward):
        with pytest.raises(RankFailed, match="double backward.* use DDP, Zero1 or Zero2"):
            wrapped(Zero3)(use)


def test_reentrant_recompute_of_a_shared_unit_is_refused():
    from torch.utils.checkpoint import checkpoint

    class Reentrant(Blocks):
        def forward(self, x):
            x = self.out(x) + x
            for _ in range(2):
                x = checkpoint(self.blocks[2], x, use_reentrant=True)
            return 30 * x

    with pytest.raises(RankFailed, match="use_reentrant=False"):
        run(2, fit, Zero1, seeded(Reentrant))


@pytest.mark.parametrize("stage", STAGES)
def test_initialising_after_wrapping_is_refused(stage):
    @wrapped(stage)
    def _(model, comm):
        for outer in (model, nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: initialise the module before wrapping"):
                outer.apply(lambda module: None)
