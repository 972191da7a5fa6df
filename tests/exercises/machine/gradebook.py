"""`make gradebook DIR=submissions`: what each student's answers were told, as tables.

A submission is a folder with files of a workbook, at any depth. A cell is "passed", "not begun", "not handed in", or
the diagnosis in words. With E="05 08" there are rows, columns and points for these exercises only. The tables are
written anew after each student, so that nothing that happens later loses a mark:

    gradebook.csv       a row for each exercise, a column for each student
    moodle.csv          a row for each student: 1 for an exercise that passed; canvas.csv: how many passed
    gradescope/….json   the result of one student, as Gradescope's autograder reads it
    oral/….html         for an oral examination: questions on the student's own code, and, folded, the answers (oral.py)

An answer is copied, and the copy runs in a sandbox, if the system has one (`sandbox.py`). So neither a link nor an
answer shows a file of the lecturer's. No sandbox hides the package's own functions.
"""

import concurrent.futures
import contextlib
import csv
import io
import itertools
import json
import os
import secrets
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from tests.exercises.course import COURSE, Exercise
from tests.exercises.machine import oral, sandbox
from tests.exercises.machine.checker import Checker
from tests.exercises.machine.oral import Asked
from tests.exercises.machine.runner import LARGEST

WORDS = {"passed": "passed", "todo": "not begun", "impossible": "needs Triton"}
NOT_REACHED = "not checked: the time was over, or an answer ended what checks it"
LONGEST = 2000  # characters of a diagnosis on Gradescope
NAME = 60  # characters of a student's name: a file is called so
WAIT = 30.0  # seconds that an answer may do nothing
FILES = {exercise.file for exercise in COURSE}


class Grades(NamedTuple):
    """A student's cells, by the exercise's id, what the lecturer should know of the folder, and what one may ask."""

    student: str
    cells: dict[str, str]
    notes: list[str]
    asked: list[Asked] = []

    def passed(self, exercises: Iterable[Exercise]) -> int:
        """How many of the exercises have passed."""
        return sum(self.cells[exercise.id] == "passed" for exercise in exercises)


def write(folder: Path, output: Path | None, console: Any, exercises: Sequence[Exercise] = COURSE) -> int:
    """Check everything under `folder`, write the tables, and return 0. `ValueError` if there are no submissions."""
    if not folder.is_dir():
        raise ValueError(f"gradebook: {folder} is no folder: make gradebook DIR=submissions, one folder a student")
    folder = folder.resolve()
    students = _students(folder)
    if not students:
        raise ValueError(f"gradebook: {folder} has no folders: put each student's files into one")
    places = _places(output or folder / "gradebook.csv", students.values())
    if sandbox.wall(folder) == ["env"]:
        console.print(sandbox.OPEN)
    for link in sorted(path.name for path in folder.iterdir() if path.is_symlink()):
        console.print(escape(f"{plain(link)} is a link, and left out: no answer of another folder is marked twice"))
    seed = os.environ.get("SEED") or str(secrets.randbelow(10**6))
    console.print(f"SEED={seed}: the cases that are drawn, the same for all students")
    done: list[Grades] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        waiting = [pool.submit(grade, name, path, exercises, seed) for name, path in students.items()]
        try:
            for future in concurrent.futures.as_completed(waiting):
                grades = future.result()
                done = sorted([*done, grades])
                _write_tables(done, places, exercises)
                console.print(escape(f"{grades.student}: {grades.passed(exercises)} of {len(exercises)} passed"))
                for note in grades.notes:
                    console.print(escape(f"  {note}"))
        finally:
            pool.shutdown(cancel_futures=True)
    table = Table("student", "passed", "core", box=None)
    for grades in done:
        core = grades.passed(exercise for exercise in exercises if exercise.core)
        table.add_row(escape(grades.student), str(grades.passed(exercises)), str(core))
    console.print(table)
    first, *others = places
    console.print(escape(f"wrote {plain(str(first))}, and {', '.join(path.name for path in others)} beside it"))
    return 0


def _students(folder: Path) -> dict[str, Path]:
    """The folders of students, by names of which no two look alike. A link is none."""
    shown: dict[Path, str] = {}
    for path in folder.iterdir():
        ours = path.name.split("-")[0] in ("gradescope", "oral") and not any(path.rglob("*.py"))  # of an earlier run
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and not ours:
            shown[path] = plain(path.name, "")[:NAME]
    found: dict[str, Path] = {}
    taken = set(map(_look, shown.values()))
    for path, name in sorted(shown.items(), key=lambda pair: (pair[1] != pair[0].name, pair)):
        if _look(name) in map(_look, found):
            name = _first_free(Path(name), taken).name
            taken.add(_look(name))
        found[name] = path
    return found


def _look(name: str) -> str:
    """The same for names that look alike, or are one file on some systems."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _places(output: Path, students: Iterable[Path]) -> list[Path]:
    """Of each table the path, which is no student's folder; first that of `output`."""
    taken = {_look(str(path)) for path in students}
    beside = [output, *map(output.with_name, ("moodle.csv", "canvas.csv", "gradescope", "oral"))]
    return [_first_free(path, taken) for path in beside]


def _first_free(path: Path, taken: set[str]) -> Path:
    """The path, or with -2, -3, … the first that looks like none of those taken."""
    tries = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(path for path in tries if _look(str(path)) not in taken)


def grade(name: str, student: Path, exercises: Sequence[Exercise], seed: str) -> Grades:
    """All answers of one student, in one sandbox, and questions on those of the core that have passed."""
    grades = Grades(name, {exercise.id: NOT_REACHED for exercise in exercises}, [], [])
    try:
        with handed_in(student) as (folder, notes), Checker(sandbox.wall(folder), WAIT, seed) as checker:
            if name != student.name:
                notes.append(f"{name} is the folder {ascii(student.name)}")
            *_, grades = one_by_one(name, folder, notes, exercises, checker)
            for exercise in exercises:
                if exercise.core and grades.cells[exercise.id] == "passed":
                    grades.asked.append(oral.ask(exercise, folder / exercise.file, checker))
    except Exception as error:  # whatever it is, the other students count
        grades.notes.append(plain(f"gradebook-error: {type(error).__name__}: {error}"))
    return grades


def one_by_one(
    name: str, folder: Path, notes: list[str], exercises: Sequence[Exercise], checker: Checker
) -> Iterator[Grades]:
    """The grades after each of the exercises. Of those that are still to come a cell says so."""
    grades = Grades(name, {exercise.id: NOT_REACHED for exercise in exercises}, notes, [])
    for exercise in exercises:
        grades.cells[exercise.id] = _cell(exercise, folder / exercise.file, checker)
        yield grades


def _cell(exercise: Exercise, path: Path, checker: Checker) -> str:
    if not path.exists():
        return "not handed in"
    try:
        outcome = checker.check(exercise, path)
        return WORDS.get(outcome.status) or f"{outcome.name}: {outcome.words}"
    except Exception as error:  # whatever it is, the other answers count
        return f"gradebook-error: {type(error).__name__}: {error}"


def points(cell: str) -> float:
    """1 for an answer that passed; half for one that is right in the first six of the drawn cases; else 0."""
    return 1.0 if cell == "passed" else 0.5 if cell.startswith("random: ") else 0.0


def for_gradescope(grades: Grades, exercises: Sequence[Exercise]) -> str:
    """The text of a results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""
    tests = [
        {
            "name": f"{exercise.id} {exercise.title}",
            "score": points(cell),
            "max_score": 1,
            "status": "passed" if cell == "passed" else "failed",
            "output": plain(cell[:LONGEST]),
            "visibility": "visible",
        }
        for exercise in exercises
        for cell in [grades.cells[exercise.id]]
    ]
    return json.dumps({"tests": tests, "output": "\n".join(grades.notes)[:LONGEST]}, indent=1)


@contextlib.contextmanager
def handed_in(student: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder with copies of a student's answers; what is odd about those that were handed in.

    A user without rights can read the copies, and not change them. A link is not followed.
    """
    notes = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve() / "submission"
        folder.mkdir()
        for each in (folder.parent, folder):
            each.chmod(0o755)
        found = (Path(place, name) for place, _, names in os.walk(student) for name in names)  # it follows no link
        for path in sorted(path for path in found if path.suffix == ".py"):
            place = plain(str(path.relative_to(student)))
            if "old" in Path(place).parts or path.name == "conftest.py":
                continue
            if path.name not in FILES:
                notes.append(f"{place} is no file of an exercise")
            elif (copy := folder / path.name).exists():
                notes.append(f"{place} is left out: another file has the same name")
            elif (content := _content(path)) is None:
                notes.append(f"{place} is left out: a link, no file, or larger than {LARGEST // 2**20} MiB")
            else:
                copy.write_bytes(content)
                copy.chmod(0o644)
        yield folder, notes


def _content(path: Path) -> bytes | None:
    """None of a link, a pipe, a folder, …, and of a file that is too large for an answer."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
            return path.read_bytes()
    return None


def _write_tables(done: list[Grades], places: list[Path], exercises: Sequence[Exercise]) -> None:
    """All tables, of the students so far."""
    book, moodle, canvas, gradescope, pages = places
    titles = [f"{e.id} {e.name}" for e in exercises]
    rows = [["exercise", *(grades.student for grades in done)]]
    rows += [[title, *(grades.cells[e.id] for grades in done)] for title, e in zip(titles, exercises)]
    _write_csv(book, rows)
    rows = [["username", *titles, "passed", "notes"]]
    for grades in done:
        marks = [str(int(grades.cells[e.id] == "passed")) for e in exercises]
        rows.append([grades.student, *marks, str(grades.passed(exercises)), "; ".join(grades.notes)])
    _write_csv(moodle, rows)
    rows = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "minizero exercises"]]
    rows += [["    Points Possible", "", "", "", "", str(len(exercises))]]
    rows += [[grades.student, "", "", grades.student, "", str(grades.passed(exercises))] for grades in done]
    _write_csv(canvas, rows)
    gradescope.mkdir(exist_ok=True)
    for grades in done:
        replace(gradescope / f"{grades.student}.json", for_gradescope(grades, exercises))
        if grades.asked:
            pages.mkdir(exist_ok=True)
            replace(pages / f"{grades.student}.html", oral.page(grades.student, grades.asked))


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    """A table that a spreadsheet reads as text: no cell is taken for a formula."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [[f"'{cell}" if cell[:1] in tuple("=+-@") else cell for cell in map(plain, row)] for row in rows]
    )
    replace(path, text.getvalue())


def replace(path: Path, text: str) -> None:
    """Write a file whole, or leave what is there."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", newline="", delete=False) as new:
        new.write(text)
    os.chmod(new.name, 0o644)
    os.replace(new.name, path)


def plain(text: str, kept: str = "\n") -> str:
    """The text, with escapes for what has no shape of its own: control characters but `kept`, half characters, …"""
    return "".join(
        c if c in kept or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
