"""The core trains as the public engines do, bit for bit and byte for byte; what it does not serve, it refuses."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minizero import DDP, Zero1, Zero2, Zero3
from minizero.engines.any_model.engine import AnyModel
from minizero.engines.ddp import CoreDDP
from minizero.engines.zero1 import CoreZero1
from minizero.engines.zero2 import CoreZero2
from minizero.engines.zero3 import CoreZero3
from minizero.engines.zero3_by_hooks import shard
from minizero.memory import Ledger
from minizero.ranks.errors import RankFailed
from tests.engines import test_zero3_by_hooks
from tests.engines.test_zero3_by_hooks import odd_batch
from tests.support.helpers import run
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


def tied():
    """One bias is of the root and of two blocks, another of two blocks."""
    odd = copy.deepcopy(test_zero3_by_hooks.MODELS["odd"][0])
    odd.first.bias = odd.blocks[0][3].bias = odd.blocks[3][1].bias
    odd.blocks[0][0].bias = odd.blocks[3][1].extra = nn.Parameter(torch.ones(7))
    odd.blocks[3][1].register_forward_hook(lambda linear, _, output: output + linear.extra)
    return odd


MODELS = test_zero3_by_hooks.MODELS | {"pairs": (Pairs(), odd_batch), "tied": (tied(), odd_batch)}
STEPS = 3
ORDERS = {
    "gpt": [()],
    "pairs": [()],
    "tied": [()],
    "odd": [((0, 1, 2, 3),), ((3, 0, 1, 2, 3),)],
}  # a block used twice; two backwards in a step


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


def train(comm, wrap, stage, name):
    """Losses, masters, bytes sent, the peaks until the optimizer steps, what stays whole, and the peaks."""
    data = MODELS[name][1]
    model, parameters, masters = wrap(stage, copy.deepcopy(MODELS[name][0]), comm)
    optimizer, losses, sent, peaks, until_step = torch.optim.AdamW(parameters, lr=1e-2), [], [], [], []
    for step in range(STEPS):
        before, counters = comm.bytes_sent, sum(state["step"].nbytes for state in optimizer.state.values())
        with Ledger(model, optimizer) as ledger:
            for order in ORDERS[name]:
                loss = model(*(part.chunk(comm.size)[comm.rank] for part in data(step)), *order)
                loss.backward()
                losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        sent.append(comm.bytes_sent - before)
        peaks.append(ledger.peak["total"] - counters)  # one for each shard: DDP's public shards are many
        curve = [s for s in ledger.curve if s.phase != "optimizer"]
        until_step.append(max(s["total"] - s["optimizer"] for s in curve))
        until_step.append(max(s["gradients"] for s in curve))
    with torch.no_grad():  # nothing stays whole
        losses.append(model(*(part.chunk(comm.size)[comm.rank] for part in data(9)), *ORDERS[name][0]).item())
    whole = sum(unit.replica.untyped_storage().nbytes() for unit in model.units)
    return losses, [master.detach() for master in masters], sent, until_step, whole, peaks


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
@pytest.mark.parametrize(("name", "size"), [("gpt", 2), ("odd", 3), ("odd", 1), ("pairs", 2), ("tied", 2)])
def test_it_trains_as_the_public_engine(core, name, size):
    for mine, its in zip(
        run(size, train, by_core, core, name), run(size, train, by_engine, CORES[core], name), strict=True
    ):
        assert mine[0] == its[0] and len(set(mine[0])) == len(mine[0]), "losses"
        assert all(torch.equal(a, b) for a, b in zip(mine[1], its[1], strict=True)), "parameters"
        assert mine[2] == its[2], "bytes sent"
        assert mine[3] == its[3], "peaks of forward and backward"
        if name == "gpt" or core is not CoreDDP:  # its optimizer steps one tensor a unit, and padding
            assert mine[5] == its[5], "peaks"
        assert mine[4] == its[4] and (core is not CoreZero3 or not mine[4]), "whole after a forward alone"


def frozen(odd, _):
    odd.first.weight.requires_grad_(False)


def a_dict_of_the_model(odd, _):
    odd.register_forward_hook(lambda _, __, loss: {"loss": loss})


def twice_at_once(odd, _):
    half = odd.blocks[1]
    odd.blocks[1].forward = lambda x: checkpoint(
        lambda h: nn.functional.linear(h, half.weight),
        checkpoint(lambda h: nn.functional.linear(h, half.weight), x, use_reentrant=True),
        use_reentrant=True,
    )


def half(odd, _):
    odd.half()


def with_a_buffer(odd, _):
    odd.register_buffer("mean", torch.zeros(3))


def a_dict(odd, _):
    odd.blocks[1].forward = lambda x: {"x": x}


def a_part_only(odd, comm):
    if comm.rank == 1:
        odd.blocks[0].forward = lambda x: odd.blocks[0][0](x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (frozen, r"first\.weight is frozen, or not FP32 .*: the core does not serve this"),
        (twice_at_once, r"a second gradient for blocks\.1\.weight in one backward: the core does not serve this"),
        (half, r"first\.weight is frozen, or not FP32"),
        (a_dict_of_the_model, "the model returned neither a tensor nor a tuple of tensors"),
        (with_a_buffer, "the buffer mean may differ between ranks"),
        (a_dict, r"blocks\.1 returned neither a tensor nor a tuple of tensors: .* take DDP, Zero1, Zero2 or Zero3"),
        (
            a_part_only,
            r"no gradient came of blocks\.0\.1\.weight, blocks\.0\.1\.bias, .*: the core does not serve this",
        ),
    ],
)
def test_what_it_does_not_serve_is_refused_by_name(change, words):
    def once(comm):
        odd, data = copy.deepcopy(MODELS["odd"][0]), MODELS["odd"][1]
        change(odd, comm)
        CoreZero3(odd, comm, odd.blocks)(*data(0)).backward()

    with pytest.raises(RankFailed, match=words):
        run(2, once)


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
            held = [unit.replica.untyped_storage().nbytes() for unit in model.units if unit.module is not None]
            assert core is not CoreZero3 or not any(held)
        next_loss.backward()
        del error
        return [shard.grad for shard in model.parameters()]

    for core in CORES:
        for mine, its in zip(run(2, once, core, True), run(2, once, core, False), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


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


def forget_a_loss(model, x, rank):
    """The root is whole after the second forward, and the optimizer makes it old."""
    model(x).square().mean().backward()
    return 0 * model(x).detach().requires_grad_().sum()


@pytest.mark.parametrize("core", [*CORES, by_hooks], ids=lambda core: core.__name__)
@pytest.mark.parametrize(
    ("loop", "make"), [*((loop, Blocks) for loop in (*PLAIN_LOOPS, forget_a_loss)), (one_by_one, PassedOn)]
)
def test_other_loops_are_the_public_engines_too(core, loop, make):
    def masters_after(comm, wrap):
        model, parameters, masters = wrap(seeded(make)(), comm)
        optimizer, before = torch.optim.AdamW(parameters, lr=1e-2), comm.bytes_sent
        for step in range(2):
            loop(model, vectors(step).chunk(comm.size)[comm.rank], comm.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [master.detach().clone() for master in masters], comm.bytes_sent - before

    if core is by_hooks and make is PassedOn:
        return  # a unit that returns a tuple
    mine = run(2, masters_after, core if core is by_hooks else functools.partial(by_core, core))
    its = run(2, masters_after, functools.partial(by_engine, CORES.get(core, Zero3)))
    for (masters, sent), (others, its_sent) in zip(mine, its, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(masters, others, strict=True))
        assert sent == its_sent or core is by_hooks
