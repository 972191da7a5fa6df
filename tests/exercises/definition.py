"""Where a package, or tasks/, defines what a student writes.

The course names a folder and a function, so that the function may move to another file of the folder.
"""

import ast
import functools
from typing import NamedTuple

from tests.exercises.course import ROOT, Exercise


class Definition(NamedTuple):
    """A function, "pad", or a method, "Zero3.fill", with its syntax tree; its module, and the module's source."""

    module: str
    name: str
    source: str
    node: ast.FunctionDef

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def definition(exercise: Exercise) -> Definition:
    """The definition of the exercise's target. `ValueError` if there is none, or more than one."""
    found = [here for here in _definitions(exercise.place) if here.name == exercise.target]
    if len(found) != 1:
        modules = ", ".join(here.module for here in found) or "no file"
        raise ValueError(
            f"exercise {exercise.id}: {exercise.target} must be in one file of {exercise.place}, and is in {modules}"
        )
    return found[0]


@functools.cache
def _definitions(place: str) -> list[Definition]:
    """All functions and methods of a folder's files, or of one file."""
    folder = ROOT.joinpath(*place.split("."))
    file = folder.with_suffix(".py")
    found = []
    for path in [file] if file.is_file() else sorted(folder.glob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                found.append(Definition(module, node.name, source, node))
            if isinstance(node, ast.ClassDef):
                methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
                found += [Definition(module, f"{node.name}.{method.name}", source, method) for method in methods]
    return found
