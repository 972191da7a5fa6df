"""The command, on a file of the user's: what it prints of it, and what it refuses, in one line."""

import pickle
import re

import pytest

from minizero.xray.__main__ import main

FLAT = """import torch
model = torch.nn.Linear(8, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(4, 8, device="cuda")).mean().backward()
    optimizer.step()
"""
LOOP = FLAT + "def make(): return model, step"
MODEL = """import argparse, torch
from beside import width
argparse.ArgumentParser().parse_args()
class Mine(torch.nn.Linear):
    def forward(self, x, y):
        logits = super().forward(x)
        return logits, torch.nn.functional.cross_entropy(logits, y)
def make():
    return Mine(width, 1000), {'x': torch.ones(64, width), 'y': torch.zeros(64, dtype=torch.long)}
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs the command beside a file, train.py; returns its status, what it prints, and its errors."""

    def run(script, options):
        (tmp_path / "beside.py").write_text("width = 4\n")
        (tmp_path / "train.py").write_text(script)
        monkeypatch.chdir(tmp_path)
        return main(options.split()), *capfd.readouterr()

    return run


TRIED = "Tried: as it is 65.00 MiB.*loss in chunks: not possible: no linear layer leads.*"
TRIED += "make.. has returned a loop. What changes a loop is not tried: smaller batches, BF16"
SHOWN = [
    (LOOP, "train.py --fit 1MiB", TRIED),
    (LOOP, "train.py --card t4 --fit --taken 3GiB", "1 × 11.56 GiB: the cheapest"),
    (MODEL, "train.py:make --card cpu --fit 2MiB", "train.py:7.*1 × 2.00 MiB: the cheapest that fits.*as it is"),
    pytest.param("", "--length 16", "GPT: 3,.*Who holds the peak", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("script, options, words", SHOWN)
def test_what_it_shows(script, options, words, command):
    status, out, error = command(script, options + " --no-table")
    assert (status, error) == (0, "") and "What would help" not in out
    assert re.search(words, " ".join(out.split()))


LINES = "a script that trains as it is read needs four lines: def step... above .* def make.*: return model, step"
REFUSED = [
    (FLAT + "for _ in range(10): step()", "train.py", f"cannot be imported: {LINES} .train.py:6."),
    (FLAT + "import nowhere", "train.py", "cannot be imported: No module named 'nowhere' .train.py:7."),
    (FLAT + "import sys; sys.exit('no data')", "train.py", "cannot be imported: no data .train.py:7."),
    (FLAT, "train.py", f"has no function make.*: {LINES}"),
    (FLAT, "train.py:nothing", "has no function nothing.."),
    (LOOP, "train.py --largest", "which makes its own batch"),
    (LOOP, "train.py --card t4 --fit --taken 15GiB", "--taken: 15.00 GiB of 14.56 GiB leaves nothing"),
    (LOOP, "train.py:make --batch 4", "--batch and --length are not for FILE.py:make"),
    ("cbuiltins\nprint\n(Vrun\ntR.", "--snapshot train.py", "train.py is no record of a GPU.* asks for builtins.print"),
    (pickle.dumps({"segments": []}, 0).decode(), "--snapshot train.py", "train.py is no record of a GPU: KeyError"),
    ("text", "--snapshot train.py", "train.py is no record of a GPU"),
    ("", "--snapshot train.py", "train.py is no record of a GPU"),
    ("", "--snapshot train.py --fit 80GiB", "only --output"),
    ("", "nowhere.py:make", "expected FILE.py:make"),
    ("", "--hf nowhere.json", "--hf: nowhere.json describes no model"),
    ("", "--fit 80", "--fit: must be a size such as 80GiB"),
    ("", "--output /proc/no", "--output: cannot write"),
    ("", "--card mi300x", "no card 'mi300x' is known"),  # another maker's
    ("", "--card cpu --fit", "a CPU has no memory of its own"),
    ("", "--card 2060", "one of the same generation, and the memory of yours"),
    ("", "--optimizer sdg", "torch.optim has no sdg"),
]


@pytest.mark.parametrize("script, options, words", REFUSED)
def test_what_it_refuses_in_one_line(script, options, words, command):
    if "--hf" in options:
        pytest.importorskip("transformers")
    status, out, error = command(script, options)
    assert (status, out) == (2, "") and re.search(words, error)
    assert len(error.splitlines()) == 1 and len(error) < 600
