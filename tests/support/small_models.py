"""A small model of odd shapes, and its training in every stage and on one process."""

import contextlib
import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from minizero import Zero1, Zero2, Zero3, recompute
from tests.support.helpers import STAGES, relative_error, run, same

SHARDED = (Zero1, Zero2, Zero3)
OPTIONS = {
    "one thing at a time": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "kept until backward": {"reshard_after_forward": False},
    "offload": {"offload": True},
    "offload, one thing at a time": {"offload": True, "prefetch": 0},
    "groups of 2": {"sharding_factor": 2},
    "groups of 2, offload, kept": {"sharding_factor": 2, "offload": True, "reshard_after_forward": False},
    "groups of 1": {"sharding_factor": 1},
}
# All engines; those in groups sum in another order, and need 4 ranks.
ENGINES = {stage.__name__: stage for stage in STAGES}
ENGINES |= {f"Zero3, {name}": functools.partial(Zero3, **options) for name, options in OPTIONS.items()}
SAME_BITS = [engine for name, engine in ENGINES.items() if "groups" not in name]


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.0)


def nothing(optimizer):
    """No learning rate scheduler."""


def fit(comm, stage, make, steps=2, forward=None, dtype=None, schedule=nothing, optimizer=ADAMW, **options):
    """Train `make()` on random vectors, each rank on its part of a batch of 12; the full state.

    In the second step an engine knows the order of its units, and its replicas are old.
    """
    model = stage(make(), comm, dtype=dtype, **options)
    descend(model, steps, forward, schedule, optimizer, lambda x: {comm.rank: x.chunk(comm.size)[comm.rank]})
    return model.gather_state_dict()


def vectors(step):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step))


def fit_plain(make, steps=2, forward=None, parts=1, schedule=nothing, optimizer=ADAMW):
    """The same on one process; with `parts`, the mean over that many ranks' losses."""
    module = make()
    descend(module, steps, forward, schedule, optimizer, lambda x: dict(enumerate(x.chunk(parts))))
    return module.state_dict()


def descend(model, steps, forward, schedule, optimizer, parts_of):
    """parts_of: of a batch, the parts that are computed here, by rank."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(trained)
    scheduler = schedule(optimizer)
    for step in range(steps):
        parts = parts_of(vectors(step))
        for rank, x in parts.items():
            loss = forward(model, x, rank) if forward else model(x).square().mean()
            if loss is not None:  # else the loop has gone back itself
                (loss / len(parts)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def check(make, world_size=None, forward=None, parts=1, stages=STAGES, **options):
    """All stages agree with one process, and with each other bit for bit."""
    world_size = world_size or max(parts, 2)
    expected = fit_plain(make, forward=forward, parts=parts, **options)
    states = [run(world_size, fit, stage, make, forward=forward, **options)[-1] for stage in stages]
    for stage, state in zip(stages, states):
        assert state.keys() == expected.keys()
        assert relative_error(state, expected) < 1e-5, stage
        assert same(state, states[0]), f"{stage}: not bit-identical"
    assert relative_error(expected, make().state_dict()) > 1e-4  # something was trained


def on_ranks(stages=STAGES, make=None, **options):
    """Decorator: a test that calls a function of (model, comm) on two ranks, in each of these stages."""

    def decorate(use):
        @pytest.mark.parametrize("stage", stages)
        def test(stage):
            wrapped(stage, make, **options)(use)

        return test

    return decorate


def refused(words, *uses, error=RuntimeError):
    """Each of these calls raises an error with these words."""
    for use in uses:
        with pytest.raises(error, match=words):
            use()


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

    def forward(self, x, order=(0, 1, 2), call=lambda block, x: block(x)):
        for index in order:
            x = x + call(self.blocks[index], x)
        return self.out(x)


def wrapped(stage, make=None, world_size=2, **options):
    """Decorator: run a function of (model, comm) on ranks, and return what rank 0 returns."""

    def decorate(use):
        return run(world_size, lambda comm: use(stage((make or seeded(Blocks))(), comm, **options), comm))[0]

    return decorate


def decay(name, parameter):
    return "matrices" if parameter.dim() == 2 else "vectors"


# Loops: what may stand in a step, before the backward of the loss that is returned.


def twice(model, x, rank):
    return model(x, order=(0, 1, 0, 2, 1)).square().mean()


def several_forwards(model, x, rank):
    with torch.no_grad():
        model(x)
    return model(x).square().mean() + model(x.flip(0), order=(2, 1)).mean() + model(-x).mean()


def one_by_one(model, x, rank):
    """Two forwards, then two backwards, through one graph twice."""
    first, second = model(x).square().mean(), model(2 * x).mean()
    first.backward(retain_graph=True)
    first.backward()
    return second


def one_graph_twice(model, x, rank):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


def held_back(model, x, rank):
    """A backward that sends nothing, and one that does."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        model(3 * x).mean().backward()
    return model(x, order=(0, 2)).square().mean()


def dropped(model, x, rank):
    """By zero_grad: an average, and what no_sync has gathered."""
    model(3 * x).mean().backward()
    model.zero_grad(set_to_none=False)
    model(x).mean().backward()
    model.zero_grad()
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        model(3 * x).mean().backward()
    model.zero_grad()
    return model(x).square().mean()


def adapters_off(model, x, rank):
    """For a reference, as PEFT does."""
    adapters = list(getattr(model, "module", model).blocks[1].parameters())
    trains = [parameter.requires_grad for parameter in adapters]
    [parameter.requires_grad_(False) for parameter in adapters]
    with torch.no_grad():
        reference = model(x)
    [parameter.requires_grad_(train) for parameter, train in zip(adapters, trains)]
    return (model(x) - 2 * reference).square().mean()


def evaluation_between(model, x, rank):
    model(x)  # without a backward
    with torch.no_grad():
        expected = model(x)
    model.eval()
    assert torch.equal(model(x), expected)
    model.train()
    return model(x).square().mean()


def broken_off(model, x, rank):
    out = model(x)
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    return model(x).square().mean()


def broken_off_and_dropped(model, x, rank):
    """A loop that runs out of memory drops the whole window. Of the gradients some have come by then, and some not."""
    model(x).square().mean().backward()
    block = getattr(model, "module", model).blocks[1]
    hook = block.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        model(2 * x).square().mean().backward()
    hook.remove()
    model.zero_grad()
    return model(x).square().mean()


def raises_in_forward(model, x, rank):
    with pytest.raises(TypeError):
        model(x, order=(0, "no such block"))
    if isinstance(model, Zero3):
        assert all(p.untyped_storage().nbytes() == 0 for p in model.module.parameters()), "something is gathered"
    return model(x).square().mean()


def recomputed(model, x, rank):
    """By both packages; backward comes through the units' forward again."""
    theirs = model(x, call=functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    return (theirs + model(x, order=(0, 0, 1, 2), call=recompute.checkpoint)).square().mean()


LOOPS = (twice, several_forwards, one_by_one, held_back, dropped, broken_off_and_dropped, raises_in_forward)
EDGES = (one_graph_twice, adapters_off, evaluation_between, broken_off, recomputed)
PLAIN_LOOPS = (twice, several_forwards, one_by_one, one_graph_twice, evaluation_between)  # of forwards and backwards
