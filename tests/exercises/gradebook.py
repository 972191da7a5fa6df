"""`make gradebook DIR=submissions`: a CSV with a row for each exercise and a column for each student.

A submission is a folder with files of a workbook, at any depth. A cell is "passed", "not begun", "not handed in", or
the diagnosis in words. Each file runs in a process of its own with a time limit, as in `make check`. A process does not
protect against code that means harm: run this on a machine without anything to steal or to break.
"""

import concurrent.futures
import csv
import os
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.exercises.course import COURSE, Exercise
from tests.exercises.runner import run

WORDS = {"passed": "passed", "todo": "not begun", "impossible": "needs Triton"}


def write(folder: Path, output: Path | None, console: Any) -> int:
    """Check everything under `folder`, write the table, and return 0. `ValueError` if there are no submissions."""
    if not folder.is_dir():
        raise ValueError(f"gradebook: {folder} is no folder: make gradebook DIR=submissions, one folder a student")
    students = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not students:
        raise ValueError(f"gradebook: {folder} has no folders: put each student's files into one")
    output = output or folder / "gradebook.csv"
    jobs = [(exercise, student) for student in students for exercise in COURSE]
    cells: dict[tuple[Exercise, Path], str] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for job, cell in zip(jobs, pool.map(lambda job: grade(*job), jobs)):
            cells[job] = cell
            if job[0] is COURSE[-1]:
                console.print(f"{job[1].name}: {_passed(cells, job[1])} of {len(COURSE)} passed")
    with output.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["exercise", *(student.name for student in students)])
        for exercise in COURSE:
            rows.writerow([f"{exercise.id} {exercise.name}", *(cells[exercise, student] for student in students)])
    table = Table("student", "passed", "core", box=None)
    for student in students:
        core = sum(cells[e, student] == "passed" for e in COURSE if e.core)
        table.add_row(student.name, str(_passed(cells, student)), str(core))
    console.print(table)
    console.print(f"wrote {output}")
    return 0


def grade(exercise: Exercise, student: Path) -> str:
    """The text of one cell."""
    files = sorted(path for path in student.rglob(exercise.file) if "old" not in path.relative_to(student).parts)
    if not files:
        return "not handed in"
    outcome = run(exercise, files[0])
    return WORDS.get(outcome.status) or f"{outcome.name}: {outcome.words}"


def _passed(cells: dict[tuple[Exercise, Path], str], student: Path) -> int:
    return sum(cells[exercise, student] == "passed" for exercise in COURSE)
