"""The flat buffer of a unit, of a length that N divides, belongs to N ranks: rank r owns chunk r, the r-th N-th of it.

    flat   | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 |      chunk of rank 2:  6 7 8

A chunk is a view: who writes into it writes into the buffer, and it costs no memory. `self` is the unit; `self.comm`
has the ranks that the unit is sharded over, which with a sharding factor are not all there are (`self.everyone`).
"""

from random import Random
from typing import Any, NamedTuple, cast

import torch

from minizero.engines import core
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import ranks, wrong

PLAN = [
    "Cut `flat` into as many equal pieces as there are ranks in self.comm.",
    "Return this rank's, as a view.",
    "A write into it counts in the buffer's `_version`: by this the engines see that they must send again. (One into "
    "`.data` does not count.)",
]
HINTS = [
    "self.comm.size is the number of ranks, self.comm.rank this one's number.",
    "tensor.chunk(n) gives n views, one behind the other.",
]
AFTER = (
    "The package cuts by `self.comm`, not by all ranks. With a sharding factor a unit belongs to the ranks of one "
    "group, and each group has a whole copy. All pieces have the same length, because the buffer was padded for the "
    "number of all ranks, which the size of a group divides. The piece is a view: ZeRO-1 lets its reduce-scatter "
    "write straight into this rank's chunk of the gradient. Read next: `reduce` in minizero/engines/zero1.py."
)
WRONG = [
    wrong("copies", "The chunk is a copy: it costs memory, and what is written to it never reaches the buffer.",
          ("[self.comm.rank]", "[self.comm.rank].clone()")),
    wrong("wrong-neighbour", "A rank took its neighbour's chunk.",
          ("[self.comm.rank]", "[(self.comm.rank + 1) % self.comm.size]")),
    wrong("interleaves", "Every 4th element is no chunk: a rank owns neighbours, one after the other.",
          ("flat.chunk(self.comm.size)[self.comm.rank]", "flat[self.comm.rank :: self.comm.size]")),
    wrong("first-chunk", "Each owns another one.", ("[self.comm.rank]", "[0]")),
    wrong("wrong-group", "With a sharding factor of 2 on 4 ranks a chunk is half of the buffer, not a quarter: cut it "
          "by self.comm, the ranks that share this unit, not by self.everyone.",
          ("flat.chunk(self.comm.size)", "flat.chunk(self.everyone.size)")),
    wrong("fixed-number-of-ranks", "Ask self.comm.size.",
          ("flat.chunk(self.comm.size)", "flat.chunk(4 if self.everyone.size == 4 == self.comm.size else 2)")),
]  # fmt: skip


class Unit:
    """As much of a unit as the method needs."""

    def __init__(self, comm, everyone):
        self.comm, self.everyone = comm, everyone


class Case(NamedTuple):
    """neighbours: a unit belongs to ranks that stand side by side; else to every so-manieth rank."""

    ranks: int
    sharding_factor: int
    neighbours: bool
    elements_each: int
    dtype: torch.dtype
    layout: str
    seed: int


def draw(random: Random) -> list[Case]:
    factors = [(n, factor) for n in rank_kit.SIZES for factor in range(1, n + 1) if n % factor == 0]
    ways = [(*way, neighbours) for way in factors for neighbours in (False, True)]
    plain = Case(4, 4, True, 3, torch.float32, "contiguous", 1)
    return [plain, plain._replace(sharding_factor=2)] + [
        Case(*row) for row in deal(random, ways, range(6), rank_kit.DTYPES, rank_kit.LAYOUTS)
    ]


def result(case: Case) -> dict[str, Any]:
    def on_rank(comm) -> dict[str, Any]:
        factor = case.sharding_factor
        elements = (factor * case.elements_each,)
        flat, other = (rank_kit.whole(case.seed + i, elements, case.dtype, case.layout) for i in (0, 1))
        inside = comm.split(comm.rank // factor if case.neighbours else comm.rank % (comm.size // factor))
        ours = cast(core.Unit, Unit(inside, comm))
        before = dict(vars(ours))
        core.Unit.chunk(ours, other)
        version = flat._version
        mine = core.Unit.chunk(ours, flat)
        mine += 100
        return {
            "the chunk after += 100": mine.clone(),
            "the buffer after chunk += 100": flat.clone(),
            "the memory after chunk += 100": rank_kit.memory(flat),
            "the write counts in the buffer's `_version`": flat._version > version,
            "the unit is as before": vars(ours) == before,
        }

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
