"""A ledger's data, its tables, its picture and its command say the same."""

import io
import json

import pytest
import torch
from rich.console import Console

from minizero import GPT
from minizero.memory import Ledger
from minizero.memory.__main__ import main
from minizero.memory.tables import by_module, print_peak
from tests.support.ledger_gpt import CONFIG, TOKENS


def test_a_summary_is_plain_data_and_the_tables_say_the_same():
    model = GPT(CONFIG)
    with Ledger(model) as ledger:
        model(TOKENS, TOKENS).backward()
    summary = ledger.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["peak"] == ledger.peak and summary["holders"] == ledger.holders
    curve = summary["curve"]
    assert curve["total"] == [sample["total"] for sample in ledger.curve]
    assert len(set(map(len, curve.values()))) == 1 and curve["number"] == sorted(curve["number"])
    moment = curve["total"].index(ledger.peak["total"])
    assert curve["phase"][moment] == "backward" and curve["operator"][moment].startswith("aten.")

    console = Console(file=io.StringIO(), width=80)
    print_peak(summary, console, rows=5)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert f"in backward, after {curve['operator'][moment].removesuffix('.default')}" in text.replace("\n", " ")
    rows = [line.split() for line in text.splitlines()]
    whole = f"{ledger.peak['total'] / 2**20:.2f}"
    assert next(row for row in rows if row[:2] == ["joint", "total"])[-1] == whole
    assert "(backward)" in by_module(summary["holders"])  # what is in no module's forward
    # Layers are added up where there are too many rows, and what is small comes last, together.
    five = by_module(summary["holders"], 5)
    assert len(five) == 5 and list(five)[-1].endswith("others") and any(".*" in name for name in five)
    assert sum(held["total"] for held in five.values()) == ledger.peak["total"]


def test_a_picture_says_what_it_cannot_see():
    with Ledger() as ledger:
        for _ in range(3):
            torch.ones(1000) + 1
    axes = ledger.plot()
    assert "operators" in axes.get_xlabel() and "not seen" in axes.get_xlabel()
    assert "12 bytes" in ledger.plot(axes, "12 bytes").get_xlabel()
    peak = next(line for line in axes.lines if line.get_marker() == "o")
    assert peak.get_ydata()[0] * 2**20 == pytest.approx(ledger.peak["total"])
    assert ledger.curve[-1].number == 6  # operators
    assert 1 <= peak.get_xdata()[0] <= axes.get_xlim()[1] == 7


def test_the_command_prints_the_demo_models_table_and_writes_files(tmp_path, capfd):
    small = ["--width", "32", "--layers", "2", "--heads", "2", "--sequence-length", "16"]
    assert main([*small, "--output", str(tmp_path / "new")]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    for words in ("joint total", "blocks.*.up", "the ledger: tensors", "PyTorch's profiler", "optimizer"):
        assert words in out
    numbers = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert numbers["config"]["width"] == 32
    assert numbers["compared"]["profiler"] == pytest.approx(numbers["compared"]["ledger"], rel=1e-3)
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--width", "30", "--heads", "4"], "--width 30 must be divisible by --heads 4"),
        (["--layers", "0"], "--layers: must be a whole number"),
        (["--what"], "--what"),
        (["--layers", "99999999"], "this machine has"),
        (["--output", "/proc/no"], "--output: cannot write"),
    ],
)
def test_the_command_refuses_in_one_line(wrong, words, capfd):
    assert main(wrong) == 2
    out, error = capfd.readouterr()
    assert out == "" and words in error and len(error.splitlines()) == 1
