"""Stage 3 by four hooks: what is whole when; what it does not serve, it refuses. How it trains: test_core.py."""

import copy

import pytest
import torch
from torch import nn

from minizero import GPT
from minizero.engines.zero3_by_hooks import shard
from minizero.ranks.errors import CollectiveMismatch, RankFailed
from tests.support.helpers import SMALL, batch, run


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


def use_a_part(model):
    model.blocks[0].forward = lambda x: model.blocks[0][0](x)


REFUSED = [  # what happens to the model before
    (lambda m: m.blocks[0][1].weight.requires_grad_(False), RuntimeError, "hook on a tensor that doesn't require grad"),
    (lambda m: setattr(m.blocks[0][3], "bias", m.blocks[3][1].bias), ValueError, "two blocks share a parameter: use Z"),
    (lambda m: setattr(m.first, "bias", m.blocks[3][1].bias), ValueError, r"use Zero3 \(or a block and"),
    (use_a_part, RuntimeError, r"blocks\.0: only 2 of its parameters got a gradient in backward: use Zero3"),
    # Blocks 0 and 3 have the same number of parameters, and ranks 0 and 1 exchange them.
    (
        lambda m: m.blocks.__setitem__(3, copy.deepcopy(m.blocks[0])),
        CollectiveMismatch,
        r"label=blocks\.[03]; .* label=blocks\.[03]: did",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_what_it_does_not_serve_is_an_error(change, error, words):
    def job(comm):
        model = copy.deepcopy(MODELS["odd"][0])
        change(model)
        shard(model, model.blocks, comm)
        for _ in range(2):
            model(*odd_batch(0), (3, 0) if comm.rank and error is CollectiveMismatch else (0, 3)).backward()

    with pytest.raises(RankFailed, match=words) as failure:
        run(2, job)
    assert type(failure.value.__cause__) is error
