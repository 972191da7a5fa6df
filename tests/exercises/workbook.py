"""What a student has done: the files in workbook/, which exercises have passed, which hints were given."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.exercises.course import COURSE, ROOT, Exercise
from tests.exercises.stubs import stub

CONFTEST = '''"""`pytest workbook/05_reduce_scatter.py` checks that exercise."""

from tests.exercises.plugin import pytest_pycollect_makemodule  # noqa: F401
'''

AGENTS = """# For an AI assistant

Each file in this folder is an exercise. A student writes one function, and learns by writing it. Help the student to
understand. Do not write the function or a part of it, and do not show the package's own.

- Explain the idea that the top of the file describes, on an example of your own. Name the notebook that shows it.
- Ask back. What did the student try? What should this line do? What did `make check E=05` say, and why?
- Let the student find the line that is wrong. Compute one small case together, by hand.
- Give hints in the order of `make hint E=05`, one at a time. The next one comes if the student has tried the last.
- If the student wants to see the answer, name the command: `make solution E=05`, before the exercise has passed with
  `INSIST=1`. After it, ask what the package does differently, and why.
"""


class Workbook:
    """A folder with a file for each exercise, and progress.json."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get("MINIZERO_WORKBOOK") or ROOT / "workbook")
        self.state: dict[str, Any] = {"passed": [], "hints": {}, "plan": True}
        with contextlib.suppress(OSError, ValueError):  # no file yet, or a broken one: then no exercise has passed
            self.state |= json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))

    def path(self, exercise: Exercise) -> Path:
        return self.folder / exercise.file

    def fill(self, exercises: Sequence[Exercise] = COURSE) -> int:
        """Write the stubs that are missing, and return their number. A student's file is never touched."""
        missing = [exercise for exercise in exercises if not self.path(exercise).exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("conftest.py", CONFTEST), ("AGENTS.md", AGENTS)):
            if not (self.folder / name).exists():
                (self.folder / name).write_text(text, encoding="utf-8")
        for exercise in missing:
            self._write(exercise)
        return len(missing)

    def reset(self, exercise: Exercise) -> Path | None:
        """Begin an exercise anew. An answer moves to workbook/old. Returns its path there, or None."""
        self.fill()
        path, kept = self.path(exercise), None
        if path.read_text(encoding="utf-8", errors="replace") != self._stub(exercise):
            old = self.folder / "old"
            old.mkdir(exist_ok=True)
            kept = next(p for i in range(1, 10**6) if not (p := old / f"{path.stem}.{i}.py").exists())
            path.replace(kept)
            self._write(exercise)
        if self.has_passed(exercise):
            self.state["passed"].remove(exercise.name)
        self.state["hints"].pop(exercise.name, None)
        self.save()
        return kept

    def has_passed(self, exercise: Exercise) -> bool:
        return exercise.name in self.state["passed"]

    def note(self, exercise: Exercise, *, passed: bool) -> None:
        """What the last check said."""
        if passed == self.has_passed(exercise):
            return
        if passed:
            self.state["passed"].append(exercise.name)
        else:
            self.state["passed"].remove(exercise.name)
        self.save()

    def hints_given(self, exercise: Exercise) -> int:
        return self.state["hints"].get(exercise.name, 0)

    def note_hint(self, exercise: Exercise) -> None:
        self.state["hints"][exercise.name] = self.hints_given(exercise) + 1
        self.save()

    def current(self) -> Exercise | None:
        """The exercise where the student left off: the first that is possible here and has not passed."""
        return next(iter(self._open()), None)

    def following(self, exercise: Exercise) -> Exercise | None:
        """The next one that has not passed; behind the last, the first such."""
        left = self._open()
        return next((e for e in left if e.number > exercise.number), left[0] if left else None)

    def _open(self) -> list[Exercise]:
        return [e for e in COURSE if e.is_possible() and not self.has_passed(e)]

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "progress.new"
        new.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        new.replace(self.folder / "progress.json")

    def _write(self, exercise: Exercise) -> None:
        self.path(exercise).write_text(self._stub(exercise), encoding="utf-8")

    def _stub(self, exercise: Exercise) -> str:
        return stub(exercise, with_plan=self.state["plan"])
