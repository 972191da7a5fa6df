"""Run an answer in this process: `observe`. (`checker.py` gives it a process of its own, and limits; `judge.py` says
what it is worth.)

An outcome says in words what ended a check: a syntax error, a missing name, an endless loop, ranks that wait for each
other, an exception, or the check's own diagnosis.
"""

import ast
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from tests.exercises.course import NO_TRITON, Exercise
from tests.exercises.definition import definition
from tests.exercises.machine.one_core import one_core

SECONDS = 6.0  # of computing that an answer may take at least
SLOWER = 4.0  # times what the package's function takes there and then, it may take in any case
LARGEST = 2**20  # bytes of a file that an answer may be
ERRORS = 5  # cases that may end in an exception, before the others are left out


@dataclasses.dataclass
class Outcome:
    """status: passed, failed, todo (not begun) or impossible (no Triton). name: of the diagnosis."""

    status: str
    name: str
    words: str
    printed: str = ""


class TimeUp(BaseException):
    """The check took too long."""


def look(exercise: Exercise, path: Path) -> Outcome | None:
    """The outcome that can be told without running the answer. None if the answer must run."""
    if not exercise.is_possible():
        return Outcome("impossible", "no-triton", NO_TRITON)
    try:
        if path.exists() and not path.is_file():
            return Outcome("failed", "no-file", f"{path.name} is no file to read: a folder, a pipe or a device.")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            return Outcome(
                "failed", "no-file", f"{path.name} has more than {LARGEST // 2**20} MiB: is it the right one?"
            )
        text = content.decode("utf-8-sig")
    except OSError as error:
        return Outcome("failed", "no-file", f"There is no file {path.name} to read ({error.strerror}).")
    except UnicodeDecodeError:
        return Outcome("failed", "syntax", f"{path.name} is not a text file in UTF-8: save it as one.")
    try:
        return _look_at(ast.parse(text), exercise)
    except (MemoryError, RecursionError):
        return Outcome("failed", "syntax", f"{path.name} is nested too deeply for Python to read it.")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        code = text.splitlines()[line - 1].strip() if line and line <= len(text.splitlines()) else ""
        message = getattr(error, "msg", str(error))
        return Outcome("failed", "syntax", f"Python cannot read the file: {message}, in line {line}: {code}")


def _look_at(tree: ast.Module, exercise: Exercise) -> Outcome | None:
    """What its syntax tree says of an answer."""
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == exercise.function]
    if not functions:
        return Outcome("failed", "missing", f"The file must define the function {exercise.function}, and does not.")
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if exercise.function in names and not exercise.is_method():
            words = f"The file imports {exercise.function} from the package: that is what you are to write."
            return Outcome("failed", "borrowed", words)
    body = [n for n in functions[-1].body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0]):
        return Outcome("todo", "todo", "Not begun: the body still raises NotImplementedError.")
    return None


@one_core()
def observe(exercise: Exercise, path: Path, seed: str, seconds: float = SECONDS) -> dict[str, Any]:
    """What the answer in `path` does, as plain data. The time limit holds in the main thread only.

    cases: what came out in each of the cases drawn (`judge.pack`). said: the outcome that ended it before, if any.
    """
    from tests.exercises.machine.judge import raised

    seen: dict[str, Any] = {"cases": [], "said": None}
    place: list[str] = []
    try:
        with time_limit(path, place, seconds):
            _run(exercise, path, seed, seen["cases"])
    except TimeUp:
        seen["said"] = dataclasses.asdict(endless(f"After {seconds:.0f} seconds of computing", place))
    except (Exception, SystemExit) as error:
        kind, _, words = raised(error, lambda error: _explain(error, path))
        seen["said"] = dataclasses.asdict(Outcome("todo" if kind == "todo" else "failed", kind, words))
    return seen


def _run(exercise: Exercise, path: Path, seed: str, seen: list[Any]) -> None:
    """Load the answer, run the lesson's own check, if it has one, and then the cases."""
    from tests.exercises.kit import Diagnosis
    from tests.exercises.machine.judge import drawn, outcome_of
    from tests.exercises.patch import function_of, hollow, patched

    def borrowed(*_: Any, **__: Any) -> Any:
        """What an answer finds in place of the package's own function, where no name of this file is known."""
        from tests.exercises.kit import fail

        fail("borrowed", "The file calls the package's own function, or a copy: that is what you are to write.")

    gc.unfreeze()  # so that all functions are seen that are there already
    lesson, code, left = exercise.load(), function_of(exercise).__code__, 0  # loads the package's module, too
    known = {id(each): each for each in gc.get_objects() if type(each) is FunctionType}
    with patched(exercise, borrowed):
        module = load(path)
    function = getattr(module, exercise.function)
    with hollow(exercise, borrowed), patched(exercise, function):
        if hasattr(lesson, "check"):
            lesson.check()
        for case in (cases := drawn(lesson, seed)):
            seen.append(outcome_of(lesson, case, lambda error: _explain(error, path)))
            if sum(isinstance(each, dict) and "Raised" in each for each in seen) > ERRORS or _has_no_end(seen[-1]):
                break
        else:
            left = _left_by(functools.partial(outcome_of, lesson), cases)
    if left and left > 2 * _left_by(functools.partial(outcome_of, lesson), cases):  # hooks stay anyway
        raise Diagnosis("grows", f"After cases that came again {left} tensors live: does something keep them?")
    for each in gc.get_objects():  # one that the file made of the package's text, or file, or of its code
        other = each.__code__ if type(each) is FunctionType and id(each) not in known else None
        if other and (other.co_name, other.co_varnames) == (code.co_name, code.co_varnames):
            if other.co_filename == code.co_filename or other.co_filename[-3:] != ".py":
                seen.clear()
                borrowed()


def _left_by(outcome: Callable[[Any], Any], cases: list[Any]) -> int:
    """How many tensors live when the first and the last case have come once more, and did not before."""
    import torch

    gc.freeze()  # what is there now, such as what is remembered from the first time
    for case in cases[:: len(cases) - 1 or 1]:
        outcome(case)
    gc.collect()
    left = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    gc.unfreeze()
    return left


def _has_no_end(seen: Any) -> bool:
    """Ranks that waited for each other would wait in each case."""
    return isinstance(seen, dict) and seen.get("Raised", [""])[0] in ("deadlock", "borrowed")


def changed_defaults(exercise: Exercise, path: Path) -> str | None:
    """In words: an argument whose default is another one than the package's."""
    tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == exercise.function][-1]
    theirs = _defaults(definition(exercise).node.args)
    for name, default in _defaults(own.args).items():
        if theirs.get(name, default) != default:
            return f"{name} is {default} if it is not given, and must be {theirs[name]}: leave the first line as it is."
    return None


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    """Of each argument that has a default, its code."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[::-1], arguments.defaults[::-1]), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return {argument.arg: ast.unparse(default) for argument, default in pairs if default is not None}


def load(path: Path) -> Any:
    """The answer's module."""
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def endless(after: str, place: list[str]) -> Outcome:
    where = f" It was at {place[0]}." if place else ""
    return Outcome("failed", "endless", f"{after} it still ran: is there a loop that never ends?{where}")


def places(path: Path) -> list[str]:
    """The lines of the file where the threads are at this moment."""
    return [line for frame in sys._current_frames().values() if (line := _line_in(path, frame))]


@contextlib.contextmanager
def time_limit(path: Path, place: list[str], seconds: float) -> Iterator[None]:
    """`TimeUp` after so many seconds of computing, however busy the machine is.

    `place` says then at which line of the file some thread was.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield  # Windows: `main` has a timer of its own
        return

    def ring(*_: Any) -> None:
        place[:] = places(path)
        raise TimeUp

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _line_in(path: Path, frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_code.co_filename == str(path):
            return _quote(path, frame.f_lineno)
        frame = frame.f_back
    return ""


def _quote(path: Path, number: int) -> str:
    return f"line {number}: {linecache.getline(str(path), number).strip()}"


def _explain(error: BaseException, path: Path) -> str:
    """An exception in words: its message, and its line in the student's file."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = _quote(path, trace.tb_lineno)
        trace = trace.tb_next
    message = " ".join(str(error).split()) or "without a message"
    if isinstance(error, NameError):
        return f"A name is missing: {message}: a typo, or an import that is not there? In {line or 'the file'}"
    where = f"in {line}" if line else "in the package, which runs with your function inside"
    return f"{type(error).__name__} {where} – {message}"
