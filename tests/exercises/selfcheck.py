"""Check the checks: what they say about the stub, the reference and the wrong answers of an exercise.

One process does all of it, and so imports torch once. `prepare` comes first.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.exercises.course import Exercise
from tests.exercises.machine.runner import SECONDS, Outcome, examine

PATIENT = 60.0  # for references, on a machine that is busy with other tests


class Said(NamedTuple):
    """What a check said about an answer, and the diagnosis that it should give."""

    answer: str
    expected: str
    outcome: Outcome
    seconds: float


def prepare() -> None:
    """Set up the process as `runner.run` does: a CPU, one thread, kernels interpreted."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    import torch

    torch.set_num_threads(1)


def check_checks(exercise: Exercise, which: str) -> list[Said]:
    """which: "stub", "reference", "one" wrong answer, or "all" of them."""
    from tests.exercises.stubs import answer, stub

    wrongs = exercise.load().WRONG
    if which == "stub":
        expected = wrongs[0].diagnosis if exercise.text().bug else "todo"
        return [_say("the stub", expected, stub(exercise), exercise)]
    if which == "reference":
        return [_say("the reference", "passed", answer(exercise), exercise, PATIENT)]
    if which == "one":
        wrongs = [wrongs[exercise.number % len(wrongs)]]
    return [_say(wrong.name, wrong.diagnosis, answer(exercise, wrong), exercise) for wrong in wrongs]


def _say(name: str, expected: str, text: str, exercise: Exercise, seconds: float = SECONDS) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, exercise.file)
        path.write_text(text, encoding="utf-8")
        start = time.monotonic()
        outcome = examine(exercise, path, seconds)
        return Said(name, expected, outcome, time.monotonic() - start)
