"""`make gradebook DIR=submissions`: what each student's answers were told, as tables.

A submission is a folder with files of a workbook, at any depth. A cell is "passed", "not begun", "not handed in", or
the diagnosis in words. The tables are written anew after each student, so that nothing that happens later loses a mark:

    gradebook.csv       a row for each exercise, a column for each student
    moodle.csv          a row for each student: 1 for an exercise that passed; canvas.csv: how many passed
    gradescope/….json   the result of one student, as Gradescope's autograder reads it

A strange answer runs in a sandbox, if the system has one (`sandbox.py`). No sandbox hides the package's own functions.
"""

import concurrent.futures
import csv
import io
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from tests.exercises.course import COURSE, Exercise
from tests.exercises.machine import sandbox
from tests.exercises.machine.checker import Checker

WORDS = {"passed": "passed", "todo": "not begun", "impossible": "needs Triton"}


class Grades(NamedTuple):
    """A student's cells, by the exercise's id, and what the lecturer should know of the folder."""

    student: str
    cells: dict[str, str]
    notes: list[str]

    def passed(self, exercises: Iterable[Exercise]) -> int:
        """How many of the exercises have passed."""
        return sum(self.cells[exercise.id] == "passed" for exercise in exercises)


def write(folder: Path, output: Path | None, console: Any) -> int:
    """Check everything under `folder`, write the tables, and return 0. `ValueError` if there are no submissions."""
    if not folder.is_dir():
        raise ValueError(f"gradebook: {folder} is no folder: make gradebook DIR=submissions, one folder a student")
    folder = folder.resolve()
    output = output or folder / "gradebook.csv"
    students = sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("gradescope", ".git"))
    students = [path for path in students if not path.name.startswith(".")]
    if not students:
        raise ValueError(f"gradebook: {folder} has no folders: put each student's files into one")
    if not sandbox.has_one():
        console.print(sandbox.OPEN)
    seed = os.environ.get("SEED") or str(secrets.randbelow(10**6))
    console.print(f"SEED={seed}: the cases that are drawn, the same for all students")
    done: list[Grades] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        waiting = [pool.submit(grade, student, folder, seed) for student in students]
        try:
            for future in concurrent.futures.as_completed(waiting):
                grades = future.result()
                done = sorted([*done, grades])
                _write_tables(done, output)
                console.print(escape(f"{grades.student}: {grades.passed(COURSE)} of {len(COURSE)} passed"))
                for note in grades.notes:
                    console.print(escape(f"  {note}"))
        finally:
            pool.shutdown(cancel_futures=True)
    table = Table("student", "passed", "core", box=None)
    for grades in done:
        core = grades.passed(exercise for exercise in COURSE if exercise.core)
        table.add_row(escape(grades.student), str(grades.passed(COURSE)), str(core))
    console.print(table)
    console.print(escape(f"wrote {_plain(str(output))}, and moodle.csv, canvas.csv, gradescope/ beside it"))
    return 0


def grade(student: Path, submissions: Path, seed: str) -> Grades:
    """All answers of one student, in one sandbox."""
    files, notes = _files(student)
    cells = {}
    with Checker(sandbox.wall(submissions, student), seed=seed) as checker:
        for exercise in COURSE:
            if exercise.file not in files:
                cells[exercise.id] = "not handed in"
                continue
            try:
                outcome = checker.check(exercise, files[exercise.file])
                cells[exercise.id] = WORDS.get(outcome.status) or f"{outcome.name}: {outcome.words}"
            except Exception as error:  # whatever it is, the other answers count
                cells[exercise.id] = f"gradebook-error: {type(error).__name__}: {error}"
    return Grades(_plain(student.name), cells, notes)


def _files(student: Path) -> tuple[dict[str, Path], list[str]]:
    """The answers by the name of their file; what is odd about the folder."""
    names = {exercise.file for exercise in COURSE}
    found: dict[str, Path] = {}
    notes = []
    for path in sorted(student.rglob("*.py")):
        place = path.relative_to(student)
        if "old" in place.parts or path.name == "conftest.py":
            continue
        if path.name not in names:
            notes.append(_plain(f"{place} is no file of an exercise"))
        elif path.name in found:
            notes.append(_plain(f"{place} is left out: {found[path.name].relative_to(student)} has the same name"))
        elif not path.resolve().is_relative_to(student.resolve()):
            notes.append(_plain(f"{place} is left out: it is a link to another folder"))
        else:
            found[path.name] = path
    return found, notes


def _write_tables(done: list[Grades], output: Path) -> None:
    """All tables, of the students so far."""
    rows = [["exercise", *(grades.student for grades in done)]]
    rows += [[f"{e.id} {e.name}", *(grades.cells[e.id] for grades in done)] for e in COURSE]
    _write_csv(output, rows)
    rows = [["username", *(f"{e.id} {e.name}" for e in COURSE), "passed", "notes"]]
    for grades in done:
        marks = [str(int(grades.cells[e.id] == "passed")) for e in COURSE]
        rows.append([grades.student, *marks, str(grades.passed(COURSE)), "; ".join(grades.notes)])
    _write_csv(output.with_name("moodle.csv"), rows)
    rows = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "minizero exercises"]]
    rows += [["    Points Possible", "", "", "", "", str(len(COURSE))]]
    rows += [[grades.student, "", "", grades.student, "", str(grades.passed(COURSE))] for grades in done]
    _write_csv(output.with_name("canvas.csv"), rows)
    (output.parent / "gradescope").mkdir(exist_ok=True)
    for grades in done:
        tests = [
            {"name": f"{e.id} {e.title}", "score": int(cell == "passed"), "max_score": 1, "output": _plain(cell)}
            for e in COURSE
            for cell in [grades.cells[e.id]]
        ]
        _replace(output.parent / "gradescope" / f"{grades.student}.json", json.dumps({"tests": tests}, indent=1))


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    """A table that a spreadsheet reads as text: no cell is taken for a formula."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [[f"'{cell}" if cell[:1] in tuple("=+-@\t\r") else cell for cell in map(_plain, row)] for row in rows]
    )
    _replace(path, text.getvalue())


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or leave what is there."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="")
    new.replace(path)


def _plain(text: str) -> str:
    """The text, with escapes for what UTF-8 cannot write: half characters, and names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
