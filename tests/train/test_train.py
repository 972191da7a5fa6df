"""The main job: its numbers against the formulas, and one line for whatever is wrong with the input."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from minizero import GPT, GPTConfig, RankFailed, World
from minizero.memory.estimate import estimate
from minizero.models import text
from minizero.models.text import read_text
from minizero.ranks.collectives import all_reduce
from minizero.train import command, loop

ROOT = Path(__file__).parents[2]
TINY = ["--width", "16", "--layers", "2", "--heads", "2", "--sequence-length", "8", "--steps", "6"]
CPU = ["--device", "cpu"]  # the same numbers on a machine with a GPU


def run(folder, *argv):
    """The results of a run in this process."""
    assert command.main([*TINY, *CPU, *argv, "--output", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"), "--world-size", "3")


@pytest.fixture(scope="module")
def default_shapes(tmp_path_factory):
    """The demo with fewer steps."""
    folder = tmp_path_factory.mktemp("demo")
    assert command.main([*CPU, "--steps", "2", "--output", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.accuracy
def test_all_stages_have_the_same_losses(four_stages):
    losses = [one["losses"] for one in four_stages["runs"]]
    assert [one["name"] for one in four_stages["runs"]] == ["DDP", "Zero1", "Zero2", "Zero3"]
    assert len(losses[0]) == 6 and len(set(losses[0])) == 6
    assert losses[1:] == losses[:1] * 3, "the stages differ in place, not in numbers"


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_persistent_bytes_are_16_psi_less_what_the_stage_shards_and_bytes_sent_the_formulas(default_shapes, stage):
    psi, root, n, one = 3_229_952, (256 + 64 + 1) * 256, 4, default_shapes["runs"][stage]
    states = {"parameters": (4 * psi, 3), "gradients": (4 * psi, 2), "optimizer": (8 * psi, 1)}
    expected = {name: whole / (n if stage >= first else 1) for name, (whole, first) in states.items()}
    assert one["predicted"] == pytest.approx(expected | {"total": sum(expected.values())})
    for rank in one["ranks"]:
        for category, held in expected.items():
            # Padding: each of 5 units, in each of 3 buffers, by less than n elements. Adam counts its steps.
            assert held <= rank["persistent"][category] <= held * 1.001 + 5 * 4 * (n + 10)
        others = rank["persistent"]["total"] - sum(rank["persistent"][category] for category in expected)
        assert others < 0.001 * rank["persistent"]["total"]
    assert one["bytes_sent_formula"] == (2 * psi if stage < 3 else 3 * psi - root) * 4 * (n - 1) / n
    assert one["bytes_sent"] == pytest.approx(one["bytes_sent_formula"], rel=0.001)
    # Too low, and the kernel kills a run; too high, and it refuses one that fits.
    assert 0.8 < estimate(GPTConfig(), 4, [stage], 2, torch.float32) / one["ranks"][0]["peak"]["total"] < 2


@pytest.mark.slow
def test_zero3_plots_at_most_half_of_ddps_peak(default_shapes):
    peaks = [max(one["curve"]["total"]) for one in default_shapes["runs"]]
    assert peaks[3] <= peaks[0] / 2
    assert peaks == sorted(peaks, reverse=True)
    for one in default_shapes["runs"]:
        assert {"forward", "backward", "optimizer"} <= set(one["curve"]["phase"])
        assert max(one["curve"]["total"]) == one["ranks"][0]["peak"]["total"]


@pytest.mark.slow
def test_what_a_run_says_of_time_and_place(four_stages, default_shapes):
    """With enough steps the time is that of those that no ledger watches."""
    assert all(one["step_seconds"] > 0 for one in four_stages["runs"])
    assert all(one["step_seconds"] is None for one in default_shapes["runs"])
    for secret in (str(Path.home()), os.getcwd(), os.uname().nodename if hasattr(os, "uname") else "?"):
        assert len(secret) < 5 or secret not in json.dumps(four_stages)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_the_last_state_that_it_saved(tmp_path, monkeypatch):
    """Saving in between changes neither losses nor traffic."""
    stage, save = ["--stage", "2", "--world-size", "2"], ["--save", str(tmp_path / "state"), "--save-every", "2"]
    whole, saved = (run(tmp_path, *stage, *each)["runs"][0] for each in ([], save))
    assert saved["losses"] == whole["losses"] and saved["bytes_sent"] == whole["bytes_sent"]
    assert [rank["peak"] for rank in saved["ranks"]] == [rank["peak"] for rank in whole["ranks"]]
    steps = itertools.count()

    def until_the_fifth_step(*arguments, **keywords):
        if next(steps) >= 2 * 4:
            raise RuntimeError("killed")
        return all_reduce(*arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(RankFailed, match="killed"):
        patch.setattr(loop, "all_reduce", until_the_fifth_step)
        command.main([*TINY, *CPU, *stage, *save])
    resumed = run(tmp_path, *stage, "--resume", save[1], "--steps", "2")["runs"][0]
    assert resumed["steps_before"] == 4 and resumed["losses"] == whole["losses"][4:]


@pytest.mark.slow
def test_a_run_that_is_interrupted_keeps_the_stages_that_are_finished(tmp_path, monkeypatch, capsys):
    real = World.run

    def until_the_third(world, fn, stage, *rest):
        if stage == 2:
            raise KeyboardInterrupt
        return real(world, fn, stage, *rest)

    monkeypatch.setattr(World, "run", until_the_third)
    assert command.main([*TINY, *CPU, "--output", str(tmp_path)]) == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["name"] for one in results["runs"]] == ["DDP", "Zero1"] and (tmp_path / "curves.png").exists()
    assert "interrupted" in capsys.readouterr().err


def test_a_rank_of_any_launcher_is_one(monkeypatch, capsys):
    """Without torchrun's own variables, as under srun or mpirun: else each would train alone, without a word."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": None}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert command.main([*TINY, *CPU, "--world-size", "3"]) == 2
    assert "--world-size 3: the launcher started 2 ranks: leave it out" in capsys.readouterr().err
    assert command.main([*TINY, *CPU]) == 2
    assert "MASTER_ADDR, MASTER_PORT not set" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.accuracy
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, four_stages, capsys):
    """Bit for bit in every stage, and to rounding on other ranks; --steps and --learning-rate are this run's."""
    save, resume = ("--save", str(tmp_path / "state")), ("--resume", str(tmp_path / "state"))
    three = ("--world-size", "3", "--steps")
    assert command.main([*TINY, *CPU, *three, "2", "--stage", "3", *save]) == 0
    assert command.main([*TINY, *CPU, *three, "1", "--stage", "1", *resume, *save]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "saved the state after step 2: go on with --resume" in out and "saved the state after step 3" in out
    for one, whole in zip(run(tmp_path, *three, "3", *resume)["runs"], four_stages["runs"]):
        assert one["steps_before"] == 3 and one["losses"] == whole["losses"][3:]
        assert one["bytes_sent"] == whole["bytes_sent"]
    one = ("--world-size", "1", "--batch-size", "6", "--steps", "2", "--stage", "2", *resume)
    expected = four_stages["runs"][2]["losses"][3:5]
    assert run(tmp_path, *one)["runs"][0]["losses"] == pytest.approx(expected, rel=1e-5)
    faster = run(tmp_path, *one, "--learning-rate", "0.01")["runs"][0]["losses"]
    assert faster[0] == pytest.approx(expected[0], rel=1e-5) and faster[1] != pytest.approx(expected[1], rel=1e-3)


def make_job(batch_size=2, **shapes):
    return loop.Job(GPTConfig(sequence_length=8, **shapes), 3, batch_size, 1e-3, torch.float32)


def test_ranks_take_disjoint_parts_of_one_global_batch():
    text = torch.arange(200, dtype=torch.uint8)  # a byte is its own place
    whole, targets = next(loop.batches(text, make_job(8), 0, 1))
    assert whole.shape == (8, 8) and torch.equal(targets, whole + 1), "y is one byte ahead"
    for world_size in (2, 4, 8):
        parts = [next(loop.batches(text, make_job(8 // world_size), rank, world_size)) for rank in range(world_size)]
        assert torch.equal(torch.cat([x for x, _ in parts]), whole)


def test_every_window_of_the_text_can_be_drawn_and_none_beyond():
    text = torch.arange(10, dtype=torch.uint8)  # two windows of 8 and a target
    drawn = loop.batches(text, make_job(), 0, 1)
    assert {int(start) for _, (x, _) in zip(range(20), drawn) for start in x[:, 0]} == {0, 1}


@pytest.mark.slow
@pytest.mark.accuracy
def test_the_text_is_the_one_given(tmp_path, four_stages):
    (chinese := tmp_path / "课文.txt").write_text("人人生而自由。\n" * 30, encoding="utf-8")
    losses = run(tmp_path, "--world-size", "3", "--stage", "0", "--text", str(chinese))["runs"][0]["losses"]
    assert losses[0] != four_stages["runs"][0]["losses"][0]
    assert read_text(chinese, 8).tolist() == list(chinese.read_bytes())


@pytest.mark.slow
@pytest.mark.accuracy
@pytest.mark.parametrize(("world_size", "dtype", "way"), [(1, "float16", "full"), (8, "bfloat16", "selective")])
def test_16_bits_recompute_and_other_world_sizes(tmp_path, world_size, dtype, way):
    shapes = "--world-size", str(world_size), "--dtype", dtype, "--steps", "3", "--attention", "flash"
    results = run(tmp_path, *shapes, "--recompute", *([way] if way != "full" else []))
    losses = [one["losses"] for one in results["runs"]]
    assert losses[1:] == losses[:1] * 3
    assert results["world_size"] == world_size and results["config"]["dtype"] == dtype
    assert results["config"]["attention"] == "flash" and results["config"]["recompute"] == way
    if world_size == 1:
        assert all(one["bytes_sent"] == 0 for one in results["runs"])


# What a user may get wrong: one line, exit code 2, nothing left behind.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--world-size", "0"], "--world-size: must be a whole number from 1"),
        (["--steps", "1.5"], "--steps: must be a whole number from 1"),
        (["--batch-size", "9" * 5000], "--batch-size: must be a whole number from 1"),
        (["--stage", "4"], "--stage: invalid choice: '4'"),
        (["--dtype", "float8"], "--dtype: invalid choice"),
        (["--device", "tpu"], "--device: invalid choice"),
        (["--learning-rate", "nan"], "--learning-rate: must be a positive number"),
        (["--learning-rate", "1e38"], "--learning-rate: must be a positive number up to 1e30"),
        (["--text", "/dev/zero"], "--text: /dev/zero is a device"),
        (["--seed", "9" * 30], "--seed: must be a whole number"),
        (["--heads", "3"], "--width 16 must be divisible by --heads 3"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--text", "missing.txt"], "cannot read missing.txt"),
        (["--text", "empty.txt"], "empty.txt has 0 bytes, one sequence needs 9"),
        (["--text", "latin.txt"], "latin.txt is not UTF-8 (byte 1)"),
        (["--sequence-length", "100000000"], "one sequence needs 100,000,001"),
        (["--sequence-length", "500000"], "MiB free: use a smaller"),
        (["--batch-size", "900000000"], "MiB free: use a smaller"),
        (["--world-size", "900000000"], "MiB free: use a smaller"),
        (["--output", "empty.txt"], "cannot write to empty.txt"),
        (["--output", "empty.txt/deeper/still"], "cannot write to empty.txt/deeper/still"),
        (["--save", "empty.txt", "--stage", "3"], "--save: cannot write to empty.txt"),
        (["--save", "state"], "--save state: it holds the state of one stage: say which"),
        pytest.param(
            ["--device", "cuda"],
            "finds no CUDA GPU here: use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("für Elise, und mehr".encode("latin-1"))
    if "--output" not in argv:
        argv = [*argv, "--output", "new/folder"]
    assert command.main([*TINY, *CPU, *argv]) == 2
    out, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and len(error) < 6000 and not out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "latin.txt"]


@pytest.mark.slow
def test_a_state_that_does_not_fit_or_is_not_there_is_one_line(tmp_path, capsys):
    assert command.main([*TINY, *CPU, "--stage", "2", "--save", str(tmp_path / "state")]) == 0
    for argv, words in (
        (["--width", "32"], "embedding.weight has shape (256, 16) in the checkpoint, (256, 32) here"),
        (["--layers", "3"], "parameters that the checkpoint has not: blocks.2"),
        (["--resume", str(tmp_path)], "nothing has been saved in"),
    ):
        capsys.readouterr()
        assert command.main([*TINY, *CPU, "--stage", "3", "--resume", str(tmp_path / "state"), *argv]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_trace_has_the_last_step_of_all_ranks(tmp_path, capsys):
    assert command.main([*TINY, *CPU, "--trace"]) == 2 and "add --output FOLDER" in capsys.readouterr().err
    results = run(tmp_path, "--world-size", "2", "--stage", "3", "--trace")
    bars = [bar for bar in json.loads((tmp_path / "trace-Zero3.json").read_text())["traceEvents"] if bar["ph"] == "X"]
    for rank in range(2):
        mine = [bar for bar in bars if bar["pid"] == rank]
        assert {bar["cat"] for bar in mine} == {"compute", "all-gather", "reduce-scatter", "optimizer"}
        forward = [bar["name"] for bar in mine if bar["name"].startswith("forward blocks")]
        assert set(forward) == {"forward blocks.0", "forward blocks.1"}, "each layer"
        assert sum(bar["cat"] == "reduce-scatter" for bar in mine) == 3, "one step, of two blocks and the root"
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in bars)
    (one,) = results["runs"]
    assert "events" not in one and one["bytes_sent"] == pytest.approx(one["bytes_sent_formula"], rel=0.01)


OUT = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory"), RuntimeError("a bug")]


@pytest.mark.parametrize("error", OUT, ids=str)
def test_memory_that_runs_out_is_one_line_and_a_bug_is_not(error, monkeypatch, capsys):
    monkeypatch.setattr(command, "run", lambda *_: World(2).run(Mock(side_effect=error)))
    if "a bug" in str(error):
        with pytest.raises(RuntimeError, match="a bug"):
            command.main([])
        return
    assert command.main([]) == 2
    message = capsys.readouterr().err
    assert "does not fit in memory: use a smaller --batch-size" in message and message.count("\n") == 1


def test_help_says_every_default(capsys):
    with contextlib.suppress(SystemExit):
        command.main(["--help"])
    words = capsys.readouterr().out
    for name, value in vars(command.parse([])).items():
        assert "--" + name.replace("_", "-") in words
        assert name in ("text", "world_size", "dtype") or f"default: {value}" in words or value in ("auto", None, False)


# As a user starts it.


def start(*command, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", **environment},
    )


@pytest.mark.slow
def test_from_a_shell_into_a_pipe(tmp_path):
    done = start(sys.executable, "-m", "minizero.train", *TINY, *CPU, "--stage", "2", "--output", str(tmp_path / "new"))
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Zero2") and "6/6" in lines[0] and len([line for line in lines if "6/6" in line]) == 1
    assert all(len(line) <= 80 for line in lines if not line.startswith("wrote"))
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == ["boxes.png", "curves.png", "losses.png", "results.json"]


def test_a_text_without_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(text, "LONGEST", 100)
    assert command.main([*TINY, *CPU, "--output", str(tmp_path / "new")]) == 2
    assert "text.txt has more than 100 bytes, or no end" in capsys.readouterr().err


# The first that `minizero` imports, and one of the command's.
@pytest.mark.parametrize("module", ["torch", pytest.param("rich", marks=pytest.mark.slow)])
def test_control_c_while_it_imports_is_one_line(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = start(sys.executable, "-m", "minizero.train", PYTHONPATH=str(tmp_path))
    assert done.stderr == "interrupted\n" and done.returncode


@pytest.mark.slow
def test_control_c_is_one_line(tmp_path):
    """In the middle of training, while the ranks' threads compute."""
    interrupted = """
import os, runpy, signal, sys, threading, minizero.train.report
threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
runpy.run_module("minizero.train", run_name="__main__", alter_sys=True)
"""
    done = start(sys.executable, "-c", interrupted, "--steps", "100000", *CPU, "--output", str(tmp_path / "new"))
    assert done.stderr == "python -m minizero.train: interrupted\n"
    assert done.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_go_on_where_threads_stopped(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    state = str(tmp_path / "state")
    run(tmp_path, "--world-size", "2", "--stage", "2", "--steps", "2", "--save", state)
    more = [*TINY, "--stage", "3", "--steps", "2", "--resume", state, "--save", state]
    done = start(*launch, "-m", "minizero.train", *more)
    assert done.returncode == 0 and done.stdout.count("saved the state after step 4") == 1, done.stderr
    last = run(tmp_path, "--world-size", "2", "--stage", "1", "--steps", "2", "--resume", state)["runs"][0]["losses"]
    assert last == run(tmp_path, "--world-size", "2", "--stage", "0")["runs"][0]["losses"][4:]


@pytest.mark.slow
@pytest.mark.accuracy
def test_the_readmes_loop_runs():
    """Its first Python block, with fewer steps."""
    code = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code.replace("run(train, 10)", "run(train, 2)"), names)
    shapes = [{name: value.shape for name, value in state.items()} for state in names["states"]]
    assert len(shapes) == 4 and shapes[0] == {k: v.shape for k, v in GPT(GPTConfig()).state_dict().items()}
