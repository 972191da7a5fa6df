"""What a student and a lecturer call: `make exercises`, `make check`, …, pytest on a file, the gradebook."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exercises import commands, stubs
from tests.exercises.course import COURSE, ROOT, find
from tests.exercises.demo import main as demo
from tests.exercises.machine import checker
from tests.exercises.machine.runner import Outcome
from tests.exercises.workbook import Workbook

RING = find("reduce_scatter")


@pytest.fixture
def workbook(tmp_path):
    book = Workbook(tmp_path / "workbook")
    book.fill()
    return book


def command(workbook, *words, expect=0):
    """What `python -m tests.exercises` prints, at 80 columns."""
    environment = os.environ | {"MINIZERO_WORKBOOK": str(workbook.folder), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.exercises", *words], cwd=ROOT, env=environment, capture_output=True, timeout=600
    )
    assert done.returncode == expect, done.stdout.decode() + done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_a_student_s_way_through_the_commands(workbook):
    seen = []

    def say(*words, expect=0):
        text = command(workbook, *words, expect=expect)
        seen.append(text)
        return text

    assert f"0 of {len(COURSE)} passed" in say("list")
    assert "Not begun" in say("check", expect=1)
    hints = find("01").text().hints
    for number in range(1, len(hints) + 1):
        assert f"Hint {number} of {len(hints)}" in say("hint")
    assert "make solution E=01 INSIST=1" in say("hint")
    assert "INSIST" in say("solution", "01", expect=1)
    pad = workbook.path(find("01"))
    pad.write_text(stubs.answer(find("01"), find("01").load().WRONG[0]))
    assert "append nothing" in say("check", "01", expect=1) and "Read next" not in seen[-1]
    pad.write_text(stubs.answer(find("01")))
    for text in (say("check"), say("solution", "pad")):
        assert " ".join(find("01").text().after.split()) in " ".join(text.split())
    assert "passed" in seen[-2] and "def pad(" in seen[-1]
    assert f"1 of {len(COURSE)} passed" in say("list")
    assert "02_chunk.py" in say("list")
    assert "make solution E=01\n" in say("hint", "01")
    assert "old/01_pad.1.py" in say("reset", "01").replace("\n", "")
    command(workbook, "check", "99", expect=2)
    assert max(len(line) for text in seen for line in text.splitlines() if str(workbook.folder) not in line) <= 80


@pytest.mark.slow
def test_pytest_checks_a_file_of_the_workbook(workbook):
    def pytest_says(name):
        words = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        words += ["-p", "no:cacheprovider", str(workbook.path(find(name)))]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)

    pad = workbook.path(find("pad"))
    pad.write_text(stubs.answer(find("pad")))
    done = pytest_says("pad")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert Workbook(workbook.folder).has_passed(find("pad"))
    workbook.path(RING).write_text("def ring_reduce_scatter(:")
    done = pytest_says("reduce_scatter")
    assert done.returncode == 1 and "Python cannot read the file" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
    pad.write_text("def pad(:")
    assert pytest_says("pad").returncode == 1
    assert not Workbook(workbook.folder).has_passed(find("pad"))


@pytest.mark.slow
def test_an_exercise_that_fails_after_it_had_passed_counts_no_more(workbook, monkeypatch):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(workbook.folder))
    for status in ("passed", "failed", "passed", "impossible", "todo"):
        before = Workbook(workbook.folder).has_passed(RING)
        monkeypatch.setattr(checker.Checker, "check", lambda *_, status=status: Outcome(status, status, "So."))
        assert commands.main(["check", "05"]) == (status in ("failed", "todo"))
        after = before if status == "impossible" else status == "passed"
        assert Workbook(workbook.folder).has_passed(RING) == after


def test_what_the_package_does_differently_is_told_after_a_pass_but_not_forty_times(workbook, monkeypatch, capsys):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(workbook.folder))
    monkeypatch.setattr(checker.Checker, "check", lambda *_: Outcome("passed", "passed", "Passed."))
    for word, times in (("05", 1), ("all", 0)):
        assert commands.main(["check", word]) == 0
        assert " ".join(capsys.readouterr().out.split()).count(RING.text().after) == times


@pytest.mark.slow
def test_a_reset_without_an_exercise_says_how_to_name_one(workbook, monkeypatch, capsys):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(workbook.folder))
    assert commands.main(["reset"]) == 2
    assert "make reset E=05" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_adds_no_error_of_its_own(workbook):
    """An exercise that has not passed, and a word that is missing, are said by the command."""
    environment = os.environ | {"MINIZERO_WORKBOOK": str(workbook.folder), "PYTHONIOENCODING": "utf-8"}
    for words, said in (
        (["check", "E=01"], "Not begun"),
        (["solution", "E=01"], "has not passed yet"),
        (["reset"], "make reset E=05"),
        (["hint", "E=99"], "there is no exercise '99'"),
    ):
        done = subprocess.run(
            ["make", "--old-file", "setup", f"PY={sys.executable}", *words], cwd=ROOT, env=environment,
            capture_output=True, encoding="utf-8", timeout=600,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert said in printed and "***" not in printed, printed


@pytest.mark.slow
def test_an_assistant_is_told_to_help_and_not_to_write(workbook):
    path = workbook.folder / "AGENTS.md"
    text = path.read_text(encoding="utf-8")
    assert "make hint" in text and len(text.splitlines()) < 30
    path.write_text("ours")
    workbook.path(RING).unlink()
    assert workbook.fill() == 1 and path.read_text() == "ours"
    assert "AGENTS.md" in Path(ROOT, "notebooks/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_watch_checks_what_is_saved(workbook):
    environment = os.environ | {"MINIZERO_WORKBOOK": str(workbook.folder), "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONIOENCODING"] = "utf-8"
    watching = subprocess.Popen(
        [sys.executable, "-m", "tests.exercises", "watch"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "Watching" in watching.stdout.readline()
        workbook.path(RING).write_text("def ring_reduce_scatter(:")
        for line in watching.stdout:
            if "cannot read the file" in line:
                break
        else:
            pytest.fail("watch ended without a word")
    finally:
        watching.kill()
        watching.wait()


def test_without_triton_its_exercises_block_nothing(tmp_path, monkeypatch, workbook):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest)
    )
    exercise = find("triton_forward")
    assert "Linux, WSL or Colab" in checker.run(exercise, workbook.path(exercise)).words
    workbook.state["passed"] = [e.name for e in COURSE if e.number < exercise.number]
    assert workbook.current() == find("traffic")


def test_the_makefile_has_the_commands():
    text = Path(ROOT, "Makefile").read_text()
    for name in ("list", "check", "hint", "watch", "questions", "solution", "reset", "gradebook", "autograder"):
        assert f"python -m tests.exercises {name}" in text


@pytest.mark.slow
def test_the_demo_shows_what_a_mistake_does(tmp_path, capsys):
    assert demo(["zero2/does-not-free", "--steps", "2", "--output", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Zero2")]
    right, wrong = (float(re.search(r"zero_grad ([\d.]+)", line)[1]) for line in lines)
    assert wrong > 1.3 * right, "gradients that are not freed stay until then"
    assert (tmp_path / "broken-zero2-does-not-free.png").stat().st_size > 10_000
    assert demo(["forgot-devide"]) == 2
    assert "forgot-divide" in capsys.readouterr().err
