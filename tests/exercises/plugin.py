"""`pytest workbook/05_reduce_scatter.py`: a file of the workbook is one test, and a failure is its diagnosis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exercises.course import find
from tests.exercises.machine.checker import run
from tests.exercises.machine.runner import Outcome
from tests.exercises.workbook import Workbook


class NotPassed(Exception):
    """Carries the outcome to the report."""


class Check(pytest.Item):
    """The check of one file, in a process of its own."""

    def runtest(self) -> None:
        exercise = find(self.path.name)
        outcome: Outcome = run(exercise, self.path)
        if outcome.status == "impossible":
            pytest.skip(outcome.words)
        Workbook(self.path.parent).note(exercise, passed=outcome.status == "passed")
        if outcome.status != "passed":
            raise NotPassed(f"{outcome.words}\n{outcome.printed}".strip())

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, NotPassed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class File(pytest.File):
    """A file of the workbook. pytest does not import it, since it may not be valid Python yet."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Check.from_parent(self, name=find(self.path.name).name)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    try:
        find(module_path.name)
    except ValueError:
        return None
    return File.from_parent(parent, path=module_path)
