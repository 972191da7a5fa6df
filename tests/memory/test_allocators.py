"""The ledger beside the allocators: PyTorch's, as its profiler sees it, the operating system's, a GPU's."""

import functools
import json
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from tests.bench.allocators import Profiled, compare, cuda_peak, profile_step, read_profile
from tests.support.profiled import profiled

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


def train_gpt(autocast=False, device="cpu", **options):
    inputs = torch.randint(256, (2, 8, 64), generator=torch.Generator().manual_seed(0)).to(device).unbind()
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, **options)
    return train(GPT(CONFIG).to(device), inputs, lambda loss: loss, adamw, autocast)


def train_cnn():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    y = torch.arange(16) % 10
    return train(model, [torch.ones(16, 1, 28, 28)], lambda out: F.cross_entropy(out, y))


def oracle(step):
    """The peak above the start of a step, straight from the profiler's memory events, and no operator marked."""
    start, peak = profiled(lambda: step)
    return peak - start


def watched(model, optimizer, step):
    with Ledger(model, optimizer) as ledger:
        step()
    return ledger


def by_ledger(model, optimizer, step):
    ledger = watched(model, optimizer, step)
    return ledger.peak["total"] - ledger.curve[0]["total"]


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
    expected = oracle(step)
    assert expected > 100_000
    assert by_ledger(model, optimizer, step) == pytest.approx(expected, rel=1e-3)
    profiled = profile_step(step)
    assert profiled.peak == pytest.approx(expected, rel=1e-3)
    assert profiled.visible <= profiled.peak


@pytest.mark.accuracy
def test_under_bf16_autocast_the_gap_is_at_most_5_percent_and_operators_are_named():
    model, optimizer, step = train_gpt(autocast=True)
    step()
    expected, seen, profiled = oracle(step), by_ledger(model, optimizer, step), profile_step(step)
    assert 0.95 * expected <= seen <= expected * 1.001
    assert profiled.peak == pytest.approx(expected, rel=1e-3) and profiled.visible == pytest.approx(seen, rel=1e-3)
    # Of which operators is up to the processor: with AVX-512 oneDNN reorders the matrices of aten.mm, say.
    assert profiled.scratch and all(name.startswith("aten.") for name in profiled.scratch)


def test_what_an_lstm_takes_inside_one_operator_is_reported_by_name(monkeypatch):
    monkeypatch.setattr("tests.bench.allocators.RESET", "/nowhere/clear_refs")
    model, optimizer, step = train(nn.LSTM(32, 64, 2), [torch.ones(20, 8, 32)], lambda out: out[0].sum())
    step()
    expected, seen, profiled = oracle(step), by_ledger(model, optimizer, step), profile_step(step)
    assert profiled.peak == expected
    assert profiled.visible == seen
    assert "rnn" in profiled.operator or "lstm" in profiled.operator
    assert expected - seen == profiled.scratch[profiled.operator] > 0.05 * expected
    found = compare(watched(model, optimizer, step), step, torch.device("cpu"))
    assert (found["ledger"], found["profiler"], found["operator"]) == (seen, expected, profiled.operator)
    assert found["process"] is None  # where nothing tells it


def test_scratch_is_what_one_call_took_and_gave_back():
    happened = [
        ("earlier", 1000),
        ("measured step", 0),
        ("a", 0), ("", 50), ("", 30), ("", -30), ("end of a", 0),  # 30 of scratch, 50 of output
        ("", 20),  # between operators
        ("b", 0), ("", -70), ("", 60), ("end of b", 0),  # frees before it takes: never more than at its start
        ("a", 0), ("", 100), ("", -90), ("end of a", 0),  # 90
        ("end of measured step", 0),
        ("later", 5000),
    ]  # fmt: skip
    found = read_profile([(time, name, change) for time, (name, change) in enumerate(happened)])
    assert found == Profiled(peak=160, visible=70, operator="a", scratch={"a": 90})


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps a reserve")
def test_resident_memory_rises_by_what_the_ledger_counts():
    """In a process of its own, whose C library gives memory back at once."""
    program = "import json; from tests.bench.allocators import the_demo; print(json.dumps(the_demo()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    if found["process"] is None:
        pytest.skip("no right to reset the peak")
    assert found["process"] == pytest.approx(found["ledger"], rel=0.03)


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_has_handed_out_what_the_ledger_counts():
    model, optimizer, step = train_gpt(device="cuda", foreach=True)
    step()
    expected, seen = oracle(step), by_ledger(model, optimizer, step)
    assert seen == pytest.approx(expected, rel=0.05) and seen <= expected * 1.001
    allocated, reserved = cuda_peak(step, torch.device("cuda"))
    assert seen <= allocated * 1.001 and allocated <= reserved * 1.001
    assert allocated == pytest.approx(expected, rel=0.02)  # its blocks are multiples of 512 bytes
