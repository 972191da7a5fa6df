"""Table 1 and the claims around it: mixed precision trains as FP32 does, and each remedy is needed somewhere."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minizero.mixed_precision import experiments, report, step_memory, table1
from minizero.models import images
from minizero.models.networks import NETWORKS
from precision.formats import FP16

TINY = table1.Runs(("alexnet", "gpt"), seeds=2, steps=3, language_steps=3, batch_sizes=(1, 8))


@pytest.fixture(scope="module")
def tiny():
    finished = []
    results = table1.measure(TINY, 1, lambda job, value: finished.append((job, value)))
    given = {"short": False, "processes": 1, "seconds": 1.0}
    machine = {"cpu": "a processor", "cores": 2, "python": "3", "torch": "2"}
    return results | given | {"machine": machine, "finished": finished}


def row(baseline, mixed, published=None):
    kept = {"baseline": 2**20, "mixed": 2**19}
    return dict(network="vgg", unit="%", baseline=baseline, mixed=mixed, published=published, activations=kept)


# The table.


def test_difference_and_noise():
    one = row([80.0, 82.0, 84.0], [81.0, 82.0, 86.0])
    assert report.difference(one) == pytest.approx(1)
    assert report.seed_noise(one) == pytest.approx(math.sqrt((4 + 7) / 2))
    assert report.seed_noise(row([80.0], [81.0])) is None
    assert report.saved(one) == 0.5


@pytest.mark.slow
def test_the_language_model_is_asked_about_text_that_it_has_not_seen(monkeypatch):
    parts = []

    def windows(text, *rest, real=table1.windows):
        parts.append(text)
        x, y = real(text, *rest)
        assert torch.equal(x[:, 1:], y[:, :-1]), "what to say is what comes next"
        return x, y

    monkeypatch.setattr(table1, "windows", windows)
    bits = table1.bits_per_byte(0, False, 1)
    assert torch.equal(torch.cat(parts[:2]), table1.read_text(table1.TEXT, 64))
    assert 7 < bits < 8.5, "after one step it knows next to nothing of a byte's 8 bits"


@pytest.mark.accuracy
def test_a_run_is_in_one_precision_from_training_to_test(monkeypatch):
    """And the learning rate warms up and falls."""
    blocks, rates = [], []

    def in_fp16(mixed, real=table1.in_fp16):
        blocks.append((mixed, torch.is_grad_enabled()))
        return real(mixed)

    monkeypatch.setattr(table1, "in_fp16", in_fp16)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        table1.accuracy("alexnet", 0, True, 12)
    finally:
        hook.remove()
    assert blocks == [(True, True)] * 12 + [(True, False)]
    assert rates[0] < max(rates) > rates[-1] and max(rates) <= 3e-3
    assert not table1.train("alexnet", 0, False, 1).training, "dropout is for training"


@pytest.mark.slow
def test_every_network_is_measured_in_both_precisions_with_every_seed(tiny):
    assert [one["network"] for one in tiny["rows"]] == ["alexnet", "gpt"]
    assert len({job for job, _ in tiny["finished"]}) == len(tiny["finished"]) == 2 * 2 * 3
    for one in tiny["rows"]:
        runs = one["baseline"] + one["mixed"]
        assert len(one["baseline"]) == len(one["mixed"]) == 2
        assert one["network"] == "alexnet" or len(set(one["baseline"])) == 2, "a seed matters"
        assert one["unit"] == ("%" if one["network"] == "alexnet" else "bits per byte")
        assert all(5 < value <= 100 for value in runs) if one["unit"] == "%" else all(4 < value < 9 for value in runs)
        assert 0.5 <= report.saved(one) < 0.55
    alexnet, gpt = tiny["rows"]
    assert alexnet["published"] == (56.77, 56.93) and gpt["published"] is None
    assert gpt["baseline"] != gpt["mixed"], "the two are not the same run"
    assert gpt["baseline"] == pytest.approx(gpt["mixed"], rel=0.01)


@pytest.mark.slow
def test_the_table_fits_80_columns_and_keeps_published_apart(tiny, capsys):
    widest = row([80.0, 82.0], [71.0, 92.0], (65.40, 65.43)) | {"network": "inception_v3"}
    report.print_table(tiny | {"rows": [widest, *tiny["rows"]]}, Console(width=80))
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()) and "…" not in out
    assert "published" in out and "56.77" in out and "±" in out and "Shortened" not in out
    line = next(line for line in out.splitlines() if "alexnet" in line)
    assert line.index("56.77") < line.index("56.93") < line.index("±")
    report.print_table(tiny | {"short": True}, Console(width=80))
    assert "Shortened" in capsys.readouterr().out


@pytest.mark.slow
def test_the_picture_shows_differences_activations_and_peaks(tiny):
    figure = report.draw(tiny | {"rows": [row([80.0, 82.0], [81.0, 82.0], (65.4, 65.43)), tiny["rows"][1]]})
    differences, activations, peak = figure.axes
    dots = [tuple(offset) for each in differences.collections for offset in each.get_offsets()]
    assert {round(float(y), 2) for _, y in dots} >= {1.0, 0.0, 0.03}
    assert [bar.get_height() for bar in activations.patches][:4:2] == [1.0, 0.5]
    assert len(peak.lines) >= 2


@pytest.mark.slow
def test_files_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table1, "SHORT", dataclasses.replace(TINY, networks=("alexnet",), seeds=1, steps=2))
    assert table1.main(["--short", "--processes", "1", "--output", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["table1.json", "table1.png"]
    text = (tmp_path / "new" / "table1.json").read_text()
    results = json.loads(text)
    assert results["short"] and results["processes"] == 1 and results["plan"]["steps"] == 2
    assert "Shortened" in capsys.readouterr().out
    for secret in (str(Path.home()), os.getcwd(), os.uname().nodename if hasattr(os, "uname") else "?"):
        assert len(secret) < 5 or secret not in text


@pytest.mark.soak
def test_processes_give_the_same_numbers(tiny):
    results = table1.measure(TINY, 2)
    assert results["rows"] == tiny["rows"] and results["memory"] == tiny["memory"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seeds", "0"], "--seeds: must be a whole number from 1"),
        (["--processes", "two"], "--processes: must be a whole number from 1"),
        (["--output", "empty.txt"], "cannot write to empty.txt"),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert table1.main(argv) == 2
    out, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and not out


# Memory: what masters cost, what activations save.


def test_where_two_lines_cross():
    assert step_memory.crossover([1, 2, 4], [10, 20, 40], [25, 25, 25]) == 2.5
    assert step_memory.crossover([1, 2, 4], [10, 20, 40], [9, 10, 11]) is None
    assert step_memory.crossover([1, 2, 4], [10, 20, 40], [11, 21, 41]) is None
    assert step_memory.crossover([1, 2, 4], [10, 20, 40], [12, 20, 30]) == 2


@pytest.mark.slow
def test_masters_cost_and_activations_save():
    x, y = images.load("train")
    make = NETWORKS["vgg"]
    psi = sum(p.numel() for p in make().parameters())
    small, large = ([step_memory.watch(make, x[:n], y[:n], mixed).peak for mixed in (False, True)] for n in (1, 32))
    for fp32, mixed in (small, large):
        assert mixed["parameters"] == fp32["parameters"] / 2 == 2 * psi
        assert mixed["gradients"] == fp32["gradients"] / 2
        assert fp32["optimizer"] == pytest.approx(8 * psi, rel=0.001)
        assert mixed["optimizer"] == pytest.approx(12 * psi, rel=0.001), "the moments and the masters"
        assert 0.49 < mixed["activations"] / fp32["activations"] < 0.53
    from_the_start = step_memory.watch(make, x[:1], y[:1], False).curve[0]["optimizer"]
    assert from_the_start == pytest.approx(8 * psi, rel=0.001), "the first step, which makes the moments, is no example"
    assert small[1]["total"] > small[0]["total"] and large[1]["total"] < 0.8 * large[0]["total"]


# The claims.


@pytest.mark.slow
def test_histograms_of_a_run():
    found = experiments.gradient_histograms("alexnet", steps=2)
    n = sum(p.numel() for p in NETWORKS["alexnet"]().parameters())
    assert found.gradients.total == found.updates.total == 2 * n
    assert found.activation_gradients.total > 2 * 64 * 10
    assert found.gradients.share(-24, 16) > 0.5


def test_weights_become_fp16_numbers():
    model = nn.Linear(5, 5)
    experiments.round_weights(model)
    assert all(torch.equal(FP16.quantize(p), p) for p in model.parameters())
