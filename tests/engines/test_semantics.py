"""What a PyTorch user may do with a wrapped model, and what is refused."""

import collections
import copy
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, GPT, RankFailed, World, Zero1, Zero2, Zero3
from tests.support.helpers import SMALL, STAGES, relative_error, run

SHARDED = (Zero1, Zero2, Zero3)


def fit(comm, stage, make, steps=4, forward=None, dtype=None, schedule=lambda optimizer: None, **options):
    """Train `make()` on random vectors, each rank on its part of a batch of 12; the full state."""
    model = stage(make(), comm, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    scheduler = schedule(optimizer)
    for step in range(steps):
        x = vectors(step).chunk(comm.size)[comm.rank]
        loss = forward(model, x, comm.rank) if forward else model(x).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return model.gather_state_dict()


def vectors(step):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step))


def fit_plain(make, steps=4, forward=None, parts=1, schedule=lambda optimizer: None):
    """The same on one process; with `parts`, the mean over that many ranks' losses."""
    module = make()
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0.0
    )
    scheduler = schedule(optimizer)
    for step in range(steps):
        for rank, x in enumerate(vectors(step).chunk(parts)):
            loss = forward(module, x, rank) if forward else module(x).square().mean()
            (loss / parts).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return module.state_dict()


def check(make, world_size=3, forward=None, parts=1, stages=STAGES, **options):
    """All stages agree with one process, and with each other bit for bit."""
    schedule = {name: options[name] for name in ("schedule",) if name in options}
    expected = fit_plain(make, forward=forward, parts=parts, **schedule)
    states = [run(world_size, fit, stage, make, forward=forward, **options)[-1] for stage in stages]
    for stage, state in zip(stages, states):
        assert state.keys() == expected.keys()
        assert relative_error(state, expected) < 1e-5, stage.__name__
        assert all(torch.equal(state[n], states[0][n]) for n in state), f"{stage.__name__}: not bit-identical"
    assert relative_error(expected, make().state_dict()) > 1e-4  # something was trained


def seeded(build):
    """A module that is the same at each call, whatever other ranks draw from torch's generator."""

    def make():
        module = build()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0, 0.4, generator=generator)
        return module

    return make


class Blocks(nn.Module):
    """Odd shapes in repeated blocks, and a root."""

    def __init__(self, change=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3))
        self.out = nn.Linear(7, 1)
        if change:
            change(self)

    def forward(self, x, order=(0, 1, 2)):
        for index in order:
            x = x + self.blocks[index](x)
        return self.out(x)


def test_odd_shapes_and_more_ranks_than_some_parameters():
    for world_size in (2, 3, 4, 6):
        check(seeded(Blocks), world_size)
    check(seeded(lambda: nn.Linear(7, 1, bias=False)), 12)  # 7 elements on 12 ranks


def test_tied_inside_a_unit_and_across_units():
    def tie(model):
        model.blocks[2][2].weight = model.blocks[0][2].weight  # across
        model.blocks[1][0].bias = model.blocks[1][2].bias = nn.Parameter(torch.zeros(1))  # inside

    def build():
        model = Blocks(tie)
        model.blocks[1][0].bias = nn.Parameter(torch.zeros(5))
        model.blocks[1][2].bias = nn.Parameter(torch.zeros(7))
        return model

    check(seeded(build))
    state = run(2, fit, Zero3, seeded(build))[0]
    assert torch.equal(state["blocks.0.2.weight"], state["blocks.2.2.weight"])


def test_frozen_parameters_do_not_move_and_are_not_the_optimizers():
    def freeze(model):
        model.blocks[0].requires_grad_(False)  # a whole unit, with nothing that trains before it
        model.blocks[2].requires_grad_(False)  # one that gradients have to pass
        model.blocks[1][0].weight.requires_grad_(False)  # part of one
        model.out.bias.requires_grad_(False)

    make = seeded(lambda: Blocks(freeze))
    check(make)
    state = run(2, fit, Zero3, make)[0]
    for name, parameter in make().named_parameters():
        assert torch.equal(state[name], parameter) != parameter.requires_grad

    def trained(comm, stage):
        return sum(p.numel() for p in stage(make(), comm).parameters())

    total = sum(p.numel() for p in make().parameters() if p.requires_grad)
    for stage in SHARDED:
        assert total <= sum(run(2, trained, stage)) <= total + 8


def test_unused_parameters_have_gradient_zero_in_every_stage():
    def forward(model, x, rank):
        return model(x, order=(0, 2)).square().mean()

    check(seeded(Blocks), forward=forward)

    def gradients(comm, stage):
        model = stage(seeded(Blocks)(), comm)
        model(vectors(0), order=(0, 2)).sum().backward()
        return [p.grad for p in model.parameters()]

    for stage in STAGES:
        for found in run(2, gradients, stage):
            assert all(g is not None for g in found) and any((g == 0).all() for g in found)


def test_a_branch_that_only_some_ranks_take():
    def forward(model, x, rank):
        return model(x, order=(0, 1) if rank % 2 else (0, 2)).square().mean()

    check(seeded(Blocks), forward=forward, parts=3, stages=(DDP, Zero1, Zero2))
    # Stage 3 gathers in forward, where all ranks have to come: an error that names the units, not a hang.
    with pytest.raises(RankFailed, match=r"blocks\.[12]"):
        run(3, fit, Zero3, seeded(Blocks), forward=forward)


def test_a_parameter_that_only_some_ranks_use():
    """All ranks use the unit, so stage 3 can gather it; gradients are None on some ranks."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(7, 7) for name in "abc"})

        def forward(self, x, name):
            return self.layers[name](x).tanh()

    class Chosen(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Either() for _ in range(3))

        def forward(self, x, names):
            for block, name in zip(self.blocks, names):
                x = x + block(x, name)
            return self.out(x)

    def forward(model, x, rank):
        return model(x, names=("aba", "aab", "bac")[rank]).square().mean()  # nobody takes c in the first, say

    check(seeded(Chosen), forward=forward, parts=3)


def test_batches_of_other_sizes_on_other_ranks():
    """The engine takes the mean of the ranks' losses, whatever each is a mean of; see accumulate for the other."""

    def forward(model, x, rank):
        return model(x[: 4 - rank]).square().mean()

    check(seeded(Blocks), forward=forward, parts=3)


def test_a_unit_used_twice_and_several_forwards_before_one_backward():
    def twice(model, x, rank):
        return model(x, order=(0, 1, 0, 2, 1)).square().mean()

    def several(model, x, rank):
        return model(x).square().mean() + model(x.flip(0), order=(2, 1)).mean() + model(-x).mean()

    check(seeded(Blocks), forward=twice)
    check(seeded(Blocks), forward=several)


def test_two_backwards_after_two_forwards():
    def both(model, x, rank):
        first, second = model(x).square().mean(), model(2 * x).mean()
        first.backward()
        return second

    check(seeded(Blocks), forward=both)


def test_forwards_without_backward_and_without_grad_change_nothing():
    def forward(model, x, rank):
        model(x)
        with torch.no_grad():
            expected = model(x)
        model.eval()
        assert torch.equal(model(x), expected)
        model.train()
        return model(x).square().mean()

    check(seeded(Blocks), forward=forward)


def test_a_backward_that_broke_off_does_not_spoil_the_next():
    def forward(model, x, rank):
        out = model(x)
        out.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        return model(x).square().mean()

    check(seeded(Blocks), forward=forward)


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_after_the_step_uses_the_new_parameters(stage):
    """Whoever writes the shards, and whatever ran between backward and the step."""

    def losses(comm, update):
        model = stage(seeded(Blocks)(), comm)
        fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        x = vectors(0)
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            model(x)
            if update == "fused":
                fused.step()
            else:
                with torch.no_grad():
                    for shard in model.parameters():
                        shard -= 0.1 * shard.grad
            fused.zero_grad()
        return loss.item()

    by_hand, fused = run(2, losses, "by hand")[0], run(2, losses, "fused")[0]
    module = seeded(Blocks)()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        loss = module(vectors(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert by_hand == pytest.approx(loss.item(), rel=1e-5) and fused == pytest.approx(loss.item(), rel=1e-5)


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    note: str


class Structured(Blocks):
    def forward(self, x, kind="dict"):
        out = super().forward(x["a"][0])
        loss = out.square().mean()
        return {"dict": {"loss": loss, "n": 3}, "tuple": (None, [loss]), "dataclass": Output(loss, "hi")}[kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
def test_structured_inputs_and_outputs(kind):
    def forward(model, x, rank):
        out = model({"a": (x, 1)}, kind=kind)
        return {"dict": lambda: out["loss"], "tuple": lambda: out[1][0], "dataclass": lambda: out.loss}[kind]()

    check(seeded(Structured), forward=forward)


def test_sixteen_bits_cast_floating_inputs_only():
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, index, scale=None):
            assert x.dtype == scale["s"].dtype == torch.bfloat16 and index.dtype == torch.int64
            return self.linear(x).float()

    def probe(comm, stage):
        model = stage(Probe(), comm, dtype=torch.bfloat16)
        out = model(torch.randn(2, 4), torch.arange(2), scale={"s": torch.ones(1)})
        out.sum().backward()
        return out.dtype, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}

    for stage in STAGES:
        assert run(2, probe, stage)[0] == (torch.float32, {torch.float32}, {torch.float32})


def test_buffers_stay_and_come_back_from_rank_zero():
    class Norm(Blocks):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(7)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            return super().forward(self.norm(x) * self.scale)

    states = [run(2, fit, stage, seeded(Norm)) for stage in STAGES]
    for ranks in states:
        assert "scale" not in ranks[0] and int(ranks[0]["norm.num_batches_tracked"]) == 4
        for name in ranks[0]:
            assert torch.equal(ranks[0][name], ranks[1][name]) and torch.equal(ranks[0][name], states[0][0][name])


def decay(name, parameter):
    return "matrices" if parameter.dim() == 2 else "vectors"


@pytest.mark.parametrize("stage", STAGES)
def test_group_by_never_mixes_values_in_a_shard(stage):
    make = seeded(Blocks)

    def grouped(comm):
        model = stage(make(), comm, group_by=decay)
        groups = model.parameter_groups()
        optimizer = torch.optim.SGD(
            [{"params": groups["matrices"], "weight_decay": 0.5}, {"params": groups.get("vectors", [])}], lr=0.1
        )
        count = {group: sum(p.numel() for p in shards) for group, shards in groups.items()}
        assert sum(count.values()) == sum(p.numel() for p in model.parameters())
        model(vectors(0).chunk(comm.size)[comm.rank]).square().mean().backward()
        optimizer.step()
        return model.gather_state_dict(), count

    module = make()
    named = dict(module.named_parameters())
    parts = [[p for n, p in named.items() if decay(n, p) == g] for g in ("matrices", "vectors")]
    optimizer = torch.optim.SGD([{"params": parts[0], "weight_decay": 0.5}, {"params": parts[1]}], lr=0.1)
    module(vectors(0)).square().mean().backward()
    optimizer.step()
    for world_size in (2, 3):
        ranks = run(world_size, grouped)
        assert relative_error(ranks[0][0], module.state_dict()) < 1e-5
        held = 1 if stage is DDP else world_size
        for group, part in zip(("matrices", "vectors"), parts):
            found = sum(rank[1].get(group, 0) for rank in ranks) * held // world_size
            assert sum(p.numel() for p in part) <= found <= sum(p.numel() for p in part) + 4 * world_size


def test_units_are_found_or_given():
    def names(comm, make, units=None):
        module = make()
        return [unit.name for unit in Zero3(module, comm, units=units and units(module)).units]

    assert run(1, names, Blocks)[0] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert run(1, names, lambda: GPT(SMALL))[0] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert run(1, names, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0] == ["0", "1"]
    assert run(1, names, lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))[0] == ["root"]
    given = run(1, names, Blocks, lambda m: [m.blocks[1], m.out, m.blocks[1][0]])[0]
    assert given == ["root", "blocks.1", "out", "blocks.1.0"]
    assert run(1, names, Blocks, lambda m: [])[0] == ["root"]
    check(seeded(Blocks), units=None)
    with pytest.raises(RankFailed, match="submodule"):
        run(1, names, Blocks, lambda m: [nn.Linear(2, 2)])


def test_recompute_inside_and_around_units():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Blocks):
        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    check(seeded(Recomputed))


def test_learning_rate_schedulers():
    lr_scheduler = torch.optim.lr_scheduler
    states = {}
    for schedule in (
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.1),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 2)],
            milestones=[2],
        ),
    ):
        check(seeded(Blocks), schedule=schedule)
        states[schedule] = fit_plain(seeded(Blocks), schedule=schedule)
    constant = fit_plain(seeded(Blocks))
    assert all(relative_error(state, constant) > 1e-3 for state in states.values())


# What is refused.


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

    def mixed():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    assert "no parameters that train" in wrap(nn.ReLU)
    assert "no parameters that train" in wrap(lambda: nn.Linear(2, 2).requires_grad_(False))
    assert "mixed devices (cpu, meta)" in wrap(mixed)
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
        assert weight.numel() == 0
        with pytest.raises(RuntimeError):
            F.linear(vectors(0), weight)
        return True

    assert all(run(2, use))


def test_ranks_with_different_models_are_told_so():
    def build(comm):
        Zero1(GPT(SMALL if comm.rank != 1 else dataclasses.replace(SMALL, width=64)), comm)

    with pytest.raises(RankFailed, match="did the ranks build different models"):
        run(3, build)


# Found by people who tried what they knew from elsewhere.


def test_clipping_where_ranks_do_not_divide_a_unit():
    def norm(comm, stage):
        model = stage(seeded(Blocks)(), comm)
        model(vectors(0)).sum().backward()
        return model.clip_grad_norm_(1e9).item()

    module = seeded(Blocks)()
    module(vectors(0)).sum().backward()
    expected = nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()
    for world_size in (3, 4, 7):
        norms = {clipped for stage in STAGES for clipped in run(world_size, norm, stage)}
        assert len(norms) == 1 and norms.pop() == pytest.approx(expected, rel=1e-5)


def wrapped(stage, make=None, world_size=2, **options):
    """Decorator: run a function of (model, comm) on ranks, and return what rank 0 returns."""

    def decorate(use):
        return run(world_size, lambda comm: use(stage((make or seeded(Blocks))(), comm, **options), comm))[0]

    return decorate


@pytest.mark.parametrize("stage", STAGES)
def test_the_inner_module_computes_with_the_new_parameters(stage):
    @wrapped(stage, dtype=torch.bfloat16)
    def outputs(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(vectors(0)).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            return model.module(vectors(0).bfloat16()), model(vectors(0))

    assert torch.equal(*outputs)


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
        with pytest.raises(RuntimeError, match="requires_grad changed in root"):
            model(vectors(0))
        with pytest.raises(RuntimeError, match="before wrapping"):
            model.requires_grad_(False)
        with pytest.raises(ValueError, match="norm_type"):
            model.clip_grad_norm_(1.0, 0)


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


class Gate(nn.Module):
    """Its parameter's gradient is complete before its backward has used the parameter for the last time."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return (x * self.gain.detach()).tanh() * self.gain


def test_units_are_kept_until_their_inputs_have_their_gradients():
    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList(Gate() for _ in range(3))
            self.into = nn.Linear(7, 7)

        def forward(self, x):
            x = self.into(x)
            for gate in (*self.gates, self.gates[2], self.gates[0], self.gates[0]):
                x = gate(x)
            return 30 * x

    def freeze():
        module = Gates()
        module.gates[0].requires_grad_(False)
        return module

    check(seeded(Gates))
    check(seeded(freeze))


def test_a_forward_that_raises_leaves_nothing_gathered():
    def forward(model, x, rank):
        with pytest.raises(TypeError):
            model(x, order=(0, "no such block"))
        if isinstance(model, Zero3):
            assert all(p.numel() == 0 for p in model.module.parameters())
        return model(x).square().mean()

    for stage in STAGES:
        run(2, fit, stage, seeded(Blocks), forward=forward)


def test_shared_buffers_have_all_their_names():
    class Shared(Blocks):
        def __init__(self):
            super().__init__()
            table = torch.arange(3.0)
            for block in self.blocks:
                block.register_buffer("table", table)

    @wrapped(Zero2, seeded(Shared))
    def names(model, comm):
        state = model.gather_state_dict()
        model.load_full_state_dict(state)
        return state.keys()

    assert names == Shared().state_dict().keys()


def test_every_rank_knows_every_group():
    groups = run(6, lambda comm: list(Zero1(seeded(Blocks)(), comm, group_by=decay).parameter_groups()))
    assert all(found == ["matrices", "vectors"] or found == ["vectors", "matrices"] for found in groups)


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


def test_two_backwards_through_one_graph():
    def forward(model, x, rank):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss

    check(seeded(Blocks), forward=forward)
    check(seeded(lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))), forward=forward)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_move_to_where_it_is_changes_nothing(stage, dtype):
    class Convolution(Blocks):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(2, 2, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    @wrapped(stage, seeded(Convolution), dtype=dtype)
    def _(model, comm):
        here = dtype or torch.float32
        for same in (model, nn.Sequential(model)):
            for moved in (same.to("cpu"), same.cpu(), same.to(here), same.to(torch.empty(0, dtype=here))):
                assert moved is same
        for moved in (lambda: model.to("meta"), model.double, lambda: model.to_empty(device="cpu"), model.share_memory):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: (move or cast|cannot be shared)"):
                moved()
        with pytest.raises(RuntimeError, match="move or cast"):
            model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("stage", STAGES)
def test_a_tool_may_move_both_to_where_they_are(stage):
    def forward(model, x, rank):
        model.to("cpu").module.to("cpu").float()
        loss = model(x).square().mean()
        model.cpu().module.cpu()
        return loss

    def forward_plain(model, x, rank):
        return model(x).square().mean()

    moved, left = (run(2, fit, stage, seeded(Blocks), forward=f)[0] for f in (forward, forward_plain))
    assert all(torch.equal(moved[name], value) for name, value in left.items())


@pytest.mark.parametrize("stage", STAGES)
def test_initialising_after_wrapping_is_refused(stage):
    @wrapped(stage)
    def _(model, comm):
        for outer in (model, nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: initialise the module before wrapping"):
                outer.apply(lambda module: None)


@pytest.mark.parametrize("stage", STAGES)
def test_one_name_of_a_tied_parameter_or_shared_buffer_suffices(stage):
    class Tied(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks[2][2].weight = self.blocks[0][2].weight
            table = torch.zeros(3)
            for block in self.blocks:
                block.register_buffer("table", table)

    @wrapped(stage, seeded(Tied))
    def _(model, comm):
        full = model.gather_state_dict()
        for value, gone in ((1.0, 0), (2.0, 2)):
            removed = (f"blocks.{gone}.2.weight", f"blocks.{gone}.table", "blocks.1.table")
            state = {name: torch.full_like(t, value) for name, t in full.items() if name not in removed}
            names = list(state)
            model.load_full_state_dict(state)
            assert list(state) == names and all((t == value).all() for t in model.gather_state_dict().values())
        got = model.gather_state_dict()
        with pytest.raises(ValueError, match="blocks.0.2.weight, blocks.2.2.weight are one tensor: give one value"):
            model.load_full_state_dict(got | {"blocks.2.2.weight": got["blocks.0.2.weight"] + 1})
        diverged = {name: torch.full_like(value, torch.nan) for name, value in got.items()}
        model.load_full_state_dict(diverged)


@pytest.mark.parametrize("stage", SHARDED)
def test_a_state_dict_of_a_part_is_refused(stage):
    @wrapped(stage)
    def _(model, comm):
        for module in (model, model.module, model.module.blocks[0], nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: each rank holds a part: call gather_state_dict"):
                module.state_dict()
        state = seeded(Blocks)().state_dict()
        for module, given in ((model, {}), (model.module, state), (model.module.out, {}), (nn.Sequential(model), {})):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: call load_full_state_dict"):
                module.load_state_dict(given)


class Named(Blocks):
    """A tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks[2][2].weight = self.blocks[0][2].weight
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_ddps_state_dict_is_pytorchs(dtype):
    @wrapped(DDP, seeded(Named), dtype=dtype)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(vectors(comm.rank)).square().mean().backward()
        optimizer.step()  # from here to the next forward, 16-bit replicas are old
        full = model.gather_state_dict()

        def same(state, prefix):
            names = [name for name in full if name.startswith(prefix)]
            assert [*state] == [name.removeprefix(prefix) for name in names]
            for name, value in zip(names, state.values(), strict=True):
                assert value.dtype == full[name].dtype == torch.float32 and torch.equal(value, full[name]), name

        same({name.removeprefix("module."): value for name, value in model.state_dict().items()}, "")
        assert [*model.state_dict()] == [f"module.{name}" for name in full]
        same(model.module.state_dict(), "")
        same(model.module.blocks[0].state_dict(), "blocks.0.")
        if dtype is None:
            assert model.module.state_dict(keep_vars=True)["out.bias"] is model.module.out.bias

        # Values that 16 bits cannot hold: what is loaded must arrive in the masters, and in the next forward.
        target = {name: value + 2.0**-20 for name, value in seeded(Named)().state_dict().items()}
        for load in (
            lambda: model.load_state_dict({f"module.{name}": value for name, value in target.items()}),
            lambda: model.module.load_state_dict(target),
            lambda: nn.Sequential(model).load_state_dict({f"0.module.{n}": value for n, value in target.items()}),
        ):
            model.load_full_state_dict({name: torch.zeros_like(value) for name, value in full.items()})
            assert str(load()) == "<All keys matched successfully>"
            got = model.gather_state_dict()
            assert all(torch.equal(got[name], value) for name, value in target.items())
            expected = seeded(Named)()
            expected.load_state_dict(target)
            expected.to(dtype)
            assert torch.equal(model(vectors(0)), expected(vectors(0).to(dtype)))

        model.module.out.load_state_dict({"weight": torch.ones(1, 7), "bias": torch.ones(1)})
        assert model.gather_state_dict()["out.weight"].sum() == 7
        missing, unexpected = model.module.load_state_dict(
            {"out.bias": torch.zeros(1), "x": torch.zeros(1)}, strict=False
        )
        assert "out.weight" in missing and unexpected == ["x"] and model.gather_state_dict()["out.bias"] == 0
        for wrong, message in (
            ({}, "Missing key"),
            (target | {"out.bias": torch.zeros(2)}, "size mismatch for out.bias"),
        ):
            with pytest.raises(RuntimeError, match=message):
                model.module.load_state_dict(wrong)
        for module, prefix in ((model, "module."), (model.module, "")):
            with pytest.raises(ValueError, match="assign=True would replace"):
                module.load_state_dict({prefix + name: value for name, value in target.items()}, assign=True)


class Gain(nn.Module):
    """A unit that hands out what it makes in one of several ways; `fixed` is a frozen unit of its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.lin = way, nn.Linear(8, 8)
        self.fixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        y = self.lin(x).tanh()
        side = ((y @ self.fixed).sin() * self.lin.bias).square().mean()
        if self.way == "view":
            return (y * self.lin.bias.view(1, 8)).view(-1, 8)
        if self.way == "attribute":
            self.side = side
        if self.way == "list":
            self.side = [(side,)]
        if self.way == "namespace":
            return types.SimpleNamespace(y=y, side=side)
        return collections.UserDict(y=y, side=side) if self.way == "mapping" else y


class Handed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.blocks = way, nn.Linear(7, 8), nn.ModuleList(Gain(way) for _ in range(3))

    def forward(self, x):
        x, loss = self.first(x), 0.0
        for block in self.blocks:
            before, x = x, block(x)
            if self.way == "view":
                x += before
            elif self.way in ("attribute", "list"):
                loss = loss + (block.side if self.way == "attribute" else block.side[0][0])
            else:
                x, loss = (x.y, loss + x.side) if self.way == "namespace" else (x["y"], loss + x["side"])
        return x.square().mean() + loss


@pytest.mark.parametrize("way", ["view", "attribute", "list", "namespace", "mapping"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_whatever_leaves_a_unit_gathers_it_in_backward(way, prefetch):
    stages = [DDP, functools.partial(Zero3, prefetch=prefetch)]
    expected, found = (run(2, fit, stage, seeded(functools.partial(Handed, way)))[0] for stage in stages)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_leaves_a_unit_unseen_is_an_error_with_its_name():
    class Secretive(nn.Linear):
        def forward(self, x):
            side = (x + self.bias).sum()
            self.get = lambda: side
            return super().forward(x)

    def work(comm):
        model = Zero3(nn.Sequential(Secretive(8, 8), Secretive(8, 8)), comm)
        model(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="Zero3: backward reached 1 while it was not gathered: .*: return it"):
            model.module[1].get().backward()

    run(2, work)
