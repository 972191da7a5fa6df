"""Files cut from a package's function: a stub for the student, the reference, and wrong answers.

Signature, decorators, types and docstring stay. The file imports what the function uses of its module. The stub of an
exercise with a bug has a body: the reference, with the bug, or with a gap.
"""

import ast
import functools
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.exercises.course import Exercise
from tests.exercises.definition import definition

if TYPE_CHECKING:  # it would load torch
    from tests.exercises.kit import Wrong

WIDTH = 100
OURS = ("minizero", "flash", "precision", "tests")


def stub(exercise: Exercise, with_plan: bool = True) -> str:
    """The student's file: the function, with the plan in place of a body, or with the plan and the bug."""
    code, node = _function(exercise)
    head, bug = _head(code, node), exercise.text().bug
    body = _edited(code, bug).splitlines()[len(head) :] if bug else ["    raise NotImplementedError"]
    plan = []
    for number, step in enumerate(exercise.text().plan if with_plan else [], 1):
        lines = textwrap.wrap(" ".join(step.split()), WIDTH - 9)
        plan += [f"    # {f'{number}. ' if i == 0 else '   '}{line}" for i, line in enumerate(lines)]
    return "\n".join([_top(exercise), *head, *plan, *body, ""])


def reference(exercise: Exercise) -> str:
    """The function as the package has it."""
    return _function(exercise)[0]


def answer(exercise: Exercise, wrong: "Wrong | None" = None) -> str:
    """A whole file with the reference, or with what a wrong answer makes of it."""
    code = _changed(exercise, wrong) if wrong else reference(exercise)
    return f"{_top(exercise)}\n{code}\n"


def mistaken(exercise: Exercise, wrong: "Wrong") -> str:
    """A file with a wrong answer, and no text about it: the target need not be an exercise's."""
    return f"{_imports(exercise)}\n\n{_changed(exercise, wrong)}\n"


def _changed(exercise: Exercise, wrong: "Wrong") -> str:
    try:
        return _edited(reference(exercise), wrong.edits)
    except ValueError as error:
        raise ValueError(f"exercise {exercise.id}, wrong answer {wrong.name}: {error}") from None


def _edited(code: str, edits: Iterable[tuple[str, str]]) -> str:
    for old, new in edits:
        if code.count(old) != 1:
            raise ValueError(f"the reference has {code.count(old)} times, not once:\n{old}")
        code = code.replace(old, new)
    return code


@functools.cache
def _function(exercise: Exercise) -> tuple[str, ast.FunctionDef]:
    """The function's source, with decorators and without the indentation of a class; and its syntax tree."""
    _, name, source, found = definition(exercise)
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    code = textwrap.dedent("\n".join(source.splitlines()[first - 1 : found.end_lineno]))
    if exercise.is_method():  # outside a class, super() needs the class as an argument
        code = code.replace("super()", f"super({name.split('.')[0]}, self)")
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    return code, function


def _head(code: str, node: ast.FunctionDef) -> list[str]:
    """The lines down to the docstring, or to where the body begins."""
    lines = code.splitlines()
    if ast.get_docstring(node) is not None:
        return lines[: node.body[0].end_lineno]
    end = node.body[0].lineno - 1
    while lines[end - 1].strip().startswith("#") or not lines[end - 1].strip():
        end -= 1
    return lines[:end]


def _top(exercise: Exercise) -> str:
    """What the file is about, and its imports."""
    module = definition(exercise).module
    *classes, name = exercise.target.split(".")
    kind = f"method {name} of {classes[0]}" if classes else f"function {name}"
    about = exercise.text().about
    place = f"It takes the place of {module}, {kind}: the {exercise.runs} will run with yours inside."
    words = textwrap.fill(
        f"{place} To read: notebooks/{exercise.notebook}.ipynb. Check it: make check E={exercise.id}. Stuck: make hint "
        f"E={exercise.id}. About {exercise.minutes} minutes{', core' if exercise.core else ''}.",
        WIDTH,
    )
    return f'"""{exercise.id}. {exercise.title}.\n\n{about}\n\n{words}\n"""\n\n{_imports(exercise)}\n'


def _imports(exercise: Exercise) -> str:
    """Import statements for what the function takes from its module."""
    module, _, source, _ = definition(exercise)
    tree, (_, node) = ast.parse(source), _function(exercise)
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {a.arg for n in ast.walk(node) if isinstance(n, ast.arguments) for a in _arguments(n)}
    wanted = (names | {"torch"}) - own - {node.name}
    plain: set[str] = set()
    from_: dict[str, set[str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.split(".")[0]) in wanted:
                    plain.add(f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""))
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) in wanted:
                    text = alias.name + (f" as {alias.asname}" if alias.asname else "")
                    from_.setdefault(statement.module or "", set()).add(text)
        else:
            defined = {name for name in _defines(statement) if name in wanted}
            if defined:
                from_.setdefault(module, set()).update(defined)
    lines = {text: text.split()[1] for text in plain}
    lines |= {_from(name, things): name for name, things in from_.items()}
    groups: list[list[str]] = [[], [], []]
    for text, name in lines.items():
        root = name.split(".")[0]
        groups[0 if root in sys.stdlib_module_names else 2 if root in OURS else 1].append(text)
    return "\n\n".join("\n".join(sorted(g, key=_order)) for g in groups if g) + "\n"


def _order(line: str) -> tuple[bool, str]:
    """As ruff sorts: plain imports first."""
    return line.startswith("from"), line.split()[1]


def _arguments(node: ast.arguments) -> list[ast.arg]:
    return [*node.posonlyargs, *node.args, *node.kwonlyargs, *filter(None, (node.vararg, node.kwarg))]


def _defines(statement: ast.stmt) -> Iterable[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _from(module: str, things: set[str]) -> str:
    # Constants, then classes, then functions, as ruff sorts.
    listed = sorted(things, key=lambda t: (not t.isupper(), not t[0].isupper(), t))
    line = f"from {module} import {', '.join(listed)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {thing},\n" for thing in listed) + ")"
