"""A small model of odd shapes, and its training in every stage and on one process."""

import torch
from torch import nn

from minizero import Zero1, Zero2, Zero3
from tests.support.helpers import STAGES, relative_error, run

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


def wrapped(stage, make=None, world_size=2, **options):
    """Decorator: run a function of (model, comm) on ranks, and return what rank 0 returns."""

    def decorate(use):
        return run(world_size, lambda comm: use(stage((make or seeded(Blocks))(), comm, **options), comm))[0]

    return decorate


def decay(name, parameter):
    return "matrices" if parameter.dim() == 2 else "vectors"
