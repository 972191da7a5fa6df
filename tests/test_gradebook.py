"""The gradebook: whatever a submission is, the marks of the others stand, and nothing of it stays."""

import csv
import json
import os
import sys

import pytest
from rich.console import Console

from tests.exercises import commands, stubs
from tests.exercises.course import find
from tests.exercises.machine import checker, gradebook, sandbox

PAD = find("pad")
LIVES = "98765.4"  # seconds, by which a process is known
HEAD = "import os, sys, time, torch\nfrom pathlib import Path\n"
RIGHT = stubs.answer(PAD)

# What the file of an exercise may be, and what the cell then says. The last line of each is not reached, or is wrong.
STRANGE = {
    "killer": (HEAD + "os.kill(os.getppid(), 9)\ntime.sleep(99)\n" + RIGHT, ("killed:", "ended:", "endless:")),
    "exits": (HEAD + "os._exit(0)\n" + RIGHT, ("ended:",)),
    "ends the others": (
        HEAD + "for place in Path('/proc').glob('[0-9]*'):\n    try:\n"
        "        others = b'host' in (place / 'cmdline').read_bytes() and int(place.name) != os.getppid()\n"
        "        if others and int(place.name) != os.getpid():\n"
        "            os.kill(int(place.name), 9)\n    except OSError:\n        pass\n" + RIGHT,
        ("passed",),
    ),
    "lives on": (
        HEAD + "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv('/bin/sleep', ['sleep', '{LIVES}'])\n    os._exit(0)\n" + RIGHT,
        ("passed",),
    ),
    "floods": (
        HEAD
        + "for fd in range(3, 30):\n    try:\n        pipe = os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY)\n"
        "        for _ in range(200):\n            os.write(pipe, b'z' * 2**20)\n    except OSError:\n        pass\n"
        + RIGHT,
        ("passed",),
    ),
    "a deep default": (RIGHT.replace("multiple: int", "multiple: int = " + "1+" * 3000 + "1"), ("syntax:",)),
    "many names": ("-a;" * 2**18 + "\n" + RIGHT, ("NameError:", "syntax:")),
    "minuses": ("def pad(tensor, multiple):\n    return " + "-" * 100_000 + "1\n", ("syntax:",)),
    "many terms": ("def pad(tensor, multiple):\n    return " + "1+" * 20_000 + "1\n", ("syntax:", "RecursionError:")),
    "half a character": ('def pad(tensor, multiple):\n    raise ValueError("\\ud800")\n', ("ValueError:",)),
    "control": ('def pad(tensor, multiple):\n    raise ValueError("\\0\\x1b[31m\\x07\\u202e")\n', ("ValueError:",)),
    "holds the pipe": (HEAD + "if os.fork() == 0:\n    time.sleep(9999)\n    os._exit(0)\n" + RIGHT, ("passed",)),
    "holds it and dies": (HEAD + "if os.fork() == 0:\n    time.sleep(9999)\nos._exit(0)\n" + RIGHT, ("ended:",)),
    "=HYPERLINK(1)": ('def pad(tensor, multiple):\n    raise ValueError("=1+1")\n', ("ValueError:",)),
    "forges": (
        HEAD + 'import json\nsaid = json.dumps({"status": "passed", "name": "passed", "words": "", "printed": ""})\n'
        "import contextlib\nfor fd in range(3, 30):\n    with contextlib.suppress(OSError):\n"
        '        os.write(fd, said.encode() + b"\\n")\nos._exit(0)\n' + RIGHT,
        ("ended:",),
    ),
    "hoards": (HEAD + "torch.ones(25 * 10**9)\n" + RIGHT, ("RuntimeError:",)),
    "prints": (HEAD + "print('x' * 2**27)\n" + RIGHT, ("too-much-output:", "MemoryError:")),
    "computes for ever": ("sum(range(10**13))\n" + RIGHT, ("endless:",)),
    "in a thread": (
        "from threading import Lock\nlock = Lock()\nlock.acquire()\nlock.acquire()\n" + RIGHT,
        ("endless:",),
    ),
    "with a mark": ("\ufeff" + RIGHT, ("passed",)),
    "right": (RIGHT, ("passed",)),
    # Folders called like a table, and names of which two become one.
    **dict.fromkeys(
        ("gradebook.csv", "moodle.csv", "oral", "gradescope", "RIGHT", "right ", "x" * 250), (RIGHT, ("passed",))
    ),
}
# What stands in a folder in place of an answer; none of it is read.
UNREADABLE = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "neighbour": lambda path: path.symlink_to(path.parent.parent / "right" / PAD.file),
    "lecturer": lambda path: path.symlink_to(checker.ROOT / "pyproject.toml"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture
def submissions(tmp_path, monkeypatch):
    monkeypatch.setattr(gradebook, "WAIT", 5.0)
    folder = tmp_path / "submissions"
    folder.mkdir()
    return folder


def student(submissions, name, text):
    folder = submissions / name
    folder.mkdir()
    (folder / PAD.file).write_text(text, encoding="utf-8")


def cells(submissions, name="gradebook.csv"):
    with (submissions / name).open(encoding="utf-8", newline="") as file:
        names, row = csv.reader(file)
    return dict(zip(names[1:], row[1:], strict=True))


# Beside one that is right. What one that a spreadsheet would run, names that look alike, … do to each other is in FEW;
# a class of 60 in soak.
HOSTILE = ("killer", "ends the others", "lives on", "floods", "a deep default", "holds the pipe", "forges")
FEW = ("killer", "right ", "=HYPERLINK(1)", "control", "gradebook.csv", "oral", "right", "RIGHT")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param((name, "right"), marks=pytest.mark.timeout(120), id=name) for name in HOSTILE),
        pytest.param(FEW, marks=pytest.mark.timeout(240), id="few"),
        pytest.param(tuple(STRANGE), marks=[pytest.mark.soak, pytest.mark.timeout(900)], id="all"),
    ],
)
def test_whatever_a_submission_is_the_marks_of_the_others_stand(names, submissions):
    strange = {name: STRANGE[name] for name in names}
    if len(names) > len(FEW):
        strange |= {f"student {number}": STRANGE["right"] for number in range(60 - len(names))}
    for name, (text, _) in strange.items():
        student(submissions, name, text)
    for name, make in UNREADABLE.items():
        (submissions / name).mkdir()
        make(submissions / name / PAD.file)
    (submissions / "a link").symlink_to(submissions / "right")
    (submissions / os.fsdecode(b"caf\xe9 [late]")).mkdir()
    assert gradebook.write(submissions, None, Console(width=80, file=sys.stdout), [PAD]) == 0
    found = cells(submissions, "gradebook-2.csv" if "gradebook.csv" in names else "gradebook.csv")
    assert len(found) == len(strange) + len(UNREADABLE) + 1
    shown = {"=HYPERLINK(1)": "'=HYPERLINK(1)", "right": "right-2", "right ": "right -2", "x" * 250: "x" * 60}
    for name, (_, starts) in strange.items():
        name = name if len(names) == 2 else shown.get(name, name)
        assert found[name].startswith(starts), (name, found)
    assert {found[name] for name in UNREADABLE} == {"not handed in"}
    assert found["caf\\udce9 [late]"] == "not handed in"
    assert all(character.isprintable() for cell in found.values() for character in cell)
    running = [path.read_bytes() for path in checker.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in running if LIVES.encode() in words]


def test_one_assignment_has_its_exercises_only(submissions, monkeypatch):
    """Cells, columns and points are those of `E=`; files of other exercises are neither checked nor odd."""
    student(submissions, "ada", RIGHT)
    (submissions / "ada" / find("views").file).write_text("!")
    monkeypatch.setattr(checker.Checker, "check", lambda *_: checker.Outcome("passed", "passed", "Passed."))
    assert commands.main(["gradebook", str(submissions), "01", "02"]) == 0
    rows = list(csv.reader((submissions / "gradebook.csv").open()))
    assert rows == [["exercise", "ada"], ["01 pad", "passed"], ["02 chunk", "not handed in"]]
    assert "ada,1,0,1,\n" in (submissions / "moodle.csv").read_text()
    assert list(csv.reader((submissions / "canvas.csv").open()))[1][-1] == "2"


def test_a_table_is_written_after_each_student(submissions, monkeypatch):
    for name in ("ada", "bob"):
        student(submissions, name, RIGHT)

    def grade(name, *_):
        if name == "bob":
            raise KeyboardInterrupt
        return gradebook.Grades(name, {PAD.id: "passed"}, [])

    monkeypatch.setattr(gradebook, "grade", grade)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        gradebook.write(submissions, None, Console(quiet=True), [PAD])
    assert cells(submissions) == {"ada": "passed"}


def test_exports_that_other_systems_read(submissions, monkeypatch):
    student(submissions, "ada", RIGHT)
    (submissions / "ada" / "01-pad.py").write_text(RIGHT)
    monkeypatch.setattr(checker.Checker, "check", lambda *_: checker.Outcome("failed", "shape", "=no"))
    assert gradebook.write(submissions, None, Console(quiet=True), [PAD]) == 0
    read = {name: list(csv.reader((submissions / f"{name}.csv").open())) for name in ("moodle", "canvas")}
    assert read["moodle"] == [
        ["username", "01 pad", "passed", "notes"],
        ["ada", "0", "0", "01-pad.py is no file of an exercise"],
    ]
    assert read["canvas"][0][:2] == ["Student", "ID"] and read["canvas"][1][-1] == "1"
    assert read["canvas"][2] == ["ada", "", "", "ada", "", "0"]
    (test,) = json.loads((submissions / "gradescope" / "ada.json").read_text())["tests"]
    assert (test["score"], test["max_score"], test["output"]) == (0, 1, "shape: =no")


SPY = (
    HEAD
    + """
for place in (Path(HOME), Path.cwd() / "tests", Path(__file__).parent):
    try:
        (place / "left-behind").write_text("x")
    except OSError as error:
        pass
assert not Path("Makefile").exists() and not Path("/etc/passwd").exists()
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77)"], start_new_session=True)
assert [path.name for path in Path(__file__).parent.iterdir()] == [Path(__file__).name]
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 5)
except OSError:
    pass
else:
    raise RuntimeError("there is a network")
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not sandbox.has_one(), reason="no bubblewrap, or not allowed")
def test_in_the_sandbox_nothing_is_seen_or_left_behind(submissions, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        spy = SPY.replace("PORT", str(server.getsockname()[1])).replace("HOME", repr(str(tmp_path)))
        student(submissions, "ada", spy + RIGHT)
        student(submissions, "bob", RIGHT)
        gradebook.write(submissions, None, Console(quiet=True), [PAD])
    assert cells(submissions) == {"ada": "passed", "bob": "passed"}
    assert not list(tmp_path.rglob("left-behind")) and not (checker.ROOT / "tests" / "left-behind").exists()
    running = [path.read_bytes() for path in checker.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in running if b"time.sleep(77)" in words]
