"""ZeRO stage 2: a rank needs the averaged gradient of its own chunk only, so that is all it keeps. Backward brings one
full gradient after the other, from the last unit to the first. Here is such a backward without an engine: an iterator
computes the next gradient when you ask for it, and you say what becomes of it.

    for name, gradient in arrivals                       e.g. "blocks.2", 1000 elements of BF16, then "blocks.1", …
    reduce_scatter(tensor, comm, op, label=name)         new: this rank's chunk, if N divides dimension 0
    pad(tensor, multiple)                                with zeros behind; a copy, unless nothing is missing

Memory lives as long as a name, an attribute, a list or a view refers to it. A name of a loop still refers to the last
gradient while the iterator computes the next one: `del name` ends that.
"""

import math
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, ranks, wrong
from tests.exercises.tasks import zero2

PLAN = [
    "At the end shards[name] is the average over the ranks of this rank's chunk, for every unit that came; if an "
    "earlier micro-batch left something there, the sum of both. What is there of a unit that does not come stays.",
    "While the next gradient is computed, no full one is alive, and nothing as long as one: of each unit only 1/N.",
    "That holds in every micro-batch: no full sum waits for the last one.",
    "N may not divide a gradient. Chunks are equal all the same.",
    "Between the ranks goes the gradient's own dtype, and the average is right even if the sum is infinite in FP16. "
    "What is kept and added up is FP32.",
    "Each gradient is sent once, (N-1)/N of its bytes.",
]
HINTS = [
    "For each gradient there are four things to do: make its length fit, average, let go of it, keep what is left. Ask "
    "after each of them which tensors are alive, and by which name.",
    "The order is: pad, reduce-scatter, FP32, add. Padding may copy. Then two full tensors are alive, and both "
    "must be gone before the loop asks for the next gradient.",
    "`full = pad(gradient, comm.size)`, `del gradient`, the average of your chunk as .float(), `del full`; then add it "
    "to shards[name], or put it there.",
]
AFTER = (
    "Zero2.reduce in minizero/engines/zero2.py has one line of this, since the rest happens elsewhere. The padding is "
    "made only once, because a unit's gradient is collected in a padded buffer from the beginning "
    "(minizero/engines/any_model/gradient.py), and `take` hands over the last reference to it. A rank that did not use "
    "a unit brings a gradient of zeros there. In your loop it would bring none, and the other ranks would wait for "
    "ever. With many micro-batches your answer sends each of them; `no_sync` sends once, and pays with a full gradient "
    '(minizero/engines/any_model/gradient.py). Read next: "When does ZeRO-2 pay?" in notebooks/02c_zero_choices.ipynb, '
    'and Rajbhandari et al., 2019, "ZeRO", section 5.2.'
)
CALL = 'reduce_scatter(full, comm, "mean", label=name)'
ADD = "shards[name] = shards[name].add_(mine) if name in shards else mine"
FREE, FREE_FULL = "        del gradient\n", "    del full  # before the next one is computed\n"
WRONG = [
    wrong("keeps-the-last", "While the next gradient was computed, the full one of the unit before, or its padded "
          "copy, was still alive: a name refers to it until it gets its next value. `del` both.", (FREE, ""),
          (FREE_FULL, "\n")),
    wrong("does-not-free", "Of each unit that has come only 1/N may be left. A list, or a view of a full gradient, "
          "keeps all of it.", (FREE, FREE + '        backward.__dict__.setdefault("all", []).append(full)\n')),
    wrong("forgot-divide", "The gradient is the sum over the ranks: take the mean.", ('"mean"', '"sum"')),
    wrong("no-communication", "Each rank kept its own gradient of its chunk, not the average: nothing was sent. Reduce "
          "over the ranks.", (CALL, "full.chunk(comm.size)[comm.rank].clone()")),
    wrong("reduces-everything", "A rank needs its own chunk of the average only, and sends each gradient once.",
          (CALL, "__import__('minizero').all_reduce(full, comm, 'mean').chunk(comm.size)[comm.rank].clone()")),
    wrong("forgets-the-micro-batch-before", "After the second micro-batch only its own gradient is there: add it to "
          "what the first one left.", (ADD, "shards[name] = mine")),
    wrong("sends-fp32", "A 16-bit gradient was sent as FP32: reduce it as it comes, and make FP32 of what is left.",
          (CALL, CALL.replace("full,", "full.float(),"))),
    wrong("adds-in-16-bits", "In BF16 256 + 1 is rounded back to 256: turn each average into FP32 before you add it.",
          (CALL + ".float()", CALL),
          (ADD, "shards[name] = (shards[name].to(mine.dtype) + mine if name in shards else mine).float()")),
]  # fmt: skip


class Case(NamedTuple):
    """absent: in which of several micro-batches the last unit does not come. halves: every second rank shares.

    values: of each micro-batch, what all numbers are.
    """

    ranks: int
    dtype: torch.dtype
    micro_batches: int
    absent: int | None
    halves: bool
    elements: list[int]
    seed: int
    values: tuple[float, ...] = ()


def draw(random: Random) -> list[Case]:
    dtypes, ways = [torch.float32, torch.float16, torch.bfloat16], [(n,) for n in rank_kit.SIZES] * 2
    rows = deal(random, ways, dtypes, [1, 2, 3], [None, 0, 1, 2], [False, False, True])
    plain = Case(4, torch.float32, 2, None, False, [998, *[1000] * 8], 1)  # 4 divides padded copies of the first only
    tiny = plain._replace(dtype=torch.float16, micro_batches=1, elements=[8], values=(2.0**-23,))  # a quarter is 0
    large = plain._replace(dtype=torch.bfloat16, elements=[1000], values=(256.0, 1.0))  # their sum in BF16 is 256
    huge = tiny._replace(values=(2.0**14,))  # four of them are infinite
    return [plain, tiny, huge, large] + [
        Case(n, dtype, micro, absent, halves, [random.randint(1, 40) for _ in range(random.randint(2, 5))], seed)
        for n, dtype, micro, absent, halves, seed in rows
    ]


HEAVY = Case(2, torch.float32, 1, None, False, [50_000] * 3, 1)


def result(case: Case) -> dict[str, Any]:
    """Each gradient is a multiple of N, infinite or NaN, so that every mean is exact."""

    def on_rank(world) -> dict[str, Any]:
        comm = world.split(world.rank % 2) if case.halves else world
        before, shards, held = comm.bytes_sent, dict[str, torch.Tensor](), []
        with Ledger() as ledger:
            for m in range(case.micro_batches):

                def arrivals(m=m):
                    absent = m == case.absent and case.micro_batches > 1
                    for i, n in enumerate(case.elements[:-1] if absent else case.elements):
                        held.append(AtMost(ledger.current["total"], 2.5))
                        seed, special = case.seed + 100 * m + 10 * i + comm.rank, (math.inf, -math.inf, math.nan)
                        if case.values or i == comm.rank:  # of one unit, this rank's gradient is all zeros
                            value = case.values[m] if case.values else 0.0
                            yield f"unit {i}", torch.full((n,), value, dtype=case.dtype)
                            continue
                        yield f"unit {i}", rank_kit.whole(seed, (n,), case.dtype, times=comm.size, special=special)

                zero2.backward(arrivals(), shards, comm)
        return {"shards": shards, "bytes sent": comm.bytes_sent - before, "bytes when a gradient is computed": held}

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
