"""The simulator's search, tables, pictures and command line."""

import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from minizero.simulate import CLUSTERS, Strategy, gpt, model, simulate, tables
from minizero.simulate.__main__ import main
from minizero.simulate.peak import peak_memory
from minizero.simulate.remedies import remedies
from minizero.simulate.search import describe, factors, frontier, plans, search

SMALL = gpt(4, 1024, 16, 512)
A100 = CLUSTERS["a100-80"]


# Search.


def test_search_finds_the_fastest_that_fits():
    steps = search(model("mpt-7b"), A100, 16, 4, flash=True)
    every = list(plans(A100, 16, 4, flash=True))
    fitting = [plan for plan in every if A100.holds(peak_memory(model("mpt-7b"), plan))]
    assert 0 < len(steps) == len(fitting) < len(every)
    assert all(step.fits for step in steps)
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    assert steps[0].plan.stage > 0, "DDP does not fit"
    assert {step.plan.batch_size * step.plan.micro_batches for step in steps} == {4}


def test_the_frontier_is_what_nothing_beats_in_both():
    steps = search(model("mpt-7b"), A100, 16, 4)
    best = frontier(steps)
    assert best[0] is steps[0] and len(best) > 2
    for step in steps:
        beaten = [o for o in steps if o.seconds < step.seconds and o.memory["total"] < step.memory["total"]]
        assert not (step in best and beaten)
    held = [step.memory["total"] for step in best]
    assert held == sorted(held, reverse=True)


def test_search_leaves_alone_what_it_is_told():
    steps = search(SMALL, A100, 8, 4, stage=3, sharding_factor=8, offload=False, recompute="full")
    assert {(s.plan.stage, s.plan.sharding_factor, s.plan.recompute) for s in steps} == {(3, 8, "full")}


def test_factors_lie_evenly_on_hosts():
    assert factors(A100, 24) == [1, 2, 4, 8, 24]
    assert len(factors(A100, 100_000)) > 10
    assert max(plan.micro_batches for plan in plans(A100, 8, 128)) == 64, "the search tries no more"


def test_plans_in_words():
    plan = Strategy(64, sharding_factor=8, batch_size=2, micro_batches=4, recompute="full", offload=True)
    assert describe(plan) == "stage 3, F = 8, 4 x 2, full recompute, offload"
    assert describe(Strategy(8, stage=0)) == "DDP, 1 x 1"


# What to try if a plan does not fit.


def test_remedies_are_the_fewest_switches_that_make_it_fit():
    sharded = remedies(simulate(model("mpt-7b"), A100, Strategy(64, stage=0)))
    assert sorted(changes["stage"] for changes, _ in sharded) == [1, 2, 3]
    large = simulate(model("mpt-7b"), A100, Strategy(64, sharding_factor=2, batch_size=16, dtype="float32"))
    both = remedies(large)
    others = [changes.keys() - {"recompute"} for changes, _ in both]
    assert all(changes["recompute"] == "full" for changes, _ in both)
    assert sorted(others, key=str) == [{"dtype"}, {"flash"}, {"offload"}, {"sharding_factor"}]
    for found in (sharded, both):
        assert all(step.fits for _, step in found)
        assert [step.seconds for _, step in found] == sorted(step.seconds for _, step in found)
    assert remedies(simulate(model("megatron-1t"), A100, Strategy(8))) == []


def test_the_command_says_what_to_try(capsys):
    assert main([]) == 0 and "of 80: fits" in capsys.readouterr().out  # what a newcomer types first
    assert main(["--model", "gpt-175b", "--gpus", "512"]) == 0
    out = capsys.readouterr().out
    assert "OUT OF MEMORY" in out and "with one switch more" in out and "--recompute full" in out
    for _, step in remedies(simulate(model("gpt-175b"), A100, Strategy(512))):
        assert f"{step.memory['total'] / 2**30:,.1f}" in out and f"{step.tokens_per_second:,.0f}" in out
    assert main(["--model", "gpt-175b", "--gpus", "512", "--recompute", "full"]) == 0
    assert "switch" not in capsys.readouterr().out
    assert main(["--model", "megatron-1t", "--gpus", "8"]) == 0
    assert "take more GPUs, or a smaller batch" in capsys.readouterr().out


# Tables and pictures.


@pytest.mark.slow
def test_the_published_table_keeps_fitted_and_predicted_apart():
    out = Console(file=io.StringIO(), width=100)
    tables.print_published(out)
    words = " ".join(out.file.getvalue().split())
    for heading in ("published", "fitted", "predicted", "error"):
        assert words.count(f" {heading} ") >= 4
    lines = out.file.getvalue().splitlines()
    heading = next(line for line in lines if "predicted" in line)
    ends = {heading.index(name) + len(name): name for name in ("published", "fitted", "predicted")}
    rows = [line for line in lines if line.startswith(" mpt-70b ") or line.startswith("mpt-70b ")]
    found = [[name for end, name in ends.items() if line[end - 1].isdigit()] for line in rows]
    assert found == [["published", "fitted"]] * 2 + [["published", "predicted"]]
    assert "line through 128 and 256: 1.4%; of no change since 256: 3.6%" in words


def test_pictures():
    steps = [simulate(SMALL, A100, plan) for plan in (Strategy(8), Strategy(8, stage=0))]
    axes = tables.draw_memory(steps, Figure().subplots())
    assert len(axes.get_yticklabels()) == 2
    drawn = sum(bar.get_width() for bar in axes.patches) * 2**30
    assert drawn == pytest.approx(sum(step.memory["total"] for step in steps))
    assert "predicted" in axes.get_xlabel()
    assert len(tables.draw_step(steps[0]).axes) == 2
    full = simulate(model("t5-11b"), A100, Strategy(8, stage=0, dtype="float32"))
    texts = [text.get_text() for text in tables.draw_memory([full], Figure().subplots()).texts]
    assert any("out of memory" in text for text in texts)


# The command line.


def test_a_step_on_the_command_line(capsys, tmp_path):
    options = ["--model", "gpt-175b", "--gpus", "512", "--recompute", "--batch-size", "2", "--output", str(tmp_path)]
    assert main(options) == 0
    step = simulate(model("gpt-175b"), A100, Strategy(512, batch_size=2, recompute="full"))
    numbers = json.loads((tmp_path / "step.json").read_text())
    assert numbers["seconds"] == step.seconds and numbers["memory"] == step.memory
    out = capsys.readouterr().out
    for name, held in step.memory.items():
        assert not held or name == "total" or f"GiB of {name}" in out
        assert f"{held / 2**30:,.2f}" in out or not held
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(1e6 * step.seconds)
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_global_batch_and_shape(capsys):
    shape = ["--layers", "4", "--width", "64", "--heads", "4", "--sequence-length", "32"]
    assert main([*shape, "--gpus", "16", "--global-batch-size", "64", "--micro-batches", "2"]) == 0
    assert "2 x 2" in capsys.readouterr().out
    assert main([*shape, "--gpus", "8", "--batch-size", "4", "--search"]) == 0
    assert "plans fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "0"], "--gpus: must be a whole number from 1"),
        (["--sharding-factor", "3"], "sharding_factor 3 does not divide 512 GPUs: try 1, 2, 4"),
        (["--layers", "2", "--width", "100", "--heads", "3"], "width (100) must be divisible by heads (3)"),
        (["--layers", "2"], "give all three"),
        (["--global-batch-size", "513"], "is not a multiple of the 512 micro-batches of 512 GPUs: use a multiple of"),
        (["--model", "gtp-175b"], "model 'gtp-175b' is unknown: did you mean gpt-175b"),
        (["--cluster", "a100"], "did you mean a100-40 or a100-80"),
        (["--cluster", "abacus!"], "cluster 'abacus!' is unknown"),
        (["--gpus", "12"], "do not lie evenly on hosts of 8"),
        (["--stage", "7"], "--stage"),
        (["--efficiency", "0"], "efficiency must be above 0"),
        (["--efficiency", "1.5"], "must be a number from 0 to 1"),
        (["--jitter", "nan"], "must be a number from 0 to 1"),
        (["--speed"], "--speed"),
        (["--model", "megatron-1t", "--gpus", "8", "--search"], "no plan fits: the least that megatron-1t takes on 8"),
        (["--output", "/dev/null/x"], "--output: cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, options, words):
    assert main(options) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and words in err and err.startswith("python -m minizero.simulate: error:")
    assert not out
