"""The core trains as the public engines do, bit for bit and byte for byte; what it does not serve, it refuses."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minizero import DDP, GPT, Zero1, Zero2, Zero3, barrier
from minizero.engines.any_model.engine import AnyModel
from minizero.engines.ddp import CoreDDP
from minizero.engines.zero1 import CoreZero1
from minizero.engines.zero2 import CoreZero2
from minizero.engines.zero3 import CoreZero3
from minizero.engines.zero3_by_hooks import shard
from minizero.memory import Ledger
from minizero.ranks.errors import CollectiveMismatch, RankFailed
from tests.engines import test_zero3_by_hooks
from tests.engines.test_zero3_by_hooks import odd_batch
from tests.support.helpers import SMALL, batch, exactly, run
from tests.support.small_models import PLAIN_LOOPS, Blocks, one_by_one, seeded, vectors

CORES = {CoreDDP: DDP, CoreZero1: Zero1, CoreZero2: Zero2, CoreZero3: Zero3}


class Pair(nn.Module):
    """Two inputs and two outputs, of which one is made early."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x, *, y):
        early = torch.tanh(self.early(x + y))
        return self.late(early), early


class Pairs(nn.Module):
    """Backward meets an input of a block's second use in the middle of its first."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 7), nn.ModuleList([Pair()])

    def forward(self, x, target):
        x = self.first(x)
        late, early = self.blocks[0](x=x, y=x)
        late, early = self.blocks[0](x=late, y=early)
        return (late + early - target).square().mean()


class Albert(nn.Module):
    """One block, four times."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 7), nn.ModuleList([nn.Linear(7, 7)] * 4)

    def forward(self, x, target):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x - target).square().mean()


def tied():
    """One bias is of the root and of two blocks, another of two blocks."""
    odd = copy.deepcopy(test_zero3_by_hooks.MODELS["odd"][0])
    odd.first.bias = odd.blocks[0][3].bias = odd.blocks[3][1].bias
    odd.blocks[0][0].bias = odd.blocks[3][1].extra = nn.Parameter(torch.ones(7))
    odd.blocks[3][1].register_forward_hook(lambda linear, _, output: output + linear.extra)
    return odd


MODELS = test_zero3_by_hooks.MODELS | {
    "pairs": (Pairs(), odd_batch),
    "tied": (tied(), odd_batch),
    "albert": (Albert(), odd_batch),
    "recomputed": (GPT(dataclasses.replace(SMALL, recompute="full")), batch),
}
STEPS = 3
ORDERS = dict.fromkeys(MODELS, [()]) | {"odd": [((0, 1, 2, 3),), ((3, 0, 1, 2, 3),)]}  # used twice; two backwards


def by_hooks(module, comm):
    shards = shard(module, module.blocks, comm)
    return module, shards, shards


def by_core(stage, module, comm):
    model = stage(module, comm, (block for block in module.blocks))
    return model, model.parameters(), [unit.master for unit in model.units]


def by_engine(stage, module, comm):
    model = stage(module, comm, units=list(module.blocks), **({"prefetch": 0} if stage is Zero3 else {}))
    return model, model.parameters(), [unit.master for unit in model.units]


def by_threads(stage, module, comm):
    return (stage(module, comm, units=list(module.blocks)),)


def short(way):
    """The core of a stage, or the hooks, as a function of (module, comm)."""
    return way if way is by_hooks else functools.partial(by_core, way)


def public(way):
    """What it is compared with."""
    return functools.partial(by_engine, CORES.get(way, Zero3))


def mine(comm, batch):
    return (part.chunk(comm.size)[comm.rank] for part in batch)


def train(comm, wrap, name, orders):
    """Losses, masters, bytes sent, bytes of what stays whole; peaks until the optimizer steps, and in all."""
    module, data = copy.deepcopy(MODELS[name][0]), MODELS[name][1]
    model, parameters, masters = wrap(module, comm)
    optimizer, losses, sent, peaks, until_step = torch.optim.AdamW(parameters, lr=1e-2), [], [], [], []
    for step in range(STEPS):
        before, counters = comm.bytes_sent, sum(state["step"].nbytes for state in optimizer.state.values())
        with Ledger(model, optimizer) as ledger:
            for order in orders:
                loss = model(*mine(comm, data(step)), *order)
                loss.backward()
                losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        sent.append(comm.bytes_sent - before)
        assert not any(getattr(unit, "running", ()) for unit in getattr(model, "units", ()))
        peaks.append(ledger.peak["total"] - counters)  # one for each shard: DDP's public shards are many
        curve = [s for s in ledger.curve if s.phase != "optimizer"]
        until_step.append(max(s["total"] - s["optimizer"] for s in curve))
        until_step.append(max(s["gradients"] for s in curve))
    with torch.no_grad():  # nothing stays whole
        losses.append(model(*mine(comm, data(9)), *orders[0]).item())
    assert len(set(losses)) == len(losses), "something was trained"
    whole = sum(p.untyped_storage().nbytes() for p in module.parameters())
    return (losses, [master.detach() for master in masters], sent, whole), until_step, peaks


ALL = [("gpt", 2), ("odd", 3), ("odd", 1), *((name, 2) for name in list(MODELS)[2:])]


@pytest.mark.parametrize("way", [*CORES, by_hooks], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("name", "size"), ALL)
def test_it_trains_as_the_public_engine(way, name, size):
    if way is by_hooks and name not in test_zero3_by_hooks.MODELS:
        return  # it shares no parameter, and returns no tuple
    orders = [()] if way is by_hooks else ORDERS[name]
    found, expected = (run(size, train, wrap, name, orders) for wrap in (short(way), public(way)))
    for (same, until_step, peaks), (its, its_until_step, its_peaks) in zip(found, expected, strict=True):
        exactly(same, its)
        assert not same[-1] or way not in (CoreZero3, by_hooks), "whole after a forward alone"
        if way is by_hooks:
            assert peaks <= its_peaks
        else:
            assert until_step == its_until_step, "peaks of forward and backward"
            if name == "gpt" or way is not CoreDDP:  # its optimizer steps one tensor a unit, and padding
                assert peaks == its_peaks


def twice_at_once(odd):
    half = odd.blocks[1]
    odd.blocks[1].forward = lambda x: checkpoint(
        lambda h: nn.functional.linear(h, half.weight),
        checkpoint(lambda h: nn.functional.linear(h, half.weight), x, use_reentrant=True),
        use_reentrant=True,
    )


ELSE = ".*: the core does not serve this: take DDP, Zero1, Zero2 or Zero3"
REFUSED = [  # on rank 1; what it does to the model
    (lambda odd: odd.first.weight.requires_grad_(False), rf"first\.weight is frozen, or not FP32 {ELSE}"),
    (lambda odd: odd.half(), rf"first\.weight is frozen, or not FP32 {ELSE}"),
    (lambda odd: odd.register_buffer("mean", torch.zeros(3)), rf"the buffer mean may differ between ranks{ELSE}"),
    (lambda odd: vars(odd).update(chosen=copy.deepcopy(odd.blocks)), "blocks: each must be a module of the wrapped"),
    (twice_at_once, rf"a second gradient for blocks\.1\.weight in one backward{ELSE}"),
    (
        lambda odd: odd.blocks[1].register_forward_hook(lambda _, __, out: out.sum().backward(retain_graph=True)),
        rf"a gradient for blocks\.1\.weight, none for what its unit returned{ELSE}",
    ),
    (
        lambda odd: odd.register_forward_hook(lambda _, __, loss: {"loss": loss}),
        rf"the unit root returned neither a tensor nor a tuple of tensors{ELSE}",
    ),
    (
        lambda odd: setattr(odd.blocks[1], "forward", lambda x: {"x": x}),
        rf"blocks\.1 returned neither a tensor nor a tuple of tensors{ELSE}",
    ),
    (
        lambda odd: setattr(odd.blocks[0], "forward", odd.blocks[0][0].forward),
        rf"no gradient came of blocks\.0\.1\.weight, blocks\.0\.1\.bias, {ELSE}",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_it_does_not_serve_is_refused_by_name(change, words):
    def once(comm):
        odd, data = copy.deepcopy(MODELS["odd"][0]), MODELS["odd"][1]
        change(odd)
        CoreZero3(odd, comm, vars(odd).get("chosen", odd.blocks))(*data(0)).backward()

    with pytest.raises(RankFailed, match=words):
        run(2, once)


def whole(model):
    return [unit.replica.untyped_storage().nbytes() for unit in model.units if unit.module is not model.module]


@pytest.mark.parametrize("wrap", [by_core, by_engine, by_threads])
@pytest.mark.parametrize("again", ["forward", "backward"])
def test_a_backward_that_raised_leaves_nothing(wrap, again):
    """The bucket of DDP, what is owed, and what was gathered are the next backward's own."""

    def once(comm, core, broken):
        stage = core if wrap is by_core else CORES[core]
        model, *_ = wrap(stage, copy.deepcopy(MODELS["odd"][0]), comm)
        data = MODELS["odd"][1]
        error = None
        if broken:
            part = model.module.blocks[0][3 if wrap is by_threads else 0]  # a gradient of the block may be there or not
            handles = [parameter.register_hook(lambda _: 1 / 0) for parameter in part.parameters()]
            loss = model(*data(0))
            next_loss = model(*data(1)) if again == "backward" else None
            with pytest.raises(ZeroDivisionError) as error:  # it holds the frames
                loss.backward()
            for handle in handles:
                handle.remove()
            model.zero_grad()
        if not broken or again == "forward":
            next_loss = model(*data(1))
            assert core is not CoreZero3 or not any(whole(model))
        kept = []
        if wrap is not by_threads:  # the last gradient: all uses of blocks are closed
            model.module.first.weight.register_hook(lambda _: kept.extend(whole(model)))
        next_loss.backward()
        del error
        return [shard.grad for shard in model.parameters()] + [torch.tensor(kept)]

    for core in CORES:
        exactly(run(2, once, core, True), run(2, once, core, False))


@pytest.mark.parametrize("wrap", [by_core, by_engine])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_gather_that_raised_is_done_again(wrap, moment):
    def once(comm, broken):
        stage = CoreZero3 if wrap is by_core else Zero3
        model, *_ = wrap(stage, copy.deepcopy(MODELS["odd"][0]), comm)
        data = MODELS["odd"][1](0)
        loss = model(*data) if moment == "backward" else None
        if broken:
            with pytest.raises(CollectiveMismatch):
                if comm.rank == 1:
                    barrier(comm)
                elif moment == "forward":
                    model(*data)
                else:
                    loss.backward(retain_graph=True)
        loss = model(*data) if loss is None else loss
        loss.backward()
        return [loss.detach(), *(shard.grad for shard in model.parameters())]

    exactly(run(2, once, True), run(2, once, False))


def test_gradients_are_fp32_whatever_the_default_dtype():
    def work(comm):
        model, *_ = by_core(CoreZero2, copy.deepcopy(MODELS["odd"][0]), comm)
        model(*(part.float() for part in MODELS["odd"][1](0))).backward()
        return [shard.grad.dtype for shard in model.parameters()]

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert {*run(2, work)[0]} == {torch.float32}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("core", CORES)
def test_a_block_under_several_names_is_one_unit(core):
    def names(comm):
        engines = by_core(core, Albert(), comm)[0], CORES[core](Albert(), comm)  # given, and by default
        return [[unit.name for unit in engine.units] for engine in engines]

    assert run(1, names) == [[["root", "blocks.0"]] * 2]


def test_what_and_when_hide_nothing_of_each_other():
    """any_model/stages.py: a stage's own file and engine.py never define the same name."""
    for core in CORES:
        assert vars(core).keys() & vars(AnyModel).keys() == {"__module__", "__doc__"}


class Residual(nn.Linear):
    def forward(self, h, x):
        return super().forward(h) + x, x


class PassedOn(nn.Module):
    """Each block returns one of its inputs as well, and the last is computed again in backward, to its end."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(7, 8), nn.ModuleList(Residual(8, 8) for _ in range(3))

    def forward(self, x):
        h = x = torch.tanh(self.first(x))
        for block in self.blocks[:2]:
            h, x = block(h, x)
        with set_checkpoint_early_stop(False):
            return checkpoint(self.blocks[2], h, x, use_reentrant=False)[0]


def evaluate_in_backward(model, x, rank):
    """A block needs its first weights when the model has been evaluated."""

    def evaluates(_):
        with torch.no_grad():
            model(x)

    block = model.module.blocks[1]
    handle = block[1].register_forward_hook(lambda _, __, output: output.register_hook(evaluates) and None)
    loss = model(x).square().mean()
    handle.remove()
    return loss


def forget_a_loss(model, x, rank):
    """The root is whole after the second forward, and the optimizer makes it old."""
    model(x).square().mean().backward()
    return 0 * model(x).detach().requires_grad_().sum()


@pytest.mark.parametrize("core", [*CORES, by_hooks], ids=lambda core: core.__name__)
@pytest.mark.parametrize(
    ("loop", "make"),
    [*((loop, Blocks) for loop in (*PLAIN_LOOPS, forget_a_loss, evaluate_in_backward)), (one_by_one, PassedOn)],
)
def test_other_loops_are_the_public_engines_too(core, loop, make):
    def masters_after(comm, wrap):
        model, parameters, masters = wrap(seeded(make)(), comm)
        optimizer, before = torch.optim.AdamW(parameters, lr=1e-2), comm.bytes_sent
        for step in range(2):
            loop(model, vectors(step).chunk(comm.size)[comm.rank], comm.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent = comm.bytes_sent - before
        return [master.detach().clone() for master in masters], core is by_hooks or sent  # they may gather more often

    if core is by_hooks and (make is PassedOn or loop is evaluate_in_backward):
        return  # a unit that returns a tuple; a forward inside a backward
    exactly(run(2, masters_after, short(core)), run(2, masters_after, public(core)))
