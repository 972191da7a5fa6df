"""The random stage of a check: cases are drawn anew each time, and the package's own function says what is right.

A lesson has a random stage if its module defines these functions:

    draw(random)    the cases: tuples of plain data, such as ranks, dtypes, formats, roundings
    result(case)    what the package does in that case: values, bytes, …
    tolerance(case) how much, relative to the largest value, a right answer may be off, one number or a number for each
                    dtype; without it, nothing

`Stage` calls `result` before the answer is loaded, and again with the answer inside.
"""

import os
import secrets
from collections.abc import Iterable
from random import Random
from types import ModuleType
from typing import Any

from tests.exercises.kit import compare, fail


class Stage:
    """The cases of a lesson, with the results of the package's own function. place: where a check is, in words.

    The seed is the environment variable SEED, so that a case can be had again; without it, one is drawn.
    """

    def __init__(self, lesson: ModuleType) -> None:
        self.lesson, self.place = lesson, ""
        self.seed = os.environ.get("SEED") or str(secrets.randbelow(10**6))
        cases = list(lesson.draw(Random(self.seed))) if hasattr(lesson, "draw") else []
        self.cases = [(case, lesson.result(case)) for case in cases]

    def compare(self) -> None:
        """Fail at the first case in which the answer, which now stands in the package, has another result."""
        for number, (case, want) in enumerate(self.cases, 1):
            self.place = (
                f" (In drawn case {number} of {len(self.cases)}: {_show(case)}. The same cases again: "
                f"SEED={self.seed} behind `make check`, or before `python`.)"
            )
            tolerance = self.lesson.tolerance(case) if hasattr(self.lesson, "tolerance") else 0.0
            words = compare(self.lesson.result(case), want, tolerance)
            if words:
                fail("random", f"{words}.")
        self.place = ""


def deal(random: Random, ways: Iterable[tuple[Any, ...]], *columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The ways in random order, and to each a value of every column, and a seed.

    A case that must not be missed is one of the ways. A column's values come about equally often.
    """
    ways = list(ways)
    ways = random.sample(ways, len(ways))
    hands = [dealt(random, values, len(ways)) for values in columns]
    return [(*way, *values, random.randrange(10**6)) for way, *values in zip(ways, *hands)]


def dealt(random: Random, values: Iterable[Any], count: int) -> list[Any]:
    """`count` of the values in random order, each as often as the others, give or take one."""
    values = list(values)
    hand: list[Any] = []
    while len(hand) < count:
        hand += random.sample(values, len(values))
    return random.sample(hand[:count], count)


def _show(case: Any) -> str:
    """The fields of a case, but for its seed, which is drawn with the same cases again."""
    fields = case._asdict() if hasattr(case, "_asdict") else {"case": case}
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "seed")
