"""What several tests need: small models, batches and a training loop."""

import functools

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, GPTConfig, World, Zero1, Zero2, Zero3

STAGES = (DDP, Zero1, Zero2, Zero3)
SLOW = pytest.mark.accuracy  # of one row of a test
SMALL = GPTConfig(vocabulary=64, sequence_length=16, width=32, layers=3, heads=2)


def slow(*rows, mark=SLOW):
    """Rows of a test's table, marked."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark) for row in rows]


soak = functools.partial(slow, mark=pytest.mark.soak)


def batch(step, size=12, config=SMALL):
    """A global batch of random tokens: x and y."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(config.vocabulary, (size, config.sequence_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def steps(model, optimizer, which, data=batch, clip=None):
    """Train for these steps, on a rank with its part of each batch; the losses. model(*batch) is the loss."""
    losses, comm = [], getattr(model, "comm", None)
    for step in which:
        loss = model(*(part.chunk(comm.size)[comm.rank] if comm else part for part in data(step)))
        loss.backward()
        if clip is not None:
            model.clip_grad_norm_(clip) if comm else nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(comm, stage, number, make=lambda: GPT(SMALL), optimizer=torch.optim.AdamW, dtype=None, data=batch, **options):
    """Train like everybody; returns this rank's losses, the full parameters and the bytes of the last step."""
    clip = options.pop("clip", None)
    model = stage(make(), comm, dtype=dtype)
    optimizer = optimizer(model.parameters(), **({"lr": 1e-3} | options))
    losses, before = steps(model, optimizer, range(number - 1), data, clip), comm.bytes_sent
    losses += steps(model, optimizer, [number - 1], data, clip)
    sent = comm.bytes_sent - before
    return losses, model.gather_state_dict(), sent


def plain(number, make=lambda: GPT(SMALL), optimizer=torch.optim.AdamW, clip=None, **options):
    """The same on one process, with the whole batch."""
    model = make()
    optimizer = optimizer(model.parameters(), **({"lr": 1e-3} | options))
    return steps(model, optimizer, range(number), clip=clip), model.state_dict()


def relative_error(state, other):
    """The largest ‖Δ‖/‖p‖ over parameters."""
    return max(float((state[n] - p).norm() / p.norm().clamp(min=1e-12)) for n, p in other.items())


def same(state, other):
    """The same names, and of each the same bits."""
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0)  # of nested lists, too


def run(world_size, fn, *args, **kwargs):
    """On threads of this process."""
    return World(world_size, device="cpu").run(fn, *args, **kwargs)
