"""The report: its tables, files, command; and the cheapest stack that fits."""

import functools
import io
import json
import pickle
import re

import pytest
import torch
from rich.console import Console
from torch import nn

from minizero.xray import xray
from minizero.xray.__main__ import main
from minizero.xray.budget import RESERVED, cheapest, kept_free, price, stacks
from minizero.xray.case import Case, NotPossible
from minizero.xray.plan import Plan
from minizero.xray.script import with_minizero, with_pytorch
from minizero.xray.techniques import name_of
from tests.support.processes import run
from tests.support.xray_cases import BATCH, OWN, WORDS, Does, gpt, real

MIB = 2**20


@pytest.fixture(scope="module")
def report():
    model, inputs = gpt(sequence_length=48)()
    return xray(model, inputs, ranks=1, name="a GPT")


def printed(show):
    show(console := Console(file=io.StringIO(), width=100))
    return console.file.getvalue()


def test_its_peak_is_a_real_steps(report):
    assert report.peak == real(gpt(sequence_length=48), Plan()).peak and report.phase == "backward"
    assert max(sample["total"] for sample in report.curve) == report.peak["total"]
    assert sum(row.bytes for row in report.holders) == report.peak["total"]


def test_rows_are_grouped_and_have_words_and_the_users_line(report):
    scores = next(row for row in report.holders if row.what.startswith("softmax:"))
    assert (scores.what, scores.category) == ("softmax: 16 × 48 × 48", "activations")
    assert scores.tensors == scores.alike == 3
    assert scores.module == "blocks.*.attention" and re.fullmatch(r"gpt\.py:\d+", scores.line)
    log_softmax = next(row for row in report.holders if "log-softmax" in row.what)
    assert log_softmax.what == f"log-softmax of the logits: {BATCH * 48} × {WORDS}" and log_softmax.line != ""
    backward = [row for row in report.holders if row.category == "temporary" and row.phase == "backward"]
    assert all(row.what.startswith("gradient through") for row in backward)
    assert {row.line for row in backward} == {log_softmax.line}  # that of the operation which goes backwards
    states = next(row for row in report.holders if row.what == "optimizer states" and row.module == "blocks.*.up")
    assert states.alike == 3 and states.line == ""


@pytest.mark.slow
@pytest.mark.accuracy
def test_the_tables_fit_100_columns_and_have_all_names():
    report = xray(*gpt()(), ranks=4)
    text = printed(report.show) + printed(report.what_would_help)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text and "blocks.*.attention, 3 alike" in text
    useless = [row for row in report.outcomes if row.result and row.against >= 0.995]
    assert text.count("Saves nothing here: ") == len(useless) > 0
    assert {word for row in report.outcomes for word in name_of(row.plan).split()} <= {*text.split()}


@pytest.mark.slow
def test_the_files_say_the_same_and_need_no_network(report, tmp_path):
    assert report.outcomes and report.fit(20 * MIB)
    names = {path.name: path for path in report.save(tmp_path / "new")}
    assert names.keys() == {"xray.png", "xray.html", "xray.json", "snapshot.pickle"}
    assert names["xray.png"].read_bytes().startswith(b"\x89PNG")
    numbers = json.loads(names["xray.json"].read_text())
    assert numbers["peak"] == report.peak and numbers["techniques"][0]["name"] == "recompute of each block"
    assert max(numbers["curve"]["total"]) == report.peak["total"]
    page = names["xray.html"].read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page and "<title>" in page
    for words in ("blocks.*.attention, 3 alike", "4 micro-batches", "With PyTorch's own:", "Not seen", "image/png"):
        assert words in page.replace("&#x27;", "'")


def test_stacks_are_tried_from_the_cheapest_on():
    plans = stacks(4, 8)
    assert [*map(price, plans)] == sorted(map(price, plans)) and len(set(plans)) == len(plans)
    assert plans[0] == Plan(stage=2, ranks=4)
    assert {plan.micro_batches for plan in plans} == {1, 2, 8}
    assert {(plan.stage, plan.offload) for plan in stacks(1, 8)} == {(None, False), (3, True)}
    # Under ZeRO-3 each piece gathers again.
    pieces = [price(Plan(stage=3, ranks=4, micro_batches=pieces)) for pieces in (1, 2, 4)]
    assert pieces == pytest.approx([0.06, 0.06 * 2 + 0.03, 0.06 * 4 + 0.06])


@pytest.mark.slow
@pytest.mark.accuracy
def test_what_fit_prints_agrees_with_what_it_counts(report):
    half = report.case.run(Plan(micro_batches=2)).peak["total"]
    assert half < report.case.run(Plan(flash=True, chunked_loss=True)).peak["total"]
    found = report.fit(half * RESERVED + 1)
    small = " ".join(printed(report.show_fit).split())
    assert found.plan.micro_batches == 2 and "no context is counted" in small and "1.18 times what it" in small
    assert "price 3%: smaller products" in small
    assert "same price, not tried: attention without scores, loss in chunks; BF16 with FP32 masters A price is" in small
    assert "accumulate(model, zip(x.chunk(2), y.chunk(2)))" in small
    report.fit(80 * 2**30)
    large = printed(report.show_fit)
    assert "1.00 GiB for a GPU's context" in large and "no context is counted" not in large
    assert "13.05 GiB kept free" in large and large.count("nothing: the step stays as it is") == 2


@pytest.mark.slow
def test_the_first_stack_that_fits_is_found_or_the_smallest():
    case = Case(*OWN["GPT"]())
    order = stacks(2, BATCH)
    found = cheapest(case, 3 * MIB, 2)
    assert found.spare >= 0 and len(found.peaks) > 1
    usable = 3 * MIB - kept_free(3 * MIB)
    cheaper = order[: order.index(found.plan)]
    assert all(case.run(plan).peak["total"] > usable for plan in cheaper if plan in case.found)
    nothing = cheapest(images := Case(*OWN["resnet"]()), 0.1 * MIB, 1)
    least = min(run.peak["total"] for run in images.found.values() if not isinstance(run, str))
    assert nothing.spare < 0 and len(nothing.peaks) > 1 and nothing.result.peak["total"] == least
    ample = cheapest(case, 100 * MIB, 1)
    assert ample.plan == stacks(1, BATCH)[0] and len(ample.peaks) == 1
    assert ample.spare == 100 * MIB - kept_free(100 * MIB) - ample.result.peak["total"]


@pytest.mark.slow
def test_a_stack_that_a_model_refuses_is_left_out_and_others_are_tried():
    layer, batch = nn.Linear(8, 8), torch.ones(4, 8)
    of_four = Does(lambda self, x: (self.layer(x) + torch.ones(4, 8)).square().mean(), layer=layer)
    found = cheapest(Case(of_four, batch), 400, 1)
    assert found.plan.micro_batches == 1 and found.spare < 0
    layer.register_buffer("view", layer.weight.detach()[0])  # which no engine moves into a flat buffer
    with pytest.raises(NotPossible, match="no stack of techniques can be run on 2 ranks"):
        cheapest(Case(of_four, batch), 1000, 2)


def with_lines(lines, plan, comm):
    """A step with the lines in it; the class of the model that they leave."""
    model, inputs = gpt()()
    names = {"model": model, "torch": torch}
    exec("\n".join(lines(plan, model)), names)
    optimizer = torch.optim.AdamW(names["model"].parameters())
    names["model"](*inputs).backward()
    optimizer.step()
    return type(names["model"]).__name__


@pytest.mark.slow
@pytest.mark.parametrize("lines", [with_minizero, with_pytorch])
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_the_lines_can_be_run(lines, stage, tmp_path):
    plan = Plan(stage=stage, ranks=1, dtype=torch.bfloat16, recompute=True, micro_batches=2)
    (made,) = run(functools.partial(with_lines, lines, plan), 1, tmp_path)
    ours, theirs = {None: "DDP", 2: "Zero2", 3: "Zero3"}, {None: "GPT"}
    assert made == (ours[stage] if lines is with_minizero else theirs.get(stage, "FSDPGPT"))


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
def ran(script, options, tmp_path, monkeypatch, capfd):
    """The command beside a file, train.py: its status, what it prints, and its errors."""
    if "--hf" in options:
        pytest.importorskip("transformers")
    (tmp_path / "beside.py").write_text("width = 4\n")
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    return main(options.split()), *capfd.readouterr()


TRIED = "Tried: as it is 65.00 MiB.*loss in chunks: not possible: no linear layer leads.*"
TRIED += "make.. has returned a loop. What changes a loop is not tried: smaller batches, BF16"
SHOWN = [
    (LOOP, "train.py --no-table --fit 1MiB", TRIED),
    (LOOP, "train.py --no-table --card t4 --fit --taken 3GiB", "1 × 11.56 GiB: the cheapest"),
    (MODEL, "train.py:make --no-table --card cpu --fit 2MiB", "train.py:7.*2.00 MiB: the cheapest that fits.*as it is"),
    pytest.param("", "--no-table --length 16", "GPT: 3,.*Who holds the peak", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("script, options, words", SHOWN)
def test_what_the_command_shows_of_a_file(ran, words):
    status, out, error = ran
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
def test_what_the_command_refuses_in_one_line(ran, words):
    status, out, error = ran
    assert (status, out) == (2, "") and re.search(words, error)
    assert len(error.splitlines()) == 1 and len(error) < 600
