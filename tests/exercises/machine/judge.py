"""Who says the verdict: `Judge`. It never loads an answer.

What an answer does in the drawn cases comes as data (`pack`: JSON, nothing that runs). The judge computes what the
package's own function does in the same cases, compares, and speaks. Where they differ, it looks which of the exercise's
wrong answers does in these cases what the answer did: that is the mistake, and SAYS has its sentence.
"""

import base64
import json
import math
import numbers
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import torch

from tests.exercises import kit
from tests.exercises.course import Exercise
from tests.exercises.draws import shown
from tests.exercises.kit import AtMost, Diagnosis, Wrong, compare, fail
from tests.exercises.machine import runner
from tests.exercises.machine.one_core import one_core
from tests.exercises.machine.runner import Outcome
from tests.exercises.patch import patched
from tests.exercises.stubs import mistaken

MORE = 6  # cases in which a wrong answer must do the same, from the first that is wrong, and so many plain ones
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
    before = kit.modes()
    try:
        seen = _seen(lesson, case)
        if changed := [what for what, state in kit.modes().items() if state != before[what]]:
            torch.set_grad_enabled(before["torch's grad mode"])
            torch.set_default_dtype(before["torch's default dtype"])
            fail("leaves-a-mode", f"After the call {changed[0]} is another one than before.")
        return seen
    except Exception as error:
        return pack(raised(error, words))
    finally:
        kit.LENT.clear()


def _seen(lesson: Any, case: Any) -> Any:
    """The result, and the states of the global random numbers, which an answer neither draws nor seeds."""
    kit.seed_all()
    return pack({"": lesson.result(case), **kit.random_states(), **kit.STATES})


def raised(error: BaseException, words: Callable[[BaseException], str]) -> Raised:
    if isinstance(error, Diagnosis):
        return Raised(error.name, error.words, error.words)
    if isinstance(error, NotImplementedError) and not str(error):
        return Raised("todo", "", "The code comes to a line that raises NotImplementedError: something is left.")
    return Raised(type(error).__name__, str(error)[:80], words(error))


class Known(NamedTuple):
    """What the package's function does in the cases of a seed, and what wrong answers do in some."""

    seed: str
    cases: list[Any]
    wanted: list[Any]
    mistakes: dict[tuple[str, int], Any]
    may: tuple[float, float]  # the seconds of computing, and of the clock, that an answer may take for it


class Judge:
    """It keeps what it knows of the last seed of each exercise: a class is judged by one."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}

    @one_core()
    def prepare(self, exercise: Exercise, seed: str) -> tuple[float, float]:
        """Compute what is right, and by the time of that how long an answer may take: `Known.may`."""
        lesson = exercise.load()
        if exercise.id not in self.known or self.known[exercise.id].seed != seed:
            computed, clock = time.process_time(), time.monotonic()
            cases = drawn(lesson, seed)
            wanted = [_seen(lesson, case) for case in cases]
            computed, clock = time.process_time() - computed, time.monotonic() - clock
            may = max(runner.SECONDS, runner.SLOWER * computed), runner.SLOWER * clock
            self.known[exercise.id] = Known(seed, cases, wanted, {}, may)
        return self.known[exercise.id].may

    @one_core()
    def verdict(self, exercise: Exercise, path: Path, seed: str, seen: dict[str, Any]) -> Outcome:
        """seen: what `runner.observe` gave in the other process, which may be anything."""
        self.prepare(exercise, seed)
        try:
            said = Outcome(**seen["said"]) if seen["said"] else None
            given = [unpack(case) for case in seen["cases"]]
        except Exception:
            return Outcome("failed", "ended", "What came from the answer's process is no data: does the file write it?")
        if said is not None and not given:
            return _no_pass(said)
        default = runner.changed_defaults(exercise, path)
        _, cases, wanted, *_ = self.known[exercise.id]
        triples = zip(given, wanted, cases)
        each = [differs(got, unpack(want), tolerance(exercise.load(), case)) for got, want, case in triples]
        wrong = [number for number, words in enumerate(each) if words]
        if wrong:
            slip = 3 * (len(each) - len(wrong)) >= len(cases)
            outcome = self._say(exercise, given, wrong[0], each[wrong[0]], "random" if slip else "values")
            if default is not None and outcome.name in ("random", "values"):
                return Outcome("failed", "changes-a-default", default)
            outcome.words += (
                f" (In drawn case {wrong[0] + 1} of {len(cases)}: {shown(cases[wrong[0]])}. The same cases again: "
                f"SEED={seed} behind `make check`, or before `python`.)"
            )
            return outcome
        if said is not None:
            return _no_pass(said)
        if default is not None:
            return Outcome("failed", "changes-a-default", default)
        if len(given) < len(cases):
            return Outcome("failed", "ended", "The check ended before its last case. Does the file end it?")
        return Outcome("passed", "passed", "Passed.")

    def _say(self, exercise: Exercise, given: list[Any], number: int, words: str, name: str) -> Outcome:
        """What is said of an answer that does something else than it should in case `number`.

        name: of a mistake that has no name: "random", if it is a slip, and a third of the cases are right.
        """
        got, says = given[number], getattr(exercise.load(), "SAYS", {})
        for wrong in exercise.load().WRONG:
            if wrong.diagnosis in says and self._does_the_same(exercise, wrong, given, number):
                said = says[wrong.diagnosis]
                return Outcome("failed", wrong.diagnosis, said if isinstance(got, Raised) else f"{said} {words}.")
        if isinstance(got, Raised):
            return Outcome("todo" if got.kind == "todo" else "failed", got.kind, got.words)
        return Outcome("failed", name, f"{words}.")

    def _does_the_same(self, exercise: Exercise, wrong: Wrong, given: list[Any], first: int) -> bool:
        (_, cases, _, mistakes, _), lesson = self.known[exercise.id], exercise.load()
        before, after = range(min(first, MORE)), range(first, min(first + MORE, len(given)))
        for number in [*after, *before]:
            if (wrong.name, number) not in mistakes:
                mistakes[wrong.name, number] = _wrong_outcome(exercise, wrong, cases[number])
            theirs, allowed = unpack(mistakes[wrong.name, number]), tolerance(lesson, cases[number])
            if differs(given[number], theirs, allowed) or differs(theirs, given[number], allowed):
                return False
        return True


def differs(got: Any, want: Any, allowed: Any) -> str:
    """In words; "" if it does not."""
    if isinstance(got, Raised) or isinstance(want, Raised):
        alike = isinstance(got, Raised) and isinstance(want, Raised) and got[:2] == want[:2]
        return "" if alike else got.words if isinstance(got, Raised) else "There is no error"
    try:
        return compare(got, want, allowed)
    except Exception as error:  # whatever an answer's process has sent
        return f"The result is of another kind than expected ({type(error).__name__})"


def drawn(lesson: Any, seed: str) -> list[Any]:
    return list(lesson.draw(Random(seed)))


def tolerance(lesson: Any, case: Any) -> Any:
    return lesson.tolerance(case) if hasattr(lesson, "tolerance") else 0.0


def _wrong_outcome(exercise: Exercise, wrong: Wrong, case: Any) -> Any:
    try:
        with runner.time_limit(Path(), [], PATIENT), patched(exercise, _function(exercise, wrong)):
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
    said = runner.look(exercise, path)
    if said is not None:
        return said
    seconds, _ = judge.prepare(exercise, seed)
    return judge.verdict(exercise, path, seed, json.loads(json.dumps(runner.observe(exercise, path, seed, seconds))))


def _no_pass(said: Outcome) -> Outcome:
    """What an answer's process says of its own end is believed, unless it is good."""
    if said.status not in ("failed", "todo"):
        return Outcome("failed", "forged", "The file says of itself that it has passed. It is the judge who says so.")
    return Outcome(said.status, str(said.name)[:100], str(said.words)[:4000])
