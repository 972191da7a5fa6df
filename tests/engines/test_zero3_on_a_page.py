"""Stage 3 without hooks is plain training; a rank holds its shard, and sends what stage 3 sends."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.engines.zero3_on_a_page import shard, step
from minizero.memory import Ledger
from tests.support.helpers import relative_error, run

WIDTHS = (7, *[64] * 9, 3)
STEPS, RATE = 3, 0.05
LAYERS = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(WIDTHS, WIDTHS[1:])]
TOTAL = sum(p.numel() for layer in LAYERS for p in layer.parameters())


def data(number, size):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, WIDTHS[0], generator=generator), torch.randn(size, WIDTHS[-1], generator=generator)


def plain(size):
    """Losses of each N-th of the batch, and the parameters after the last step."""
    model = nn.Sequential(*copy.deepcopy(LAYERS))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for number in range(STEPS):
        x, y = data(number, 4 * size)
        with torch.no_grad():
            losses.append([F.mse_loss(model(a), b).item() for a, b in zip(x.chunk(size), y.chunk(size))])
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return losses, [torch.cat([p.detach().flatten() for p in layer.parameters()]) for layer in model]


def on_a_page(comm):
    layers = copy.deepcopy(LAYERS)
    shards = [shard(layer, comm) for layer in layers]
    losses, before = [], comm.bytes_sent
    with Ledger() as ledger:
        for number in range(STEPS):
            x, y = (part.chunk(comm.size)[comm.rank] for part in data(number, 4 * comm.size))
            losses.append(step(layers, shards, x.clone(), lambda out, y=y: F.mse_loss(out, y), comm, RATE))
    held = sum(p.untyped_storage().nbytes() for layer in layers for p in layer.parameters())
    return losses, shards, (comm.bytes_sent - before) / STEPS / 4, held, ledger.peak["total"]


@pytest.mark.parametrize("size", [1, 3])
def test_it_is_plain_training_with_one_layer_whole_at_a_time(size):
    losses, parameters = plain(size)
    found = run(size, on_a_page)
    for rank, (its, _, sent, held, peak) in enumerate(found):
        assert its == pytest.approx([step[rank] for step in losses], rel=1e-5)
        assert held == 0, "between the steps a rank has its shards, and no layer has parameters"
        # Gathered twice and reduced once: 3Ψ (N-1)/N, a little more where a layer is padded.
        assert 3 * TOTAL * (size - 1) / size <= sent <= 3 * (TOTAL + len(WIDTHS) * size) * (size - 1) / size
        # Beside its shards a rank holds one layer, or its gradient before and in the ring, and few activations.
        largest = 4 * (WIDTHS[1] * WIDTHS[2] + WIDTHS[2])
        assert size == 1 or peak < 5 * largest < 4 * TOTAL * 2 / 3
    for number, expected in enumerate(parameters):
        mine = torch.cat([shards[number] for _, shards, *_ in found])
        assert relative_error({"": mine[: len(expected)]}, {"": expected}) < 1e-6
        assert len(mine) - len(expected) < size, "a rank keeps its N-th, not everything"
