"""What others' loops and models do, as their bug reports tell: as in the plain module, or refused by name."""

import copy
import functools
import gc
import math
import re
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, GPT, RankFailed, Zero1, Zero2, Zero3, all_reduce, barrier, checkpoint
from minizero.engines.any_model.units import repeated_blocks
from minizero.recompute import checkpoint as recompute
from tests.support.failures import until
from tests.support.helpers import SMALL, STAGES, exactly, run
from tests.support.small_models import (
    SAME_BITS,
    SHARDED,
    Blocks,
    check,
    fit,
    held_back,
    on_ranks,
    refused,
    seeded,
    vectors,
    wrapped,
)


def error_of(call):
    with pytest.raises(RankFailed) as failure:
        call()
    return str(failure.value.__cause__)


# torch.autograd.grad of what is no parameter. In every second step nothing follows it: .grad is None, nothing moves.

grad = torch.autograd.grad
GRADIENTS = {
    "of an input": lambda model, x: grad(model(x).square().mean(), x),
    "of a hidden tensor": lambda model, x: grad(model(hidden := x * 2).sum(), [hidden, x], retain_graph=True),
    "twice": lambda model, x: [grad(loss := model(x).mean(), x, retain_graph=True), loss.backward(inputs=[x])],
    "of a second order": lambda model, x: (
        isinstance(model, Zero3)  # which refuses it
        or grad(grad(model(x).square().mean(), x, create_graph=True)[0].square().sum(), x)
    ),
    "by torch.func": lambda model, x: (
        isinstance(model, Zero3)  # which refuses it
        or torch.vmap(torch.func.grad(lambda x: model(x).square().mean()))(x.detach())
    ),
}


def now_and_then(gradient):
    def loop(model, x, rank):
        gradient(model, x.clone().requires_grad_())
        vars(model)["turns"] = turns = vars(model).get("turns", 0) + 1
        return model(x).square().mean() if turns % 2 else None

    return loop


class Guided(Blocks):
    """Goes down an energy, as a sampler does, and then on."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = grad(self.blocks[1](self.blocks[0](inner)).square().sum(), inner)
        return super().forward(x - 0.1 * slope)


class GuidedInside(nn.Module):
    """Each block goes down an energy of one of its parts."""

    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(GuidedBlock(7, 7) for _ in range(3)), nn.Linear(7, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class GuidedBlock(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.energy = nn.Linear(7, 3)

    def forward(self, x):
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = grad(self.energy(inner).square().sum(), inner)
        return torch.tanh(super().forward(x - 0.1 * slope)) + self.energy(x).mean(-1, keepdim=True)


@on_ranks(SAME_BITS, make=seeded(Guided))
def test_a_gradient_inside_a_forward_reduces_nothing(model, comm):
    sent = comm.bytes_sent
    model(vectors(0))
    assert all(shard.grad is None for shard in model.parameters()), "no backward of the model has run"
    if not isinstance(model, Zero3):  # which has to gather for it
        assert comm.bytes_sent == sent
        if comm.rank == 0:  # alone: say, it draws which inputs matter
            x = vectors(0).requires_grad_()
            assert grad(model.module.blocks[0](x).sum(), x)[0].any()
    model(vectors(0)).sum().backward()
    assert all(shard.grad.any() for shard in model.parameters())


# Norms of shards: what becomes of parameters and gradients.


def by_a_norm_summed_over_ranks(model, ps, gs):
    squares = sum(g.norm() ** 2 for g in gs)
    squares = all_reduce(squares, model.comm) if isinstance(model, SHARDED) else squares
    torch._foreach_mul_(gs, (0.1 / squares.sqrt()).clamp(max=1))


def printed(model, ps, gs):
    assert all(f"{g.norm():.3f}" and "tensor(" in repr(g.norm()) and g.norm().item() >= 0 for g in gs)
    assert all((g.abs() <= g.abs().max()).all() and len(torch.histc(g, 9, 0, g.norm().item())) == 9 for g in gs)
    nn.utils.clip_grad_value_(ps, 0.01)
    torch._foreach_add_(ps, gs, alpha=-0.1)


def one_by_one(model, ps, gs):
    for p in ps:
        p = p.view(-1)
        old, same = p[0].item(), p[-1].clone()
        p[0] = old + 1
        p[0], p[-1] = old, same


def averaged(model, ps, gs):
    for p, one, other in zip(ps, [copy.deepcopy(p) for p in ps], [p.detach().clone() for p in ps], strict=True):
        p.copy_(one.lerp_(p * 1.5, 0.5) - other.mul_(0.25))


def logged_before_a_constant_of_that_value(model, ps, gs):
    assert {(0 * p.detach()).sum().add(0.5).item() for p in ps} == {0.5}
    torch._foreach_mul_(ps, 0.5)


def in_the_second_step(model, ps, gs):
    if hasattr(model, "turns"):
        [g.mul_(g.norm()) for g in gs]
    model.turns = 1


def by_a_norm_by_hand(model, ps, gs):
    total = torch.cat([(1.0 * g).flatten() for g in gs]).pow(2).sum().sqrt()
    for p, g in zip(ps, gs, strict=True):
        p.grad = g * (0.1 / total)


norm = torch.linalg.vector_norm
REFUSED = {
    "by hand": by_a_norm_by_hand,
    "each": lambda model, ps, gs: [g.data.mul_(norm(p.detach()) / g.data.norm(2)) for p, g in zip(ps, gs, strict=True)],
    "a float": lambda model, ps, gs: torch._foreach_add_(ps, gs, alpha=float(-0.05 / nn.utils.get_total_norm(gs))),
    "in the second step": in_the_second_step,
    "mean": lambda model, ps, gs: [g.sub_(g.mean()) for g in gs],
    "normalized": lambda model, ps, gs: [p.sub_(0.1 * F.normalize(g, dim=0)) for p, g in zip(ps, gs, strict=True)],
}


def changing(change):
    def loop(model, x, rank):
        model(x).square().mean().backward()
        parameters = list(model.parameters())
        with torch.no_grad():
            change(model, parameters, [p.grad for p in parameters])

    return loop


def with_penalty(term):
    return lambda model, x, rank: (model(x).square().mean() + 0.05 * sum(map(term, model.parameters()))).mean()


SUMS = {
    "squared norm": lambda p: p.norm() ** 2 / 2,
    "squared norm, by default": lambda p: norm(p) ** 2,
    "magnitudes": lambda p: norm(p, ord=1),
    "sum of squares": lambda p: 3 - p.square().sum(),
    "Huber": lambda p: torch.tensor(0.5) * F.smooth_l1_loss(p, torch.zeros_like(p), reduction="sum"),
}
OTHERS = {
    "norm": lambda p: p.norm(),
    "root": lambda p: p.square().sum().sqrt(),
    "product": lambda p: p.abs().sum() * p.square().sum(),
    "largest": lambda p: p.abs().max(),
}


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


class ByItself(torch.autograd.Function):
    """It is given the module, and not the weight: autograd does not know that this has a gradient."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.weight = module.weight
        ctx.save_for_backward(x)
        return x @ module.weight.t()

    backward = Fused.backward


class Layer(nn.Linear):
    def forward(self, x, use):
        if use == "plain":
            return torch.tanh(super().forward(x))
        return Fused.apply(x, self.weight) if use == "fused" else ByItself.apply(x, self)


class WritesGrad(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.uses, self.layer, self.out = uses, Layer(7, 7, bias=False), nn.Linear(7, 1)

    def forward(self, x):
        for use in self.uses:
            x = self.layer(x, use)
        return self.out(x)


class WritesGradInBlocks(nn.Module):
    """The gradient of a block, of the last part of the root, and of one of two weights, which a block does not need."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(7, 7), Layer(7, 7, bias=False)
        self.blocks = nn.ModuleList(Layer(7, 7, bias=False) for _ in range(3))
        self.blocks[1].other = Layer(7, 7, bias=False)

    def forward(self, x, **_):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[1], self.head):
            x = block(x, "by itself")
        return x


def once(model, x, rank):
    return model(x).square().mean()


def again(model, x, rank):
    once(model, x, rank).backward()
    return once(model, x, rank)


def of_an_input_first(model, x, rank):
    grad(once(model, x := x.clone().requires_grad_(), rank), x)
    return once(model, x, rank)


STAY = (by_a_norm_summed_over_ranks, printed, one_by_one, averaged, logged_before_a_constant_of_that_value)
AS_PLAIN = [(f"gradient {name}", now_and_then(f), Blocks, STAGES) for name, f in GRADIENTS.items()]
AS_PLAIN += [("gradient inside a forward", once, Guided, STAGES), ("inside a block", once, GuidedInside, STAGES)]
AS_PLAIN += [(f"norm {f.__name__}", changing(f), Blocks, STAGES) for f in STAY]
AS_PLAIN += [(f"norm {name}", changing(f), Blocks, (DDP,)) for name, f in REFUSED.items()]
AS_PLAIN += [(f"penalty {name}", with_penalty(f), Blocks, (Zero1, Zero3)) for name, f in SUMS.items()]
AS_PLAIN += [
    (f"{' '.join(uses)} {loop.__name__}", loop, lambda uses=uses: WritesGrad(uses), STAGES)
    for loop in (once, again)
    for uses in (("fused",), ("fused", "fused"), ("fused", "plain", "fused"), ("by itself",), ("plain", "by itself"))
]
AS_PLAIN += [
    (f"by itself, {loop.__name__}", loop, WritesGradInBlocks, (*STAGES, functools.partial(Zero3, prefetch=0)))
    for loop in (once, again, held_back)
]
AS_PLAIN += [("by itself, of an input first", of_an_input_first, WritesGradInBlocks, SHARDED)]
NAMED = [(f"norm {name}", changing(f), "norm of a shard changes a shard", SHARDED) for name, f in REFUSED.items()]
NAMED += [(f"penalty {n}", with_penalty(f), "norm of a shard is a part of a loss", SHARDED) for n, f in OTHERS.items()]


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # it tells a gradient's scale


def each_stage(rows):
    return [
        pytest.param(stage, *row, id=f"{name}, {getattr(stage, '__name__', stage)}")
        for name, *row, stages in rows
        for stage in stages
    ]


@pytest.mark.parametrize("stage, loop, make", each_stage(AS_PLAIN))
def test_a_loop_is_as_in_the_plain_module(stage, loop, make):
    check(seeded(make), forward=loop, steps=4, stages=[stage], optimizer=SGD)


@pytest.mark.parametrize("stage, loop, words", each_stage(NAMED))
def test_a_loop_is_refused_by_name(stage, loop, words):
    assert words in error_of(lambda: run(2, fit, stage, seeded(Blocks), 4, loop, optimizer=SGD))


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


class Gate(nn.Linear):
    def forward(self, x, use):
        return super().forward(x) if use else 2 * x


@on_ranks(make=lambda: Gate(7, 7))
def test_a_rank_whose_output_reaches_no_parameter_goes_on_with_the_others(model, comm):
    for step in range(2):
        model(vectors(step).requires_grad_(), use=comm.rank == step).sum().backward()
    assert all(p.grad.any() for p in model.parameters() if p.numel())


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

    def forward(self, x, **_):
        x = self.norm(self.layer(x))
        if self.training:
            self.queue[0] = x.detach()[0, ::2]
            self.seen[int(x.detach().sum().abs()) % 3] = True
            if self.kind == "grows":
                self.longest = None if x[0, 0] > x[1, 0] else torch.zeros(2)  # it may be gone on another rank
        return x + self.queue.mean() + self.seen.sum()


WAYS = {
    "plain": once,
    "grows": once,
    "no_sync": held_back,
    "recompute": lambda model, x, rank: recompute(model, x).square().mean(),
}


@pytest.mark.parametrize("stage, way", [*((stage, "plain") for stage in STAGES), *((Zero2, w) for w in WAYS)])
def test_buffers_are_rank_0s_after_a_backward_unless_asked_and_their_bytes_are_those_of_the_docstring(stage, way):
    def job(comm, keep):
        model = stage(seeded(lambda: Writes(way))(), comm, broadcast_buffers=keep)
        before = comm.bytes_sent
        for step in range(2):
            WAYS[way](model, vectors(step).chunk(comm.size)[comm.rank], comm.rank).backward()
            if comm.rank == 0 and stage is DDP:  # alone
                model.eval()(vectors(0))
                model.train()
        named = model.module.named_buffers()
        return [b.clone() for n, b in named if n != "longest" or way != "grows"], comm.bytes_sent - before

    (kept, sent), (own, less) = (zip(*run(4, job, keep)) for keep in (True, False))
    exactly(kept[1:], kept[:1] * 3)
    assert not any(all(map(torch.equal, own[0], rank)) for rank in own[1:])
    buffers = [*Writes(way).buffers()]
    assert sum(sent) - sum(less) == 2 * 3 * (sum(b.numel() * b.itemsize for b in buffers) + len(buffers))


class Shared(nn.Module):
    """Two parts hold one buffer, and each makes its own of it."""

    def __init__(self):
        super().__init__()
        self.parts, self.limit = nn.ModuleList(nn.Linear(7, 7) for _ in range(2)), -math.inf
        for part in self.parts:
            part.register_buffer("mean", vars(self.parts[0])["_buffers"].get("mean", torch.zeros(7)))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            if x.sum() > self.limit:  # else it stays one tensor on this rank
                part.mean = 0.9 * part.mean + x.detach().mean(0)
        return x


@pytest.mark.parametrize("limits", [(-math.inf, -math.inf), (math.inf, -math.inf)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_that_two_parts_hold_is_rank_0s_in_both(stage, limits):
    def job(comm):
        model = stage(Shared(), comm)
        model.module.limit = limits[comm.rank]
        for _ in range(2):
            model(vectors(comm.rank)).mean().backward()
        return [part.mean.clone() for part in model.module.parts]

    exactly(*run(2, job))


@on_ranks(SHARDED)
def test_norms_of_shards_are_refused_in_a_closure_after_a_step_and_in_a_hook_but_the_step_is_pytorch_s(model, comm):
    parameters = list(model.parameters())
    sgd, kinds = torch.optim.SGD(parameters, lr=0.1), set()
    sgd.register_step_post_hook(lambda *_: kinds.update(type(each) for p in parameters for each in (p, p.grad)))

    def closure():
        model(vectors(0)).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    words = "the norm of a shard changes a shard or its gradient"
    refused(words, lambda: sgd.step(closure))
    for given in ((lambda: model(vectors(0)).mean().backward(),), ()):
        sgd.step(*given)
        refused(words, lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.1))
    assert kinds == {nn.Parameter, torch.Tensor}
    refused("division", lambda: sgd.step(lambda: 1 / 0), error=ZeroDivisionError)
    refused(words, closure)
    parameters[0].register_hook(lambda gradient: gradient / gradient.norm())
    refused(words, lambda: model(vectors(0)).mean().backward())


# What one rank does by itself. Each `act(model, comm, folder)` ends in words that name it.


def drawn(model, comm, folder):
    torch.manual_seed(comm.rank)
    model.module.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)


def drawn_through_data(model, comm, folder):
    for parameter in model.module.parameters():
        parameter.data.uniform_(-comm.rank, 1)


def drawn_if_of_two_dimensions(model, comm, folder):
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter)


def skipped(model, comm, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(vectors(0)).sum().backward()
    if comm.rank:
        optimizer.step()


def saved(decide):
    def act(model, comm, folder):
        optimizer = torch.optim.AdamW(model.parameters())
        model(vectors(0)).sum().backward()
        optimizer.step()
        decide(optimizer.param_groups[0], next(iter(optimizer.state.values()))["step"], comm.rank)
        checkpoint.save(folder, model, optimizer, 1)

    return act


BEFORE = "initialise the module before wrapping it"
ALONE = [
    (drawn, (DDP, Zero1), BEFORE),
    (drawn_through_data, (DDP, Zero2), BEFORE),
    (drawn_if_of_two_dimensions, SHARDED, BEFORE),
    (skipped, (DDP, Zero3), "They differ in their step: if a rank leaves out"),
    (saved(lambda group, _, rank: group.update(lr=0.1 + rank)), (DDP,), "lr of group 0 is 0.1 on rank 0, 1.1"),
    (saved(lambda group, _, rank: group.update(betas=(0.9, 0.99 - rank / 9))), (DDP,), "betas of group 0"),
    (saved(lambda _, steps, rank: steps.add_(rank)), (DDP,), "the optimizer's step of"),
]


@pytest.mark.parametrize("stage, act, words", each_stage((act.__name__, act, words, on) for act, on, words in ALONE))
def test_what_a_rank_does_alone_is_told(stage, act, words, tmp_path):
    def job(comm):
        model = stage(seeded(Blocks)(), comm)
        act(model, comm, tmp_path)
        model(vectors(comm.rank)).sum().backward()

    assert words in error_of(lambda: run(2, job))


# Units, and what stage 3 cannot free.


def bare():
    part = nn.Module()
    part.inner = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    return part


UNITS = [
    (Blocks, ["blocks.0", "blocks.1", "blocks.2"]),
    (lambda: GPT(SMALL), ["blocks.0", "blocks.1", "blocks.2"]),
    (lambda: nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh()]), ["0", "1"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), ["1.0", "1.1"]),
    (lambda: nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)]), ["0.0", "1"]),
    (lambda: nn.ModuleList([bare(), nn.Linear(2, 2)]), ["0.inner.0", "1"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),
    (lambda: nn.ModuleList(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Tanh()) for _ in "ab"), ["0", "1"]),
]


@pytest.mark.parametrize("make, paths", UNITS)
def test_the_children_of_a_list_are_units_whatever_their_types(make, paths):
    assert [path for path, _ in repeated_blocks(make())] == paths


def test_units_are_given():
    def names(comm, choose):
        module = Blocks()
        return [unit.name for unit in Zero3(module, comm, units=choose(module)).units]

    given = run(1, names, lambda m: [m.blocks[1], m.out, m.blocks[1][0]])[0]
    assert given == ["root", "blocks.1", "out", "blocks.1.0"] and run(1, names, lambda m: [])[0] == ["root"]
    assert "submodule" in error_of(lambda: run(1, names, lambda m: [nn.Linear(2, 2)]))


def mixed():
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(7, 7), nn.Tanh())))


COMPUTED = "the weight of out, which is computed from others"
TOLD = [
    (mixed, {}, False, r"the unit root holds 100% .* units="),
    (Blocks, {}, True, r"torch.autocast makes .* dtype=torch.bfloat16"),
    (lambda: Blocks(lambda module: nn.utils.weight_norm(module.out)), {}, False, COMPUTED),
    (lambda: Blocks(lambda module: nn.utils.parametrizations.spectral_norm(module.out)), {}, False, COMPUTED),
    (Blocks, {}, False, None),
    (Blocks, {"dtype": torch.bfloat16}, True, None),
    (mixed, {"reshard_after_forward": False}, False, None),
]


@pytest.mark.parametrize("make, options, autocast, words", TOLD)
def test_stage_3_says_once_what_it_cannot_free(make, options, autocast, words):
    def job(comm):
        model = Zero3(make(), comm, **options)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model(vectors(step)).sum().backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(2, job)
    said = [str(each.message) for each in told if "Zero3" in str(each.message)]
    assert len(said) == (words is not None) and all(re.search(words, each) for each in said)


# What would grow.


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_nobody_holds_goes_with_its_memory_and_its_threads(stage):
    gone, before = [], set(threading.enumerate())

    @wrapped(stage)
    def _(model, comm):
        optimizer = torch.optim.AdamW(model.parameters())
        model(vectors(0)).sum().backward()
        optimizer.step()
        gone.extend([weakref.ref(model), weakref.ref(model.units[0].master)])

    gc.collect()
    assert len(gone) == 4 and all(reference() is None for reference in gone)
    assert until(lambda: set(threading.enumerate()) <= before), threading.enumerate()


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
        return comm.bytes_sent == sent

    assert run(2, job) == [True] * 2


def test_an_attribute_of_a_shard_may_be_replaced_by_a_property(monkeypatch):
    """As a tool does that follows gradients."""
    getter, setter = torch._C.TensorBase.grad.__get__, torch._C.TensorBase.grad.__set__
    monkeypatch.setattr(torch.Tensor, "grad", property(getter, setter), raising=False)

    def work(comm):
        model = Zero1(nn.Linear(3, 1), comm)
        model(torch.ones(2, 3)).sum().backward()
        return [tuple(shard.grad.shape) for shard in model.parameters()]

    assert run(2, work) == [[(2,)]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_before_wrapping_is_in_no_average(stage):
    def used():
        net = seeded(Blocks)()
        net(vectors(9)).square().mean().backward()
        return net

    exactly(run(2, fit, stage, used, 1), run(2, fit, stage, seeded(Blocks), 1))
