"""What the cases of a check are made of. They are drawn anew each time; the package's own function says what is right.

A lesson's module defines:

    draw(random)    the cases: tuples of plain data, such as ranks, dtypes, formats, roundings. The first is plain
    result(case)    what the package does in that case: values, bytes, …
    tolerance(case) how much, relative to the largest value, a right answer may be off, one number or a number for each
                    dtype; without it, nothing
    WRONG           at most eight answers that students really give: a name, what is said, and edits of the reference
    HEAVY           perhaps, as the last case, one of large tensors: in it Python's own memory is compared, too
    check()         perhaps: a verdict that is no comparison, the compiler's. It fails in words of its own

A known example ("3 and 8, should be 5.5") is the first drawn case. The answer's process runs `result` with the answer
inside, the judge's process without (`machine/judge.py`), case by case, to the first one that differs. Whatever the
lesson, every case looks at what a call should leave alone (`kit.IN_A_CALL`): PyTorch's modes, environ, warnings, random
numbers, what a callback returned (`kit.returned`). After the last case: what the answer keeps, and on which device it
makes its tensors (`machine/runner.py`).
"""

from collections.abc import Iterable
from random import Random
from typing import Any


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


def shown(case: Any) -> str:
    """The fields of a case, but for its seed, which is drawn with the same cases again."""
    fields = case._asdict() if hasattr(case, "_asdict") else {"case": case}
    return ", ".join(f"{name} {str(value)[:60]}" for name, value in fields.items() if name != "seed")
