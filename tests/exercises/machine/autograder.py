"""`make autograder`: what Gradescope and GitHub Actions take. And what then runs there, for one submission.

    gradescope.zip   setup.sh, run_autograder, and the course
    github/          what a student's repository begins with: the exercises, and a workflow that checks them

Both run this file as a command. It writes its results after each exercise, so that one that ends everything loses what
comes after it, and no more. An answer runs in bubblewrap, if there is one; else, if this is root, as a user without
rights; else with this user's rights, but without its environment. So on both services no answer writes the results.

Formats: https://gradescope-autograders.readthedocs.io/en/latest/specs/ and, of the summary, GitHub's "Adding a job
summary", https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands.
"""

import argparse
import html
import os
import re
import secrets
import signal
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.exercises.course import COURSE, ROOT, Exercise, find
from tests.exercises.machine import gradebook, sandbox
from tests.exercises.machine.checker import Checker
from tests.exercises.workbook import Workbook

SERVICES = ROOT / "tests" / "exercises" / "services"
FILES = ("constraints.txt", "README.md", "LICENSE")
NOT_BEGUN = ("not handed in", "not begun", "needs Triton")
SHORT = 600  # characters of a diagnosis in a summary, which may have 1 MiB in all


def write(output: Path, exercises: Sequence[Exercise], console: Any) -> int:
    """Write gradescope.zip and github/ into `output`, for these exercises."""
    words = {"EXERCISES": " ".join(exercise.id for exercise in exercises), "REPOSITORY": _repository()}
    output.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output / "gradescope.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in ("setup.sh", "run_autograder"):
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100755 << 16
            zipped.writestr(entry, _filled(name, words))
        for path in _course():
            zipped.write(path, path.relative_to(ROOT))
    workflow = output / "github" / ".github" / "workflows" / "exercises.yml"
    workflow.parent.mkdir(parents=True, exist_ok=True)
    workflow.write_text(_filled("exercises.yml", words), encoding="utf-8")
    for stub in (output / "github").glob("[0-9][0-9]_*.py"):  # of an earlier call
        stub.unlink()
    Workbook(output / "github").fill(exercises)
    console.print(f"wrote gradescope.zip and github/ into {output}, for {len(exercises)} exercises", markup=False)
    if words["REPOSITORY"].startswith("OWNER/"):
        console.print("The workflow takes the course from OWNER/…: write your copy into pyproject.toml, Repository.")
    return 0


def _repository() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"].removeprefix("https://github.com/").removesuffix(".git")


def _filled(name: str, words: dict[str, str]) -> str:
    text = (SERVICES / name).read_text(encoding="utf-8")
    return re.sub(r"\b(EXERCISES|REPOSITORY)\b", lambda match: words[match[0]], text)


def _course() -> list[Path]:
    """The files that a check needs."""
    parts = [ROOT / part for part in sandbox.PARTS]
    found = [path for part in parts for path in [part, *sorted(part.rglob("*"))] if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts] + [ROOT / name for name in FILES]


# What follows runs there.


def main(argv: list[str] | None = None) -> int:
    """Check the submission. The exit status is 1 if an exercise was begun and has not passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.exercises.machine.autograder", description=__doc__)
    parser.add_argument("submission", type=Path)
    parser.add_argument("--results", type=Path, help="results.json, for Gradescope")
    parser.add_argument("--summary", type=Path, help="a file to which Markdown is added, for GitHub")
    parser.add_argument("--exercises", nargs="+", type=find, default=COURSE)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the time is over: end what was started, too
    seed = os.environ.get("SEED") or str(secrets.randbelow(10**6))
    with gradebook.handed_in(arguments.submission) as (folder, notes):
        notes.append(f"The drawn cases: SEED={seed}")
        with Checker(sandbox.wall(folder), gradebook.WAIT, seed) as checker:
            for grades in gradebook.one_by_one("", folder, notes, arguments.exercises, checker):
                if arguments.results is not None:
                    arguments.results.parent.mkdir(parents=True, exist_ok=True)
                    gradebook.replace(arguments.results, gradebook.for_gradescope(grades, arguments.exercises))
    if arguments.summary is not None:
        with arguments.summary.open("a", encoding="utf-8") as file:
            file.write(_summary(grades, arguments.exercises))
    return int(any(cell != "passed" and cell not in NOT_BEGUN for cell in grades.cells.values()))


def _summary(grades: gradebook.Grades, exercises: Sequence[Exercise]) -> str:
    """In Markdown. What came from an answer stands in <pre>, where nothing is read as Markdown."""
    rows, words = [], []
    for exercise in exercises:
        cell = grades.cells[exercise.id]
        mark = "✅" if cell == "passed" else "·" if cell in NOT_BEGUN else "❌"
        rows.append(f"| {mark} | {exercise.id} {exercise.title} | {gradebook.points(cell):g} |")
        if mark == "❌":
            words.append(f"{exercise.id} {exercise.title}\n{cell[:SHORT]}")
    total = sum(map(gradebook.points, grades.cells.values()))
    parts = [f"## {grades.passed(exercises)} of {len(exercises)} exercises passed, {total:g} points", ""]
    parts += ["| | exercise | points |", "|---|---|--:|", *rows, ""]
    parts += [f"<pre>{html.escape(text.encode('utf-8', 'backslashreplace').decode())}</pre>\n" for text in words]
    parts += [f"<pre>{html.escape(note[:SHORT])}</pre>\n" for note in grades.notes[:20]]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
