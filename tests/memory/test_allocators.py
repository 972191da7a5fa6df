"""The ledger beside PyTorch's allocator, as its profiler sees it. On a GPU: tests/gpu/test_bytes.py."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from tests.support.profiled import between_operators, profiled

CONFIG = GPTConfig(sequence_length=64, width=128, layers=3, heads=2)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(model, inputs, loss_of, make=SGD, autocast=False):
    optimizer = make(model.parameters())

    def step():
        with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(model(*inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def train_gpt(autocast=False, **options):
    inputs = torch.randint(256, (2, 8, 64), generator=torch.Generator().manual_seed(0)).unbind()
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, **options)
    return train(GPT(CONFIG), inputs, lambda loss: loss, adamw, autocast)


def train_cnn():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    y = torch.arange(16) % 10
    return train(model, [torch.ones(16, 1, 28, 28)], lambda out: F.cross_entropy(out, y))


def by_ledger(model, optimizer, step):
    with Ledger(model, optimizer) as ledger:
        step()
    return ledger.peak["total"] - ledger.curve[0]["total"]


def above_start(measure, step):
    """By one of the two measures of the profiler."""
    start, most = measure(lambda: step)
    return most - start


CASES = {
    "loop": lambda: train_gpt(foreach=False),
    "foreach": lambda: train_gpt(foreach=True),
    "fused": lambda: train_gpt(fused=True),
    "CNN": train_cnn,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_ledgers_peak_is_the_profilers(case):
    model, optimizer, step = CASES[case]()
    step()
    expected = above_start(profiled, step)
    assert expected > 100_000
    assert by_ledger(model, optimizer, step) == pytest.approx(expected, rel=1e-3)


@pytest.mark.accuracy
def test_under_bf16_autocast_operators_take_at_most_5_percent_inside_themselves():
    model, optimizer, step = train_gpt(autocast=True)
    step()
    expected, seen = above_start(profiled, step), by_ledger(model, optimizer, step)
    assert 0.95 * expected <= seen <= expected * 1.001
    assert seen == pytest.approx(above_start(between_operators, step), rel=1e-3)


def test_what_an_lstm_takes_inside_one_operator_is_all_that_the_ledger_does_not_see():
    model, optimizer, step = train(nn.LSTM(32, 64, 2), [torch.ones(20, 8, 32)], lambda out: out[0].sum())
    step()
    seen = by_ledger(model, optimizer, step)
    assert seen == above_start(between_operators, step) < 0.95 * above_start(profiled, step)
