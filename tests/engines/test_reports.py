"""What others' loops and models do, as their bug reports tell: as in the plain module, or refused by name."""

import contextlib
import copy
import gc
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, RankFailed, Zero1, Zero2, Zero3, all_reduce, barrier, checkpoint
from minizero.engines.any_model.units import repeated_blocks
from minizero.recompute import checkpoint as recompute
from tests.support.helpers import STAGES, relative_error, run
from tests.support.small_models import SHARDED, Blocks, seeded, vectors


def both(stage, loop, make=Blocks, world_size=2, momentum=0.9, **options):
    """Train by `loop(model, x, optimizer, step)` on ranks, and on one process with all ranks' data: how far apart?"""
    make = seeded(make)

    def steps(model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        for step in range(4):
            loop(model, x(step), optimizer, step)

    def job(comm):
        model = stage(make(), comm, **options)
        steps(model, lambda step: vectors(step).chunk(comm.size)[comm.rank])
        return model.gather_state_dict()

    plain = make()
    steps(plain, vectors)
    return max(relative_error(state, plain.state_dict()) for state in run(world_size, job))


def error_of(call):
    with pytest.raises(RankFailed) as failure:
        call()
    return str(failure.value.__cause__)


def end(optimizer):
    optimizer.step()
    optimizer.zero_grad()


# torch.autograd.grad of what is no parameter.


def now_and_then(gradient):
    """A loop in which every second step has no backward: .grad is None, and nothing moves."""

    def loop(model, x, optimizer, step):
        gradient(model, x.clone().requires_grad_())
        if step % 2 == 0:
            model(x).square().mean().backward()
        end(optimizer)

    return loop


def of_an_input(model, x):
    assert torch.autograd.grad(model(x).square().mean(), x)[0].any()


def of_a_hidden_tensor(model, x):
    hidden = x * 2
    torch.autograd.grad(model(hidden).sum(), [hidden, x], retain_graph=True)


def of_an_input_twice_and_by_backward(model, x):
    loss = model(x).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x])


def of_a_second_order(model, x):
    if not isinstance(model, Zero3):  # which refuses it
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        torch.autograd.grad(slope.square().sum(), x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "gradient", [of_an_input, of_a_hidden_tensor, of_an_input_twice_and_by_backward, of_a_second_order]
)
def test_a_gradient_of_an_input_is_no_backward(gradient, stage):
    assert both(stage, now_and_then(gradient)) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_output_reaches_no_parameter_goes_on_with_the_others(stage):
    def job(comm):
        model = stage(Gate(), comm)
        for step in range(2):
            model(vectors(step).requires_grad_(), use=comm.rank == step).sum().backward()
        return [p.grad.any() for p in model.parameters() if p.numel()]

    assert all(all(found) for found in run(2, job))


class Gate(nn.Linear):
    def __init__(self):
        super().__init__(7, 7)

    def forward(self, x, use):
        return super().forward(x) if use else 2 * x


# Buffers that forward writes.


class Writes(nn.Module):
    """Buffers of several kinds, of which forward writes what its data say."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("queue", torch.zeros(5, 7)[:, ::2])
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("longest", torch.zeros(1))

    def forward(self, x):
        x = self.norm(self.layer(x))
        if self.training:
            self.queue[0] = x.detach()[0, ::2]
            self.seen[int(x.detach().sum().abs()) % 3] = True
            if self.kind == "grows":
                self.longest = torch.zeros(2 + (x[0, 0] > x[1, 1]))  # of another length on another rank
        return x + self.queue.mean() + self.seen.sum()


def held_back(model, x):
    with model.no_sync():
        model(x).square().mean().backward()
    return model(x).square().mean()


WAYS = {
    "plain": lambda model, x: model(x).square().mean(),
    "grows": lambda model, x: model(x).square().mean(),
    "no_sync": held_back,
    "recompute": lambda model, x: recompute(model, x).square().mean(),
}


@pytest.mark.parametrize("stage, way", [*((stage, "plain") for stage in STAGES), *((Zero2, w) for w in WAYS)])
def test_buffers_are_rank_0s_after_a_backward(stage, way, keep=True):
    def job(comm):
        model = stage(seeded(lambda: Writes(way))(), comm, broadcast_buffers=keep)
        for step in range(2):
            WAYS[way](model, vectors(step).chunk(comm.size)[comm.rank]).backward()
            if comm.rank == 0 and stage is DDP:  # alone
                model.eval()(vectors(0))
                model.train()
        return {name: b.clone() for name, b in model.module.named_buffers() if name != "longest" or way != "grows"}

    ranks = run(3, job)
    same = [all(torch.equal(ranks[0][name], rank[name]) for name in ranks[0]) for rank in ranks[1:]]
    assert all(same) if keep else not any(same)


def test_buffers_are_each_ranks_own_if_asked_and_their_bytes_are_those_of_the_docstring():
    test_buffers_are_rank_0s_after_a_backward(DDP, "plain", keep=False)

    def sent(comm, keep):
        model = DDP(Writes("plain"), comm, broadcast_buffers=keep)
        loss, before = model(vectors(0)).sum(), comm.bytes_sent
        loss.backward()
        return comm.bytes_sent - before

    with_them, without = (sum(run(4, sent, keep)) for keep in (True, False))
    buffers = [*Writes("plain").buffers()]
    assert with_them - without == 3 * (sum(b.numel() * b.itemsize for b in buffers) + len(buffers))


# Norms of shards, and their shapes.


def squares(model, gradients):
    """The sum of all squares; of shards by hand."""
    own = sum(g.norm() ** 2 for g in gradients)
    return all_reduce(own, model.comm) if isinstance(model, SHARDED) else own


def by_a_norm_summed_over_ranks(gradients, model, parameters):
    scale = (0.1 / squares(model, gradients).sqrt()).clamp(max=1)
    torch._foreach_mul_(gradients, scale)


def printed(gradients, model, parameters):
    assert all(f"{g.norm():.3f}" and "tensor(" in repr(g.norm()) and g.norm().item() >= 0 for g in gradients)
    nn.utils.clip_grad_value_(parameters, 0.01)
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p.add_(g, alpha=-0.1)


def averaged(gradients, model, parameters):
    copies = [copy.deepcopy(p) for p in parameters], [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, one, other in zip(parameters, *copies, strict=True):
            p.copy_(one.lerp_(p * 1.5, 0.5) - other.mul_(0.25))


def by_each_norm(gradients, model, parameters):
    for p, g in zip(parameters, gradients, strict=True):
        g.data.mul_(0.01 * torch.linalg.vector_norm(p.detach()) / g.data.norm(2))


def by_a_norm_by_hand(gradients, model, parameters):
    total = torch.cat([(1.0 * g).flatten() for g in gradients]).pow(2).sum().sqrt()
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g * (0.1 / total)


def along_the_gradient_by_a_number(gradients, model, parameters):
    length = float(0.05 / nn.utils.get_total_norm(gradients))
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=length)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", [by_a_norm_summed_over_ranks, printed, averaged])
def test_a_norm_of_shards_that_is_summed_or_printed_stays(change, stage):
    assert both(stage, changing(change), momentum=0) < 1e-5


def test_a_norm_that_torch_distributed_sums_stays(tmp_path):
    """And operations by keyword alone are asked about, too. The group has one process, whose ranks are threads."""

    def work(comm):
        model = Zero2(seeded(Blocks)(), comm)
        model(vectors(0)).square().mean().backward()
        square = sum(torch.linalg.vector_norm(x=p.grad, ord=2) ** 2 for p in model.parameters())
        torch.distributed.all_reduce(tensor=square)
        for p in model.parameters():
            p.grad.mul_(0.1 / square.sqrt())
        return sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()

    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        assert run(2, work) == [pytest.approx(0.1)] * 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("change", [by_each_norm, by_a_norm_by_hand, along_the_gradient_by_a_number])
def test_a_norm_of_a_shard_changes_nothing(change, stage):
    assert "the norm of a shard changes a shard" in error_of(lambda: both(stage, changing(change)))
    assert both(DDP, changing(change)) < 1e-5


def changing(change):
    def loop(model, x, optimizer, step):
        model(x).square().mean().backward()
        parameters = list(model.parameters())
        change([p.grad for p in parameters], model, parameters)
        end(optimizer)

    return loop


PENALTIES = {
    "squared norm": (lambda p: p.norm() ** 2 / 2, True),
    "magnitudes": (lambda p: torch.linalg.vector_norm(p, ord=1), True),
    "sum of squares": (lambda p: 3 - p.square().sum(), True),
    "norm": (lambda p: p.norm(), False),
    "root": (lambda p: p.square().sum().sqrt(), False),
    "product": (lambda p: p.abs().sum() * p.square().sum(), False),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_of_shards_is_of_all_or_refused(name):
    term, sums = PENALTIES[name]

    def loop(model, x, optimizer, step):
        (model(x).square().mean() + 0.05 * sum(map(term, model.parameters()))).mean().backward()
        end(optimizer)

    for stage in (Zero1, Zero3):
        if sums:
            assert both(stage, loop) < 1e-5
        else:
            assert "the norm of a shard is a part of a loss" in error_of(lambda stage=stage: both(stage, loop))


# What one rank does by itself.


def drawn(model, comm):
    torch.manual_seed(comm.rank)
    model.module.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)


def drawn_through_data(model, comm):
    for parameter in model.module.parameters():
        parameter.data.uniform_(-comm.rank, 1)


def drawn_if_of_two_dimensions(model, comm):
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter)


def skipped(model, comm):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(vectors(0)).sum().backward()
    if comm.rank:
        optimizer.step()


BEFORE = "initialise the module before wrapping it"
ALONE = [
    *((drawn, stage, BEFORE) for stage in (DDP, Zero1)),
    *((drawn_through_data, stage, BEFORE) for stage in (DDP, Zero2)),
    *((drawn_if_of_two_dimensions, stage, BEFORE) for stage in SHARDED),
    *((skipped, stage, "They differ in their step: if a rank leaves out") for stage in (DDP, Zero3)),
]


@pytest.mark.parametrize("act, stage, words", ALONE)
def test_what_a_rank_draws_or_leaves_out_alone_is_told(act, stage, words):
    def job(comm):
        model = stage(seeded(Blocks)(), comm)
        act(model, comm)
        model(vectors(comm.rank)).sum().backward()

    assert words in error_of(lambda: run(2, job))


DECISIONS = [
    (lambda o, rank: o.param_groups[0].update(lr=0.1 + rank), "the hyperparameter lr of group 0 is 0.1 on rank 0, 1.1"),
    (lambda o, rank: o.param_groups[0].update(betas=(0.9, 0.99 - rank / 9)), "the hyperparameter betas of group 0"),
    (lambda o, rank: next(iter(o.state.values()))["step"].add_(rank), "the optimizer's step of"),
]


@pytest.mark.parametrize("decide, words", DECISIONS)
def test_what_ranks_decide_differently_is_not_saved(decide, words, tmp_path):
    def job(comm):
        model = DDP(seeded(Blocks)(), comm)
        optimizer = torch.optim.AdamW(model.parameters())
        model(vectors(0)).sum().backward()
        optimizer.step()
        decide(optimizer, comm.rank)
        checkpoint.save(tmp_path, model, optimizer, 1)

    assert words in error_of(lambda: run(2, job))


# A Function that writes weight.grad itself.


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.t() @ ctx.saved_tensors[0]
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return gradient @ ctx.weight, None


class WritesGrad(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.uses, self.layer, self.out = uses, nn.Linear(7, 7, bias=False), nn.Linear(7, 1)

    def forward(self, x):
        for use in self.uses:
            x = Fused.apply(x, self.layer.weight) if use == "fused" else torch.tanh(self.layer(x))
        return self.out(x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("uses", [("fused",), ("fused", "fused"), ("fused", "plain", "fused")])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_gradient_that_a_function_writes_is_averaged(backwards, uses, stage):
    def loop(model, x, optimizer, step):
        for _ in range(backwards):
            model(x).square().mean().backward()
        end(optimizer)

    assert both(stage, loop, lambda: WritesGrad(uses)) < 1e-5


# Units, and what stage 3 cannot free.


def bare():
    part = nn.Module()
    part.inner = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    return part


UNITS = [
    (lambda: nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh()]), ["0", "1"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), ["1.0", "1.1"]),
    (lambda: nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)]), ["0.0", "1"]),
    (lambda: nn.ModuleList([bare(), nn.Linear(2, 2)]), ["0.inner.0", "1"]),
    (lambda: nn.ModuleList(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Tanh()) for _ in "ab"), ["0", "1"]),
]


@pytest.mark.parametrize("make, paths", UNITS)
def test_the_children_of_a_list_are_units_whatever_their_types(make, paths):
    assert [path for path, _ in repeated_blocks(make())] == paths


def mixed():
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(7, 7), nn.Tanh())))


def computed(module):
    nn.utils.weight_norm(module.out)


def by_hook(module):
    nn.utils.weight_norm(module.out)


def parametrized(module):
    nn.utils.parametrizations.spectral_norm(module.out)


TOLD = [
    (mixed, {}, contextlib.nullcontext, r"the unit root holds 100% .* units="),
    (Blocks, {}, lambda: torch.autocast("cpu", torch.bfloat16), r"torch.autocast makes .* dtype=torch.bfloat16"),
    (lambda: Blocks(by_hook), {}, contextlib.nullcontext, "the weight of out, which is computed from others"),
    (lambda: Blocks(parametrized), {}, contextlib.nullcontext, "the weight of out, which is computed from others"),
    (Blocks, {}, contextlib.nullcontext, None),
    (Blocks, {"dtype": torch.bfloat16}, lambda: torch.autocast("cpu", torch.bfloat16), None),
    (mixed, {"reshard_after_forward": False}, contextlib.nullcontext, None),
]


@pytest.mark.parametrize("make, options, context, words", TOLD)
def test_stage_3_says_once_what_it_cannot_free(make, options, context, words):
    def job(comm):
        model = Zero3(make(), comm, **options)
        for step in range(2):
            with context():
                model(vectors(step)).sum().backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(2, job)
    if words is None:
        assert not [str(each.message) for each in told if "Zero3" in str(each.message)]
    else:
        (only,) = (str(each.message) for each in told if "Zero3" in str(each.message))
        assert re.search(words, only)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x, which):
        return F.relu(self.experts[which](x))


def test_experts_that_only_one_rank_uses_are_told_to_go_with_the_module_around_them():
    def job(comm):
        model = Zero3(nn.ModuleDict({"a": Experts()}), comm)
        model.module["a"](vectors(0), comm.rank).sum().backward()

    assert "name a module around them all in units=" in error_of(lambda: run(2, job))


# What would grow.


def test_nothing_is_noted_of_calls_of_a_block_and_nothing_kept_of_an_engine():
    def job(comm):
        model = Zero3(seeded(Blocks)(), comm)
        model(vectors(0)).sum().backward()
        notes = [len(turns) for turns in model.ahead.in_turn.values()]
        with torch.no_grad():
            for _ in range(5):
                model.module.blocks[0](vectors(0))
        assert [len(turns) for turns in model.ahead.in_turn.values()] == notes
        sent = comm.bytes_sent
        del model
        barrier(comm)
        if comm.rank == 0:  # of two at a time one does nothing
            gc.collect()
        barrier(comm)
        return len(comm.parts), comm.bytes_sent == sent

    assert run(2, job) == [(0, True)] * 2
