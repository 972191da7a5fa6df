"""`make gradebook DIR=submissions`: what each student's answers were told, as tables.

A submission is a folder with files of a workbook, at any depth. A cell is "passed", "not begun", "not handed in", or
the diagnosis in words. The tables are written anew after each student, so that nothing that happens later loses a mark:

    gradebook.csv       a row for each exercise, a column for each student
    moodle.csv          a row for each student: 1 for an exercise that passed; canvas.csv: how many passed
    gradescope/….json   the result of one student, as Gradescope's autograder reads it
    oral/….html         for an oral examination: questions on the student's own code, and, folded, the answers (oral.py)

A strange answer runs in a sandbox, if the system has one (`sandbox.py`). No sandbox hides the package's own functions.
"""

import concurrent.futures
import csv
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from tests.exercises.course import COURSE, Exercise
from tests.exercises.machine import oral, sandbox
from tests.exercises.machine.checker import Checker
from tests.exercises.machine.oral import Asked

WORDS = {"passed": "passed", "todo": "not begun", "impossible": "needs Triton"}
NOT_REACHED = "not checked: the time was over, or an answer ended what checks it"
LONGEST = 2000  # characters of a diagnosis on Gradescope


class Grades(NamedTuple):
    """A student's cells, by the exercise's id, what the lecturer should know of the folder, and what one may ask."""

    student: str
    cells: dict[str, str]
    notes: list[str]
    asked: list[Asked] = []

    def passed(self, exercises: Iterable[Exercise]) -> int:
        """How many of the exercises have passed."""
        return sum(self.cells[exercise.id] == "passed" for exercise in exercises)


def write(folder: Path, output: Path | None, console: Any) -> int:
    """Check everything under `folder`, write the tables, and return 0. `ValueError` if there are no submissions."""
    if not folder.is_dir():
        raise ValueError(f"gradebook: {folder} is no folder: make gradebook DIR=submissions, one folder a student")
    folder = folder.resolve()
    output = output or folder / "gradebook.csv"
    students = sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("gradescope", "oral"))
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
    console.print(escape(f"wrote {_plain(str(output))}, and moodle.csv, canvas.csv, gradescope/, oral/ beside it"))
    return 0


def grade(student: Path, submissions: Path, seed: str) -> Grades:
    """All answers of one student, in one sandbox, and questions on those of the core that have passed."""
    with Checker(sandbox.wall(submissions, student), seed=seed) as checker:
        *_, grades = one_by_one(student, COURSE, checker)
        files, _ = answers(student)
        for exercise in COURSE:
            if exercise.core and grades.cells[exercise.id] == "passed":
                grades.asked.append(oral.ask(exercise, files[exercise.file], checker))
    return grades


def one_by_one(student: Path, course: list[Exercise], checker: Checker) -> Iterator[Grades]:
    """The grades after each exercise of `course`. Of those that are still to come a cell says so."""
    files, notes = answers(student)
    grades = Grades(_plain(student.name), {exercise.id: NOT_REACHED for exercise in course}, notes, [])
    for exercise in course:
        grades.cells[exercise.id] = _cell(exercise, files, checker)
        yield grades


def _cell(exercise: Exercise, files: dict[str, Path], checker: Checker) -> str:
    if exercise.file not in files:
        return "not handed in"
    try:
        outcome = checker.check(exercise, files[exercise.file])
        return WORDS.get(outcome.status) or f"{outcome.name}: {outcome.words}"
    except Exception as error:  # whatever it is, the other answers count
        return f"gradebook-error: {type(error).__name__}: {error}"


def points(cell: str) -> float:
    """1 for an answer that passed; half for one that is right in a third of the drawn cases; else 0."""
    return 1.0 if cell == "passed" else 0.5 if cell.startswith("random: ") else 0.0


def for_gradescope(grades: Grades, course: list[Exercise]) -> str:
    """The text of a results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""
    tests = [
        {
            "name": f"{exercise.id} {exercise.title}",
            "score": points(cell),
            "max_score": 1,
            "status": "passed" if cell == "passed" else "failed",
            "output": _plain(cell[:LONGEST]),
            "visibility": "visible",
        }
        for exercise in course
        for cell in [grades.cells[exercise.id]]
    ]
    return json.dumps({"tests": tests, "output": "\n".join(grades.notes)[:LONGEST]}, indent=1)


def answers(student: Path) -> tuple[dict[str, Path], list[str]]:
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
        replace(output.parent / "gradescope" / f"{grades.student}.json", for_gradescope(grades, COURSE))
        if grades.asked:
            (output.parent / "oral").mkdir(exist_ok=True)
            replace(output.parent / "oral" / f"{grades.student}.html", oral.page(grades.student, grades.asked))


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    """A table that a spreadsheet reads as text: no cell is taken for a formula."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [[f"'{cell}" if cell[:1] in tuple("=+-@\t\r") else cell for cell in map(_plain, row)] for row in rows]
    )
    replace(path, text.getvalue())


def replace(path: Path, text: str) -> None:
    """Write a file whole, or leave what is there."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="")
    new.replace(path)


def _plain(text: str) -> str:
    """The text, with escapes for what UTF-8 cannot write: half characters, and names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
