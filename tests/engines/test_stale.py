"""Replicas are refreshed by all ranks or by none, whoever writes the shards, and whatever a rank holds of them."""

import pytest
import torch
from torch import nn

from minizero import DDP, Zero1, Zero2, Zero3
from tests.support.helpers import run
from tests.support.small_models import decay

WORLD_SIZE = 8
KEPT = {"prefetch": 0, "reshard_after_forward": False}  # a forward without backward leaves replicas behind
ENGINES = [(DDP, {}), (Zero1, {}), (Zero2, {}), (Zero3, KEPT), (Zero3, KEPT | {"sharding_factor": 4})]
ENGINES += [(Zero1, {"dtype": torch.bfloat16}), (Zero3, KEPT | {"dtype": torch.bfloat16})]
engines = pytest.mark.parametrize("stage, options", ENGINES, ids=lambda part: getattr(part, "__name__", None))


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


def everything(model, groups, state):
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(2)


def one_group(model, groups, state):
    with torch.no_grad():
        for shard in groups["vectors"]:
            shard.mul_(2)


def one_unit(model, groups, state):
    with torch.no_grad():
        for name, shard in model.named_parameters():
            if name.startswith("blocks.2"):
                shard.mul_(2)


def step_of(make, group):
    def step(model, groups, state):
        model(X).float().sum().backward()
        optimizer = make(groups[group])
        optimizer.step()
        optimizer.zero_grad()

    return step


def load(model, groups, state):
    model.load_full_state_dict({name: 2 * value for name, value in state.items()})


WRITERS = {
    "everything": everything,
    "one group": one_group,
    "one unit": one_unit,
    "AdamW over matrices": step_of(lambda group: torch.optim.AdamW(group, lr=0.5), "matrices"),
    "fused SGD over vectors": step_of(lambda group: torch.optim.SGD(group, lr=0.5, fused=True), "vectors"),
    "AdamW, one by one, over vectors": step_of(
        lambda group: torch.optim.AdamW(group, lr=0.5, foreach=False), "vectors"
    ),
    "load_full_state_dict": load,
}


@pytest.mark.accuracy
@engines
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_all_ranks_see_that_the_shards_were_written(stage, options, write):
    def work(comm):
        model = stage(Tiny(), comm, group_by=decay, **options)
        state, groups = model.gather_state_dict(), model.parameter_groups()
        with torch.no_grad():
            before, sent = model(X), comm.bytes_sent
            assert torch.equal(model(X), before) and (comm.bytes_sent == sent or stage is Zero3)
        model(X)
        write(model, groups, state)
        with torch.no_grad():
            return model(X), before, model.gather_state_dict()

    for found, before, state in run(WORLD_SIZE, work):
        assert torch.equal(found, plain(state, found.dtype)) and not torch.equal(found, before)
