"""Stage 3 by four hooks is `Zero3(prefetch=0)`, bit for bit and byte for byte; what it does not serve, it refuses.

Other loops: test_core.py.
"""

import copy

import pytest
import torch
from torch import nn

from minizero import GPT, Zero3
from minizero.engines.zero3_by_hooks import shard
from minizero.memory import Ledger
from minizero.ranks.errors import CollectiveMismatch, RankFailed
from tests.support.helpers import SMALL, batch, run

STEPS = 2


class Odd(nn.Module):
    """Sizes that neither 2 nor 3 divides. Of the blocks one has a single parameter, and one has none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        first = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7))
        self.blocks = nn.ModuleList([first, nn.Linear(7, 7, bias=False)])
        self.blocks += [nn.Tanh(), nn.Sequential(nn.Linear(7, 29), nn.Linear(29, 7))]

    def forward(self, x, y, order=(0, 1, 2, 3)):
        x = self.first(x)
        for number in order:
            x = x + self.blocks[number](x)
        return (x - y).square().mean()


def odd_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 5, generator=generator), torch.randn(12, 7, generator=generator)


MODELS = {"gpt": (GPT(SMALL), batch), "odd": (Odd(), odd_batch)}


def by_hooks(model, comm):
    return model, shard(model, model.blocks, comm)


def by_the_engine(model, comm):
    model = Zero3(model, comm, prefetch=0, units=list(model.blocks))
    return model, list(model.parameters())


def train(comm, way, name):
    """Losses, shards, bytes sent in each step, the peak of the last step, and bytes of whole units between steps."""
    model, data = copy.deepcopy(MODELS[name][0]), MODELS[name][1]
    parameters = list(model.parameters())
    model, shards = way(model, comm)
    optimizer, losses, sent = torch.optim.AdamW(shards, lr=1e-2), [], []
    for step in range(STEPS):
        x, y = (part.chunk(comm.size)[comm.rank] for part in data(step))
        before = comm.bytes_sent
        with Ledger() as ledger:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(comm.bytes_sent - before)
    return losses, [s.detach() for s in shards], sent, ledger.peak["total"], parameters


@pytest.mark.parametrize(("name", "size"), [("gpt", 2), ("odd", 2), ("odd", 3), ("odd", 1)])
def test_it_is_the_engine_without_prefetch(name, size):
    for mine, its in zip(run(size, train, by_hooks, name), run(size, train, by_the_engine, name)):
        assert mine[0] == its[0] and len(set(mine[0])) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(mine[1], its[1], strict=True))
        assert mine[2] == its[2]
        assert mine[3] <= its[3]
        assert all(p.grad is None and not p.untyped_storage().nbytes() for p in mine[4]), "something stays whole"


def test_at_most_the_root_and_one_block_are_whole():
    """Looked at whenever something is sent: then a unit is being gathered, or was just released."""

    def whole_units(comm):
        model = copy.deepcopy(MODELS["gpt"][0])
        shard(model, model.blocks, comm)
        units = [model.embedding, *model.blocks]
        seen = []

        def look(operation, *_):
            storages = [next(unit.parameters()).untyped_storage() for unit in units]
            seen.append((operation, [number for number, storage in enumerate(storages) if storage.nbytes()]))

        comm.observers.append(look)
        model(*batch(0)).backward()
        with torch.no_grad():
            model(*batch(0))
        look("the end")
        return seen

    gather, reduce = "all_gather", "reduce_scatter"
    forward = [(gather, [0]), (gather, [0, 1]), (gather, [0, 2]), (gather, [0, 3])]
    backward = [(gather, [0, 3]), (reduce, [0]), (gather, [0, 2]), (reduce, [0]), (gather, [0, 1]), (reduce, [0])]
    seen, _ = run(2, whole_units)
    assert seen == [*forward, *backward, (reduce, []), *forward, ("the end", [])]


def freeze(model, comm):
    model.blocks[0][1].weight.requires_grad_(False)
    shard(model, model.blocks, comm)


def share(model, comm):
    model.blocks[0][3].bias = model.blocks[3][1].bias
    shard(model, model.blocks, comm)


def use_a_part(model, comm):
    model.blocks[0].forward = lambda x: model.blocks[0][0](x)
    shard(model, model.blocks, comm)
    for _ in range(2):
        model(*odd_batch(0)).backward()


def branch(model, comm):
    """Blocks 0 and 3 have the same number of parameters, and ranks 0 and 1 exchange them."""
    model.blocks[3] = copy.deepcopy(model.blocks[0])
    shard(model, model.blocks, comm)
    model(*odd_batch(0), (0, 3) if comm.rank else (3, 0))


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (freeze, RuntimeError, "hook on a tensor that doesn't require gradient"),
        (share, ValueError, "two blocks share a parameter: use Zero3"),
        (use_a_part, RuntimeError, r"blocks\.0: only 2 of its parameters got a gradient in backward: use Zero3"),
        (branch, CollectiveMismatch, r"label=blocks\.[03]; .* label=blocks\.[03]: did"),
    ],
)
def test_what_it_does_not_serve_is_an_error(what, error, words):
    with pytest.raises(RankFailed, match=words) as failure:
        run(2, lambda comm: what(copy.deepcopy(MODELS["odd"][0]), comm))
    assert type(failure.value.__cause__) is error
