"""Replicas are refreshed by all ranks or by none, whoever writes the shards, and whatever a rank holds of them."""

import functools

import pytest
import torch
from torch import nn

from minizero import DDP, Zero1, Zero2, Zero3
from tests.support.helpers import run, slow
from tests.support.small_models import decay

WORLD_SIZE = 8
KEPT = functools.partial(Zero3, prefetch=0, reshard_after_forward=False)  # a forward alone leaves replicas behind
ENGINES = [DDP, Zero1, Zero2, KEPT, functools.partial(KEPT, sharding_factor=4)]
ENGINES += [functools.partial(stage, dtype=torch.bfloat16) for stage in (Zero1, KEPT)]


class Tiny(nn.Module):
    """Units of fewer elements than ranks: most ranks hold padding only, or nothing of a group."""

    def __init__(self, start=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.empty(1))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(1.0, parameter.numel() + 1).view(parameter.shape) / 8 + i / 4 + start)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.gain


X = torch.ones(1, 2)


def plain(state, dtype):
    """What one process computes with these parameters."""
    model = Tiny()
    model.load_state_dict(state)
    with torch.no_grad():
        return model.to(dtype)(X.to(dtype))


def double(shards):
    with torch.no_grad():
        for shard in shards:
            shard.mul_(2)


def step_of(make, group):
    def step(model, groups, state):
        model(X).float().sum().backward()
        optimizer = make(groups[group])
        model(X)  # what runs between backward and the step leaves nothing behind
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(group, **options):
    return torch.optim.AdamW(group, lr=0.5, **options)


WRITERS = {
    "everything": lambda model, groups, state: double(model.parameters()),
    "fused SGD over vectors": step_of(lambda group: torch.optim.SGD(group, lr=0.5, fused=True), "vectors"),
    "load_full_state_dict": lambda model, _, state: model.load_full_state_dict({n: 2 * v for n, v in state.items()}),
    "one group": lambda model, groups, state: double(groups["vectors"]),
    "one unit": lambda model, *_: double(p for name, p in model.named_parameters() if name.startswith("blocks.2")),
    "AdamW over matrices": step_of(adamw, "matrices"),
    "AdamW, one by one, over vectors": step_of(functools.partial(adamw, foreach=False), "vectors"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("write", [*list(WRITERS)[:3], *slow(*list(WRITERS)[3:])])
def test_all_ranks_see_that_the_shards_were_written(engine, write):
    def work(comm):
        model = engine(Tiny(), comm, group_by=decay)
        state, groups = model.gather_state_dict(), model.parameter_groups()
        with torch.no_grad():
            before, sent = model(X), comm.bytes_sent
            assert torch.equal(model(X), before) and (comm.bytes_sent == sent or isinstance(model, Zero3))
        model(X)
        WRITERS[write](model, groups, state)
        with torch.no_grad():
            return model.module(X.to(model.dtype)), model(X), before, model.gather_state_dict()

    for inner, found, before, state in run(WORLD_SIZE, work):
        assert torch.equal(found, plain(state, found.dtype)) and not torch.equal(found, before)
        assert torch.equal(inner, found)
