"""Check the checks: what they say about the stub, the reference and the wrong answers of an exercise.

One process does all of it, and so imports torch once. `prepare` comes first.
"""

import functools
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.exercises.course import Exercise
from tests.exercises.machine.runner import Outcome


class Said(NamedTuple):
    """What a check said about an answer, and the diagnosis that it should give."""

    answer: str
    expected: str
    outcome: Outcome
    seconds: float


def prepare() -> None:
    """Set up the process as `checker.py` does: a CPU, one thread, kernels interpreted."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    import torch

    torch.set_num_threads(1)


def check_checks(exercise: Exercise, which: str) -> list[Said]:
    """which: "stub", "reference", "one" wrong answer, or "all" of them."""
    from tests.exercises.machine.judge import Judge
    from tests.exercises.stubs import answer, stub

    say = functools.partial(_say, exercise, Judge(), os.environ.get("SEED") or str(secrets.randbelow(10**6)))

    wrongs = exercise.load().WRONG
    if which == "stub":
        expected = wrongs[0].name if exercise.text().takeaway else "todo"
        return [say("the stub", expected, stub(exercise))]
    if which == "reference":
        return [say("the reference", "passed", answer(exercise))]
    if which == "one":
        wrongs = [wrongs[exercise.number % len(wrongs)]]
    return [say(wrong.name, wrong.name, answer(exercise, wrong)) for wrong in wrongs]


def _say(exercise: Exercise, judge: Any, seed: str, name: str, expected: str, text: str) -> Said:
    from tests.exercises.machine.judge import examine

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, exercise.file)
        path.write_text(text, encoding="utf-8")
        start = time.monotonic()
        outcome = examine(exercise, path, seed, judge)
        return Said(name, expected, outcome, time.monotonic() - start)
