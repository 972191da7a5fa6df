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
from tests.exercises.machine import checker, judge, runner
from tests.exercises.machine.runner import Outcome
from tests.exercises.workbook import Workbook

RING = find("reduce_scatter")


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(tmp_path / "workbook"))
    book = Workbook()
    book.fill()
    return book


PAD = find("pad")
WRONG, RIGHT, HINTS = stubs.answer(PAD, PAD.load().WRONG[0]), stubs.answer(PAD), len(PAD.text().hints)
AFTER = " ".join(PAD.text().after.split())
# What stands in the file then, if something else; the command, its status, and what it says.
WAY = [
    ("", "list", 0, f"0 of {len(COURSE)} passed"),
    ("", "check", 1, "Not begun"),
    *(("", "hint", 0, f"Hint {number} of {HINTS}") for number in range(1, HINTS + 1)),
    ("", "hint", 0, "make solution E=01 INSIST=1"),
    ("", "solution 01", 1, "has not passed yet"),
    ("", "reset", 2, "make reset E=05"),
    (WRONG, "check 01", 1, "append nothing"),
    (RIGHT, "check", 0, AFTER),
    ("", "solution pad", 0, AFTER),
    ("", "list", 0, f"1 of {len(COURSE)} passed"),
    ("", "hint 01", 0, "The reference: make solution E=01 "),
    ("def pad(:", "check 01", 1, "Python cannot read the file"),
    ("", "list", 0, f"0 of {len(COURSE)} passed"),
    ("", "reset 01", 0, "old/01_pad.1.py"),
    ("", "check 99", 2, "there is no exercise '99'"),
]


@pytest.mark.slow
def test_a_student_s_way_through_the_commands(workbook, capsys):
    for text, words, status, said in WAY:
        if text:
            workbook.path(PAD).write_text(text)
        assert commands.main(words.split()) == status, words
        printed = "".join(capsys.readouterr())
        assert said in " ".join(printed.split()) + " " or said in printed.replace("\n", ""), (words, printed)
        assert words != "check 01" or "Read next" not in printed, "that is for who has passed"
        lines = [line for line in printed.splitlines() if str(workbook.folder) not in line]
        assert max(map(len, lines), default=0) <= 80


@pytest.mark.slow
def test_pytest_checks_a_file_of_the_workbook(workbook):
    for text, status, said in ((RIGHT, 0, "1 passed"), ("def pad(:", 1, "Python cannot read the file")):
        workbook.path(PAD).write_text(text)
        words = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        words += ["-p", "no:cacheprovider", str(workbook.path(PAD))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == status and said in done.stdout and "Traceback" not in done.stdout, done.stdout
        assert Workbook().has_passed(PAD) == (status == 0)


@pytest.mark.slow
def test_only_the_last_check_counts_and_one_alone_is_followed_by_what_the_package_does(workbook, monkeypatch, capsys):
    for status in ("passed", "failed", "passed", "impossible", "todo", "passed"):
        before = Workbook().has_passed(RING)
        monkeypatch.setattr(checker.Checker, "check", lambda *_, status=status: Outcome(status, status, "So."))
        assert commands.main(["check", "05"]) == (status in ("failed", "todo"))
        assert Workbook().has_passed(RING) == (before if status == "impossible" else status == "passed")
        assert (RING.text().after in " ".join(capsys.readouterr().out.split())) == (status == "passed")
    assert commands.main(["check", "all"]) == 0
    assert RING.text().after not in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_adds_no_error_of_its_own(workbook):
    """An exercise that has not passed, and a word that is missing, are said by the command."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    for words, said in (
        (["solution", "E=01"], "has not passed yet"),
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
def test_watch_checks_what_is_saved_and_imports_torch_once(workbook, monkeypatch, capsys):
    """Two files are saved, one after the other; both are checked by one host, which has forked the judge."""
    leaders, said = set(), []
    run, check = checker.Process.ask, commands.check_one

    def ask(process, **asked):
        leaders.add(process.leader.pid)
        return run(process, **asked)

    def check_one(*args):
        said.append(check(*args).status)

    def save(_):
        if len(said) == 2:
            raise KeyboardInterrupt
        exercise, wrong = (PAD, WRONG) if not said else (find("split"), stubs.answer(find("split")))
        workbook.path(exercise).write_text(wrong)

    monkeypatch.setattr(checker, "JUDGE", [])
    monkeypatch.setattr(checker.Process, "ask", ask)
    monkeypatch.setattr(commands, "check_one", check_one)
    monkeypatch.setattr(commands.time, "sleep", save)
    assert commands.main(["watch"]) == 130
    assert said == ["failed", "passed"] and (len(leaders) == 1 or not checker.CAN_FORK)
    assert "Watching" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_may_take_a_few_times_what_the_reference_takes_there_and_then(tmp_path, monkeypatch):
    exercise = find("online_softmax")
    path = tmp_path / exercise.file
    path.write_text(stubs.answer(exercise))
    monkeypatch.setattr(runner, "SECONDS", 1.0)  # the files that the check loads, and no more
    for times, said in ((runner.SLOWER, "passed"), (-5.0, "endless")):
        monkeypatch.setattr(runner, "SLOWER", times)
        assert judge.examine(exercise, path, "7", judge.Judge()).name == said


@pytest.mark.slow
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
