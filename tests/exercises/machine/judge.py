"""Who says the verdict: `Judge`. It never loads an answer.

What an answer does in the drawn cases comes as data (`pack`: JSON, nothing that runs). The judge computes what the
package's own function does in the same cases, compares, and speaks. Where they differ, it looks which of the exercise's
wrong answers does in these cases what the answer did: that is the mistake, and it has a sentence.
"""

import base64
import dataclasses
import errno
import json
import math
import numbers
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from tests.exercises import kit
from tests.exercises.course import Exercise
from tests.exercises.draws import shown
from tests.exercises.kit import AtMost, Diagnosis, Wrong, compare
from tests.exercises.machine import runner
from tests.exercises.machine.one_core import one_core
from tests.exercises.machine.runner import Outcome
from tests.exercises.patch import patched
from tests.exercises.stubs import mistaken

MORE = 6  # cases, the first ones, in which a wrong answer must be right as well; and so many more to tell two apart
SLACK = 2**18  # bytes of Python's memory that a right answer may need besides
PATIENT = 20.0  # seconds of computing that a wrong answer may take
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Raised(NamedTuple):
    """An exception, in place of a result. kind: its type, or the name of a diagnosis. words: for the student."""

    kind: str
    message: str
    words: str


class Other(str):
    """Something that is not plain data, as text."""


def pack(value: Any) -> Any:
    """The value as JSON has it. Tensors are bytes; a named tuple is a dict; of other objects their text is left."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Raised | AtMost):
        return {type(value).__name__: list(value) if isinstance(value, Raised) else [float(value), *value.bounds]}
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        data = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1)).view(torch.uint8)
        text = base64.b64encode(data.numpy().tobytes()).decode()
        return {"tensor": [str(value.dtype), list(value.shape), text, value.requires_grad]}
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {"dict": [[str(key), pack(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [pack(each) for each in value]
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return {"other": repr(value)}


def unpack(value: Any) -> Any:
    """What was packed. `ValueError`, `TypeError`, … if it was not."""
    if isinstance(value, list):
        return [unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "dict":
        return {str(key): unpack(each) for key, each in inside}
    if kind == "tensor":
        dtype, shape, text, requires_grad = inside
        data, numel = bytearray(base64.b64decode(text)), math.prod(shape)
        if len(data) != numel * DTYPES[dtype].itemsize:
            raise ValueError("a tensor of another size")
        flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
        return flat.view(shape).requires_grad_(requires_grad)
    if kind == "AtMost":
        return AtMost(*map(float, inside))
    return Raised(*(str(word)[:4000] for word in inside)) if kind == "Raised" else Other(inside)


def outcome_of(lesson: Any, case: Any, words: Callable[[BaseException], str] = str) -> Any:
    """What the function that stands in the package does in this case, packed. words: what is said of an exception."""
    try:
        with kit.unchanged(kit.IN_A_CALL):
            return _seen(lesson, case)
    except Exception as error:
        return pack(raised(error, words))
    finally:
        kit.LENT.clear()
        kit.RETURNED.clear()


def _seen(lesson: Any, case: Any) -> Any:
    """The result; the states of the global random numbers, which an answer neither draws nor seeds; memory.

    Of a lesson's HEAVY case, Python's own memory at the peak: NumPy's arrays, lists, …
    """
    kit.seed_all()
    if heavy := case == getattr(lesson, "HEAVY", None):
        tracemalloc.start()
    try:
        seen = {"": lesson.result(case), **kit.random_states(), **kit.STATES}
        if heavy:
            seen["bytes that are no tensor's, at the peak"] = kit.AtMost(tracemalloc.get_traced_memory()[1] + SLACK, 2)
    finally:
        tracemalloc.stop()
    return pack(seen)


def raised(error: BaseException, words: Callable[[BaseException], str]) -> Raised:
    if isinstance(error, Diagnosis):
        return Raised(error.name, error.words, error.words)
    if isinstance(error, NotImplementedError) and not str(error):
        return Raised("todo", "", "The code comes to a line that raises NotImplementedError: something is left.")
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return Raised("too-much-output", "", "It prints, or writes to a file, more than 64 MiB: does a loop print?")
    return Raised(type(error).__name__, str(error)[:80], words(error))


class Known(NamedTuple):
    """What the package's function does in the cases of a seed, and what wrong answers do in some."""

    seed: str
    cases: list[Any]
    wanted: list[Any]  # of the cases so far
    seconds: list[float]  # of computing that the package took for each of them
    theirs: dict[tuple[str, int], Any]


class Doubt(NamedTuple):
    """A case that is wrong. alike: the wrong answers that do the same in it; left: in the others as well."""

    number: int
    words: str
    error: Raised | None
    alike: list[str]
    left: list[str]


class Judge:
    """It keeps what it knows of the last seed of each exercise: a class is judged by one."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}

    @one_core()
    def prepare(self, exercise: Exercise, seed: str, number: int) -> Known:
        """Compute what is right, up to the case of this number, and how long that takes."""
        lesson = exercise.load()
        if exercise.id not in self.known or self.known[exercise.id].seed != seed:
            self.known[exercise.id] = Known(seed, drawn(lesson, seed), [], [], {})
        known = self.known[exercise.id]
        while len(known.wanted) <= min(number, len(known.cases) - 1):
            start = time.process_time()
            known.wanted.append(_seen(lesson, known.cases[len(known.wanted)]))
            known.seconds.append(time.process_time() - start)
        return known

    @one_core()
    def step(self, exercise: Exercise, seed: str, number: int, seen: Any = None, doubt: Any = None) -> dict[str, Any]:
        """What comes after so many replies of the answer's process (`runner.observe`), of which `seen` is the last.

        Either {"verdict": …}, or {"may": …}: the seconds that the answer may have computed by the end of the next
        case. seen: may be anything. doubt: what the step before gave.
        """
        known = self.prepare(exercise, seed, number)
        if number:
            said = self._said(exercise, known, number - 1, seen, Doubt(*doubt) if doubt else None)
            if isinstance(said, Outcome):
                return {"verdict": dataclasses.asdict(said)}
            doubt = said
        return {"may": runner.SECONDS + runner.SLOWER * sum(known.seconds[: number + 1]), "doubt": doubt}

    def _said(
        self, exercise: Exercise, known: Known, number: int, seen: Any, doubt: Doubt | None
    ) -> Outcome | Doubt | None:
        """Of the reply about case `number`: a verdict; a doubt that the next case may end; None if all is well."""
        try:
            default = str(seen["default"]) if seen.get("default") else None
            end = Outcome(**seen["end"]) if seen.get("end") else None
            got = None if "end" in seen else unpack(seen["case"])
        except Exception:
            return Outcome("failed", "ended", "What came from the answer's process is no data: does the file write it?")
        over = "end" in seen or number >= len(known.cases)
        if over and doubt is None:
            if end is not None:
                return _no_pass(end)
            if default is not None:
                return Outcome("failed", "changes-a-default", default)
            if number < len(known.cases) or "end" not in seen:
                return Outcome("failed", "ended", "The check ended before its last case. Does the file end it?")
            return Outcome("passed", "passed", "Passed.")
        if doubt is None:
            words = self._differs(exercise, number, got)
            if not words:
                return None
            mistakes = [mistake.name for mistake in exercise.load().WRONG if mistake.words]
            alike = [name for name in mistakes if self._alike(exercise, name, number, got)]
            first = range(min(number, MORE))
            left = [name for name in alike if not any(self._is_wrong(exercise, name, i) for i in first)]
            doubt = Doubt(number, words, got if isinstance(got, Raised) else None, alike, left)
        elif not over:
            left = [name for name in doubt.left if self._alike(exercise, name, number, got)]
            doubt = doubt._replace(left=left or doubt.left)
        if len(doubt.left) > 1 and not over and number < min(doubt.number + MORE, len(known.cases) - 1):
            return doubt
        return self._verdict(exercise, known, doubt, default)

    def _verdict(self, exercise: Exercise, known: Known, doubt: Doubt, default: str | None) -> Outcome:
        """The known mistake, if one does the same in every case; one that does so in this case, if none does."""
        error, words = doubt.error and Raised(*doubt.error), doubt.words
        again = (
            f"(In drawn case {doubt.number + 1} of {len(known.cases)}: {shown(known.cases[doubt.number])}. The same "
            f"cases again: SEED={known.seed} behind `make check`, or before `python`.)"
        )
        if doubt.left:
            mistake = _named(exercise, doubt.left[0])
            said = [mistake.words, *([] if error else [f"{words}."]), again]
            return Outcome("failed", mistake.name, " ".join(said))
        if default is not None:
            return Outcome("failed", "changes-a-default", default)
        likely = [f"Likely: {_named(exercise, name).words}" for name in doubt.alike[:1]]
        if error:
            status = "todo" if error.kind == "todo" else "failed"
            return Outcome(status, error.kind, " ".join([error.words, *likely, again]))
        name = "random" if doubt.number >= MORE else "values"
        return Outcome("failed", name, " ".join([f"{words}.", *likely, again]))

    def _differs(self, exercise: Exercise, number: int, got: Any) -> str:
        """Where a result differs from what is right in this case, in words."""
        known = self.known[exercise.id]
        return differs(got, unpack(known.wanted[number]), tolerance(exercise.load(), known.cases[number]))

    def _alike(self, exercise: Exercise, name: str, number: int, got: Any) -> bool:
        """Whether the wrong answer does in this case what was seen."""
        theirs, allowed = self._theirs(exercise, name, number), tolerance(exercise.load(), self._case(exercise, number))
        return not differs(got, theirs, allowed) and not differs(theirs, got, allowed)

    def _is_wrong(self, exercise: Exercise, name: str, number: int) -> bool:
        """Whether the wrong answer is wrong in this case."""
        return bool(self._differs(exercise, number, self._theirs(exercise, name, number)))

    def _theirs(self, exercise: Exercise, name: str, number: int) -> Any:
        """What the wrong answer does in this case."""
        theirs = self.known[exercise.id].theirs
        if (name, number) not in theirs:
            theirs[name, number] = _wrong_outcome(exercise, _named(exercise, name), self._case(exercise, number))
        return unpack(theirs[name, number])

    def _case(self, exercise: Exercise, number: int) -> Any:
        return self.known[exercise.id].cases[number]


def _named(exercise: Exercise, name: str) -> Wrong:
    return next(wrong for wrong in exercise.load().WRONG if wrong.name == name)


def differs(got: Any, want: Any, allowed: Any) -> str:
    """In words; "" if it does not."""
    if isinstance(got, Raised) or isinstance(want, Raised):
        both = isinstance(got, Raised) and isinstance(want, Raised)
        of_ranks = both and got.kind in ("deadlock", "mismatch")  # which rank comes first is luck
        alike = both and got.kind == want.kind and (of_ranks or got.message == want.message)
        return "" if alike else got.words if isinstance(got, Raised) else "There is no error"
    try:
        return compare(got, want, allowed)
    except Exception as error:  # whatever an answer's process has sent
        return f"The result is of another kind than expected ({type(error).__name__})"


def drawn(lesson: Any, seed: str) -> list[Any]:
    return [*lesson.draw(Random(seed)), *([lesson.HEAVY] if hasattr(lesson, "HEAVY") else [])]


def tolerance(lesson: Any, case: Any) -> Any:
    return lesson.tolerance(case) if hasattr(lesson, "tolerance") else 0.0


def _wrong_outcome(exercise: Exercise, wrong: Wrong, case: Any) -> Any:
    try:
        with mock.patch.object(kit, "PATIENCE", 0.3), runner.time_limit(Path(), [], PATIENT):
            with patched(exercise, _function(exercise, wrong)):
                return outcome_of(exercise.load(), case)
    except runner.TimeUp:
        return pack(Raised("endless", "", ""))


@cache
def _function(exercise: Exercise, wrong: Wrong) -> Callable[..., Any]:
    """The wrong answer's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, exercise.file)
        path.write_text(mistaken(exercise, wrong), encoding="utf-8")
        return cast(Callable[..., Any], getattr(runner.load(path), exercise.function))


def examine(exercise: Exercise, path: Path, seed: str, judge: Judge) -> Outcome:
    """Check an answer that is known, in this process: for the tests of the checks."""
    if (looked := runner.look(exercise, path)) is not None:
        return looked
    answer = runner.observe(exercise, path, seed)
    next(answer)
    said, number = judge.step(exercise, seed, 0), 0
    while "verdict" not in said:
        seen, number = json.loads(json.dumps(answer.send(said["may"]))), number + 1
        said = judge.step(exercise, seed, number, seen, said["doubt"])
    answer.close()
    return Outcome(**said["verdict"])


def _no_pass(said: Outcome) -> Outcome:
    """What an answer's process says of its own end is believed, unless it is good."""
    if said.status not in ("failed", "todo"):
        return Outcome("failed", "forged", "The file says of itself that it has passed. It is the judge who says so.")
    return Outcome(said.status, str(said.name)[:100], str(said.words)[:4000])
