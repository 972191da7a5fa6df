"""A model of any shape trains as on one process: odd sizes, tied, frozen and unused parameters, buffers."""

import contextlib
import dataclasses
import functools
import itertools
import weakref

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, Zero1, Zero2, Zero3, recompute
from minizero.memory import Ledger
from tests.support.helpers import SMALL, STAGES, batch, exactly, relative_error, run, slow
from tests.support.small_models import (
    EDGES,
    LOOPS,
    SHARDED,
    Blocks,
    check,
    decay,
    on_ranks,
    one_graph_twice,
    seeded,
    vectors,
)

but = functools.partial(functools.partial, Blocks)  # with a change


def tied(net):
    """Inside a unit, and across units."""
    net.blocks[1] = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    net.blocks[1][0].bias = net.blocks[1][2].bias
    net.blocks[2][2].weight = net.blocks[0][2].weight


def frozen(net):
    net.blocks[0].requires_grad_(False)  # a whole unit, with nothing that trains before it
    net.blocks[2].requires_grad_(False)  # one that gradients have to pass
    net.blocks[1][0].weight.requires_grad_(False)  # part of one
    net.out.bias.requires_grad_(False)


class Either(nn.ModuleDict):
    def forward(self, x):
        return self[self.takes](x).tanh()


def choosing(net):
    net.blocks = nn.ModuleList(Either({name: nn.Linear(7, 7) for name in "abc"}) for _ in range(3))


def choose(model, x, rank):
    """All ranks use the unit, so stage 3 can gather it; gradients are None on some ranks."""
    for block, takes in zip(getattr(model, "module", model).blocks, ("aba", "aab", "bac")[rank]):
        block.takes = takes  # nobody takes c in the first, say
    return model(x).square().mean()


def branch(model, x, rank):
    """Stage 3 gathers in forward, where all ranks have to come: test_reports.py has its error."""
    return model(x, order=(0, 1) if rank % 2 else (0, 2)).square().mean()


def other_sizes(model, x, rank):
    """The engine takes the mean of the ranks' losses, whatever each is a mean of; see accumulate for the other."""
    return model(x[: 4 - rank]).square().mean()


class Gate(nn.Module):
    """Its parameter's gradient is complete before its backward has used the parameter for the last time."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return (x * self.gain.detach()).tanh() * self.gain


class Gates(nn.Module):
    """Units are kept until their inputs have their gradients."""

    def __init__(self, freeze):
        super().__init__()
        self.gates, self.into = nn.ModuleList(Gate() for _ in range(3)), nn.Linear(7, 7)
        self.gates[0].requires_grad_(not freeze)

    def forward(self, x):
        x = self.into(x)
        for gate in (*self.gates, self.gates[2], self.gates[0], self.gates[0]):
            x = gate(x)
        return 30 * x


class Shared(Blocks):
    """Buffers that share memory go on sharing it."""

    def __init__(self):
        super().__init__()
        ring = torch.zeros(8)
        self.register_buffer("ring", ring)
        self.register_buffer("first", ring[:7])
        self.register_buffer("wide", torch.ones(1).expand(7))
        self.column = ring[:7].view(7, 1)  # no buffer

    def forward(self, x):
        with torch.no_grad():
            self.ring.add_(1)
        return super().forward(x + self.first * self.wide + self.column.mean())


class Tree(nn.Sequential):
    """Calls itself."""

    def forward(self, x, depth=2):
        return super().forward(self(x, depth - 1) + self(x * 0.5, depth - 1) if depth else x)


class Nested(nn.Sequential):
    """Calls itself, and the outer use is still open when the inner one closes."""

    def forward(self, x, depth=2):
        x = x * 0.5 + self[2](self[0](x).tanh())
        return x + self(x, depth - 1) if depth else x


class Writes(nn.Sequential):
    """Its forward writes to its weights."""

    def forward(self, x):
        with torch.no_grad():
            self[0].weight.clamp_(max=0.2)
            self[2].weight.data.mul_(0.9)
        return super().forward(x)


class Times(torch.autograd.Function):
    """It has no gradient for a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].T, None


def by_times(net):
    net.fixed = nn.Parameter(torch.empty(7, 7))
    net.register_forward_pre_hook(lambda net, args: (Times.apply(args[0], net.fixed), *args[1:]))


def of(kind):
    """`Blocks`, but each of this kind."""
    return but(lambda net: setattr(net, "blocks", nn.ModuleList(kind(*block) for block in net.blocks)))


def writing():
    net = of(Writes)()
    net.out = Writes(net.out, nn.Tanh(), nn.Linear(1, 1))
    return net


def penalty(first, hold, model, x, rank):
    """Over the parameters, in each backward: before or after the forward. no_sync may hold it back."""
    for last in (False, False, True):
        terms = [lambda: model(x).square().mean(), lambda: 0.05 * sum(p.square().sum() for p in model.parameters())]
        one, other = terms[::-1] if first else terms
        loss = one() + other()
        with model.no_sync() if hold and hasattr(model, "no_sync") else contextlib.nullcontext():
            if not last:
                loss.backward()
    return loss


def slope(model, x, rank):
    """A double backward, which stage 3 refuses."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().mean()


def schedule(optimizer):
    """One that is made of others."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[1])


OTHERS = ({"prefetch": 0}, {"offload": True}, {"reshard_after_forward": False})
MOST = [*STAGES, *(functools.partial(Zero3, **options) for options in OTHERS)]
TRAINS = [  # a model; how it is called; ranks, and more
    *(
        (Blocks, loop, {"world_size": 3}) for loop in LOOPS
    ),  # the fewest of which a sum has an order, and that need padding
    *slow(*((Blocks, loop, {"world_size": 3}) for loop in EDGES)),
    *slow(*((Blocks, None, {"world_size": size}) for size in (3, 6))),
    *slow((lambda: nn.Linear(7, 1, bias=False), None, {"world_size": 12})),  # 7 elements on 12 ranks
    (lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), one_graph_twice, {}),  # without a root
    (Blocks, other_sizes, {"parts": 3}),
    (Blocks, branch, {"parts": 3, "stages": STAGES[:3]}),
    (Blocks, slope, {"stages": STAGES[:3]}),
    (but(choosing), choose, {"parts": 3}),
    (but(tied), None, {}),
    (but(frozen), None, {}),
    *((functools.partial(Gates, freeze), None, {}) for freeze in (False, True)),
    (Shared, None, {}),
    *slow((of(Tree), None, {})),
    (of(Nested), None, {}),
    (writing, None, {"stages": MOST}),
    (but(by_times), None, {}),
    *(
        (Blocks, functools.partial(penalty, first, hold), {"stages": [stage]})  # each adds in another order
        for first, hold in itertools.product((False, True), repeat=2)
        for stage in (*MOST, functools.partial(Zero3, group_by=decay))
    ),
    (Blocks, None, {"schedule": schedule}),
]


@pytest.mark.parametrize("make, loop, options", TRAINS)
def test_it_trains_as_on_one_process(make, loop, options):
    check(seeded(make), forward=loop, **options)


def test_frozen_parameters_are_not_the_optimizers():
    total = sum(p.numel() for p in but(frozen)().parameters() if p.requires_grad)
    for stage in SHARDED:
        held = run(2, lambda comm, stage=stage: sum(p.numel() for p in stage(but(frozen)(), comm).parameters()))
        assert total <= sum(held) <= total + 8


@pytest.mark.parametrize("stage", STAGES)
def test_a_recompute_that_ends_early_leaves_no_inputs_behind(stage):
    def work(comm):
        model = stage(GPT(dataclasses.replace(SMALL, recompute="full")), comm)
        given = []
        for block in model.module.blocks:
            block.register_forward_pre_hook(lambda _, args: given.append(weakref.ref(args[0])))
        left = []
        for _ in range(2):
            model(*batch(0)).backward()
            left.append(sum(len(unit.running) for unit in model.units))  # of forwards that recompute stopped early
        return [reference() is not None for reference in given], left[1] - left[0]

    assert run(2, work)[0] == ([False] * 4 * SMALL.layers, 0)  # each block ran twice in each step


# What a rank does not use, others may.


class Choosing(nn.Module):
    """Blocks of a router, an expert, and a weight that nobody uses. A route says which block uses how many of them."""

    def __init__(self, way="in turn", never=True):
        super().__init__()
        self.way, self.first, self.out = way, nn.Linear(7, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        for block in self.blocks:
            block.router, block.never = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7)) if never else None
            block.forward = functools.partial(self.use, block)

    @staticmethod
    def use(block, x, many):
        x = x * block.router if many else 2 * x
        return x + torch.tanh(nn.functional.linear(x, block.weight, block.bias)) if many == 2 else x

    def forward(self, x, route):
        x = first = self.first(x)
        for index, many in route:
            given = {"in turn": x, "side by side": first, "without a gradient": first.detach()}[self.way]
            made = self.blocks[index](given, many)
            x = made if self.way == "in turn" else x + made
        return self.out(x)


class FrozenOrNot(nn.Sequential):
    """What it returns is a trained part's, or a frozen one's."""

    def forward(self, x, many):
        return self[many - 1](x)


def frozen_or_not():
    model = Choosing()
    model.blocks = nn.ModuleList(FrozenOrNot(nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 7)) for _ in range(3))
    return model


ROUTES = {
    "experts of one rank each": lambda rank: [(0, 2), (1, 2 - rank), (2, 1 + rank)],
    "in another use": lambda rank: [(0, 2), (2, 2 - 2 * rank), (1, 2), (2, 2 * rank)],
    "in the later of two": lambda rank: [(0, 2), (1, 1), (1, 2 - rank)],
    "in each block": lambda rank: [(0, 2 - rank), (1, 1 + rank), (2, 2 - rank)],
}
ON_THREE = [*STAGES, functools.partial(Zero3, prefetch=0), functools.partial(Zero3, reshard_after_forward=False)]
IDLE = [(Choosing, route) for route in ROUTES]
IDLE += [
    (make, route)
    for make in (
        *(functools.partial(Choosing, w, False) for w in ("side by side", "without a gradient")),
        frozen_or_not,
    )
    for route in ("experts of one rank each", "in each block")
]


@pytest.mark.parametrize("make, route", IDLE)
def test_an_expert_may_be_idle_on_one_rank(make, route):
    way = ROUTES[route]
    check(seeded(make), parts=2, stages=ON_THREE, forward=lambda model, x, rank: model(x, way(rank)).square().mean())


ALL_USED = [(0, 2), (1, 2), (2, 2)]


def an_older_step_is_held(model, x, rank):
    if f"held {rank}" in vars(model):
        return model(x, ROUTES["in each block"](rank)).square().mean()
    vars(model)[f"held {rank}"] = model(x, ALL_USED)
    return model(x, ALL_USED).square().mean()


def test_an_expert_may_be_idle_while_an_output_of_an_older_step_is_held():
    check(seeded(functools.partial(Choosing, never=False)), parts=2, stages=ON_THREE, forward=an_older_step_is_held)


def slope_inside(net):
    """The gradient of an input, while backward computes two blocks again."""

    def part(x):
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.blocks[0](leaf).sum(), leaf)
        return net.blocks[1](net.blocks[0](x + slope))

    del net.blocks[2]  # which would be waited for
    net.forward = lambda x: net.out(recompute.checkpoint(part, x.requires_grad_()))


def test_a_gradient_of_inputs_inside_a_second_run_ends_no_use_of_the_backward():
    check(seeded(but(slope_inside)), stages=ON_THREE)


# Hooks, groups, and what broke off.


@on_ranks()
def test_a_backward_that_broke_off_after_no_sync_leaves_the_average_of_before(model, comm):
    x = vectors(0).chunk(comm.size)[comm.rank]
    model(x).square().mean().backward()
    average = [p.grad.clone() for p in model.parameters()]
    with model.no_sync():
        model(2 * x).square().mean().backward()
    out = model(x)
    model.module.out.weight.register_hook(lambda _: 1 / 0)  # the root's: every block has yet to come
    with pytest.raises(ZeroDivisionError):
        out.square().mean().backward()
    exactly([p.grad for p in model.parameters()], average)


def test_a_sum_of_no_sync_that_a_broken_backward_drops_is_told():
    def work(comm):
        model = Zero3(seeded(Blocks)(), comm)
        with model.no_sync():
            model(vectors(0)).square().mean().backward()
        out = model(vectors(1))
        model.module.out.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.square().mean().backward()
        model(vectors(2))

    with pytest.warns(UserWarning, match=r"Zero3: .* the sum that no_sync\(\) held is dropped"):
        run(2, work)


@pytest.mark.parametrize("stage", [Zero3, *slow(Zero1, Zero2)])
def test_an_optimizer_in_backward_steps_once_with_the_average_and_frees_it(stage):
    def trained(comm, in_backward):
        model, steps = stage(GPT(SMALL), comm), []
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(shard):
            steps.append(shard)
            optimizers[shard].step()
            optimizers[shard].zero_grad()

        for shard in optimizers if in_backward else ():
            shard.register_post_accumulate_grad_hook(step)
        for number in range(2):
            with Ledger(model) as ledger:
                model(*(part.chunk(comm.size)[comm.rank] for part in batch(number))).backward()
            for shard in () if in_backward else optimizers:
                step(shard)
        assert len(steps) == 2 * len(optimizers)
        return model.gather_state_dict(), ledger.peak["gradients"]

    (expected, all_at_once), (state, one_by_one) = (run(2, trained, in_backward)[0] for in_backward in (False, True))
    exactly(state, expected)
    assert one_by_one < 0.7 * all_at_once


@on_ranks(SHARDED)
def test_a_hook_on_a_shard_changes_its_average(model, comm):
    model(vectors(comm.rank)).square().mean().backward()
    averages = [p.grad.clone() for p in model.parameters()]
    for shard in model.parameters():
        shard.register_hook(lambda average: average.clamp(-0.01, 0.01))
    model(vectors(comm.rank)).square().mean().backward()
    for shard, average in zip(model.parameters(), averages, strict=True):
        assert torch.equal(shard.grad, average.clamp(-0.01, 0.01) + average)


@pytest.mark.parametrize("stage", STAGES)
def test_group_by_never_mixes_values_in_a_shard(stage):
    def step(model, x, groups):
        groups = [{"params": groups["matrices"], "weight_decay": 0.5}, {"params": groups["vectors"]}]
        model(x).square().mean().backward()
        torch.optim.SGD(groups, lr=0.1).step()

    def grouped(comm):
        model = stage(seeded(Blocks)(), comm, group_by=decay)
        groups = model.parameter_groups()  # every rank has each
        step(model, vectors(0).chunk(comm.size)[comm.rank], groups)
        assert {*model.parameters()} == {shard for shards in groups.values() for shard in shards}
        return model.gather_state_dict(), {group: sum(p.numel() for p in shards) for group, shards in groups.items()}

    module = seeded(Blocks)()
    parts = {kind: [p for n, p in module.named_parameters() if decay(n, p) == kind] for kind in ("matrices", "vectors")}
    step(module, vectors(0), parts)
    for world_size in (2, 3, 6):
        ranks = run(world_size, grouped)
        assert relative_error(ranks[0][0], module.state_dict()) < 1e-5
        for group, part in parts.items():
            found = sum(rank[1][group] for rank in ranks) // (world_size if stage is DDP else 1)
            assert 0 <= found - sum(p.numel() for p in part) <= 4 * world_size
