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
import json
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from tests.exercises.course import NO_TRITON, Exercise
from tests.exercises.definition import definition
from tests.exercises.machine.one_core import one_core
from tests.exercises.stubs import stub

SECONDS = 5.0  # of computing that an answer may take in any case
SLOWER = 10.0  # times what the package's function takes there and then, it may take besides
LARGEST = 2**20  # bytes of a file that an answer may be
LONG = 400  # characters of an exception's message, and of a line
WITHOUT_DEVICE = (
    "A tensor is made without a device. So it is on the CPU wherever the caller's tensors are, and on a GPU the two do "
    "not fit. zeros_like, new_zeros, device=x.device make it where x is."
)
FEW, MANY = 8, 10**6  # tensors that an answer may keep; objects that are looked at


@dataclasses.dataclass
class Outcome:
    """status: passed, failed, todo (not begun) or impossible (no Triton). name: of the diagnosis."""

    status: str
    name: str
    words: str
    printed: str = ""


NOT_BEGUN = Outcome("todo", "todo", "Not begun: the body still raises NotImplementedError.")


class TimeUp(BaseException):
    """The check took too long."""


def look(exercise: Exercise, path: Path) -> Outcome | None:
    """The outcome that can be told without reading the answer as Python. None if it must be read, and run."""
    if not exercise.is_possible():
        return Outcome("impossible", "no-triton", NO_TRITON)
    try:
        if path.exists() and not path.is_file():
            return Outcome("failed", "no-file", f"{path.name} is no file to read: a folder, a pipe or a device.")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        return Outcome("failed", "no-file", f"There is no file {path.name} to read ({error.strerror}).")
    if len(content) > LARGEST:
        return Outcome("failed", "no-file", f"{path.name} has more than {LARGEST // 2**20} MiB: is it the right one?")
    if b"\0" in content:
        return Outcome("failed", "syntax", f"{path.name} has bytes of value 0 in it, which no text has: save it anew.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Outcome("failed", "syntax", f"{path.name} is not a text file in UTF-8: save it as one.")
    if text in (stub(exercise), stub(exercise, with_plan=False)) and not exercise.text().takeaway:
        return NOT_BEGUN
    return None


def read(exercise: Exercise, path: Path) -> tuple[Outcome | None, str | None]:
    """What the answer's text alone is told, if that is all; and `changed_defaults`. It may take time and memory."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        tree = ast.parse(text)
        said = _look_at(tree, exercise)
        return said, None if said else changed_defaults(exercise, tree)
    except (MemoryError, RecursionError):
        return Outcome("failed", "syntax", f"{path.name} is nested too deeply for Python to read it."), None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        code = text.splitlines()[line - 1].strip() if line and line <= len(text.splitlines()) else ""
        message, where = getattr(error, "msg", str(error)), f", in line {line}: {code}" if line else ""
        return Outcome("failed", "syntax", f"Python cannot read the file: {message}{where}"), None


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
        return NOT_BEGUN
    return None


Seen = Generator[dict[str, Any], float, None]


def observe(exercise: Exercise, path: Path, seed: str) -> Seen:
    """What the answer in `path` does, as plain data: after an empty reply {"case": …} for each case, and {"end": …}.

    It is sent the seconds of computing that the answer may have taken by the end of the next case; that holds in the
    main thread only. case: what came out (`judge.pack`). end: the outcome that ended it, or None after the last case.
    default: in words, an argument whose default is another one.
    """
    from tests.exercises.machine.judge import raised

    place: list[str] = []
    end, default = None, None
    steps, start = _steps(exercise, path, seed), time.process_time()
    may = yield {}
    try:
        end, default = read(exercise, path)
        while end is None:
            with time_limit(path, place, may - (time.process_time() - start)), one_core():
                case = next(steps, None)
            if case is None:
                break
            may = yield {"case": case, "default": default}
    except TimeUp:
        end = endless(f"After {may:.0f} seconds of computing", place)
    except (Exception, SystemExit) as error:
        kind, _, words = raised(error, lambda error: _explain(error, path))
        end = Outcome("todo" if kind == "todo" else "failed", kind, words)
    yield {"end": end and dataclasses.asdict(end), "default": default}


def _steps(exercise: Exercise, path: Path, seed: str) -> Iterator[Any]:
    """Load the answer, and run it in the cases, one a step; then look at what no case shows."""
    from tests.exercises import kit
    from tests.exercises.machine.judge import drawn, outcome_of
    from tests.exercises.patch import found_in, function_of, hollow, patched

    def borrowed(*_: Any, **__: Any) -> Any:
        """What an answer finds in place of the package's own function, where no name of this file is known."""
        from tests.exercises.kit import fail

        fail("borrowed", "The file calls the package's own function, or a copy: that is what you are to write.")

    gc.unfreeze()  # so that all functions are seen that are there already
    lesson, code = exercise.load(), function_of(exercise).__code__  # loads the package's module, too
    known = {id(each): each for each in gc.get_objects() if type(each) is FunctionType}
    at = found_in(exercise)
    with patched(exercise, borrowed, at), kit.unchanged(kit.MODES):
        module = load(path)
    function = getattr(module, exercise.function)

    def look_for_copies() -> None:
        """A function that the file made of the package's text, or file, or of its code."""
        for each in gc.get_objects():
            other = each.__code__ if type(each) is FunctionType and id(each) not in known else None
            if other and (other.co_name, other.co_varnames) == (code.co_name, code.co_varnames):
                if other.co_filename == code.co_filename or other.co_filename[-3:] != ".py":
                    borrowed()

    def outcome(case: Any) -> Any:
        with hollow(exercise, borrowed), patched(exercise, function, at):
            return outcome_of(lesson, case, lambda error: _explain(error, path))

    look_for_copies()
    cases = drawn(lesson, seed)
    ends = cases[:: len(cases) - 1 or 1]
    yield outcome(cases[0])
    kept, _ = reached(module)
    for case in cases[1:]:
        yield outcome(case)
    more, before = reached(module)
    mine = _left_by(outcome, ends)
    theirs = _left_by(functools.partial(outcome_of, lesson), ends) if mine else 0  # hooks stay anyway
    if mine > 2 * theirs or more - kept > FEW or reached(module)[1] - before > 1:
        words = (
            f"Calls leave something behind: {max(mine, more - kept)} tensors, or numbers in a list, that nobody needs."
        )
        kit.fail("grows", f"{words} What keeps them, a global name, a cache, an attribute?")
    if not exercise.text().takeaway:  # a run to mend is one on the CPU
        for case in cases[:: max(1, len(cases) // FEW)]:
            leaves_out_the_device(path, outcome, case)
    look_for_copies()
    if hasattr(lesson, "check"):
        with patched(exercise, function, at):
            lesson.check()


def _left_by(outcome: Callable[[Any], Any], cases: list[Any]) -> int:
    """How many tensors live when these cases have come once more, and did not before."""
    import torch

    gc.freeze()  # what is there now, such as what is remembered from the first time
    for case in cases:
        outcome(case)
    gc.collect()
    left = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    gc.unfreeze()
    return left


def reached(module: Any) -> tuple[int, int]:
    """How many tensors, and how many objects in all, the answer's own names lead to: caches, lists, attributes."""
    import torch

    found: dict[int, Any] = {}
    tensors, left = 0, [vars(module)]
    while left and len(found) < MANY:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            tensors += id(each) not in found
        elif isinstance(each, ModuleType) or getattr(each, "__module__", module.__name__) != module.__name__:
            continue
        elif id(each) not in found:
            left += gc.get_referents(each)
        found[id(each)] = each
    return tensors, len(found)


def leaves_out_the_device(path: Path, outcome: Callable[[Any], Any], case: Any) -> None:
    """Fail if what the file makes without naming a device meets what the caller gave: on a GPU that is an error."""
    from tests.exercises.kit import elsewhere, fail

    with elsewhere(str(path)) as lines:
        seen = json.dumps(outcome(case))
    if lines and ('"Raised"' in seen or '"other": "tensor(' in seen):
        fail("leaves-out-the-device", f"{WITHOUT_DEVICE} It is made in {_quote(path, min(lines))}")


def changed_defaults(exercise: Exercise, tree: ast.Module) -> str | None:
    """In words: an argument whose default is another one than the package's."""
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
        yield  # Windows: `checker` has a timer of its own
        return

    def ring(*_: Any) -> None:
        place[:] = places(path)
        raise TimeUp

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 0.01))
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
    return f"line {number}: {linecache.getline(str(path), number).strip()[:LONG]}"


def _explain(error: BaseException, path: Path) -> str:
    """An exception in words: its message, and its line in the student's file."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = _quote(path, trace.tb_lineno)
        trace = trace.tb_next
    message = " ".join(str(error).split()) or "without a message"
    message = message if len(message) < LONG else f"{message[:LONG]} …"  # PyTorch's may list all that it could do
    if isinstance(error, NameError):
        return f"A name is missing: {message}: a typo, or an import that is not there? In {line or 'the file'}"
    where = f"in {line}" if line else "in the package, which runs with your function inside"
    if "meta" in message.split():  # the device on which there are no numbers, where `kit.observed` puts all
        return f"{WITHOUT_DEVICE} It meets one of the caller's {where}"
    return f"{type(error).__name__} {where} – {message}"
