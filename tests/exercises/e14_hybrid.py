"""Sharding factor F: F ranks stand in one machine, where links are fast. Together they hold one copy of the
parameters, sharded as in ZeRO-3. The machines are replicas of each other, and links between them are slow. After a step
all of them must have the parameters that one process would have.

    ranks 0 … 7, F = 4      machines  0 1 2 3 | 4 5 6 7       the same chunk  0 4 | 1 5 | 2 6 | 3 7

    comm.split(color)                 a communicator of the ranks that gave the same color, in their order; all call it
    all_gather(tensor, comm)          all ranks' tensors, end to end
    reduce_scatter(tensor, comm, op)  this rank's chunk of what all ranks' tensors are together
    all_reduce(tensor, comm, op)      the same, but all of it

Which ranks must talk about which numbers? Between machines goes as little as can be: 1/F of a gradient, and no
parameters.
"""

import math
import weakref
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, ranks, returned, wrong
from tests.exercises.tasks import hybrid

PLAN = [
    "The gradient is computed with all parameters. A machine has all of them.",
    "What is applied is the mean over all N ranks, for every F from 1 to N.",
    "A rank sends (F-1)/F of the parameters, as much of the gradient, and both inside its machine.",
    "Between M machines it sends 2 (M-1)/M of a chunk, and only ranks with the same chunk get it.",
    "When the gradient is sent, the full parameters are away: nothing refers to them.",
]
HINTS = [
    "A rank is in two groups: those with whom it shares one copy, and those who hold the same chunk. What does each "
    "group know, and what does it need? Which of the two should make a message small before the other one sends it?",
    "Two ranks are in one group if they give the same color. Which number do the ranks of a machine have in common, "
    "and which one do those with the same chunk? A mean of means over groups of one size is the mean over all.",
    "Whole numbers: comm.rank // factor is the machine, comm.rank % factor the place in it. Gather inside; compute; "
    'reduce-scatter inside; all-reduce the chunk across; both with "mean".',
]
AFTER = (
    "The package makes its two communicators once, in minizero/engines/any_model/hybrid.py, since each split is a talk "
    "of all ranks; you made them in every step. Its reductions are `Zero3.average` in stages.py there, and all else is "
    "stage 3: a hybrid engine is Zero3 with another communicator for each unit. It sums in another order than the "
    "stages without groups, so it agrees with them up to rounding and not bit for bit. F = 1 is DDP: nothing is "
    'sharded, and all is sent across. Read next: "How many ranks share one copy?" in '
    'notebooks/02c_zero_choices.ipynb; Zhao et al., 2023, "PyTorch FSDP", section 3.2.2.'
)
SPLIT = "comm.split(comm.rank // factor), comm.split(comm.rank % factor)"
GATHER = "all_gather(shard, inside)"
FIRST = 'reduce_scatter(gradient, inside, "mean")'
SECOND = 'all_reduce(mine, across, "mean")'
WRONG = [
    wrong("inside-only", "Average across them too, and use what all_reduce returns: it leaves its argument as it is.",
          (SECOND, "mine")),
    wrong("sums-across", "Take the mean across them.", (SECOND, SECOND.replace("mean", "sum"))),
    wrong("across-everything", "First make the gradient a chunk, inside the machine, then send this chunk across.",
          (FIRST, FIRST.replace("gradient", 'all_reduce(gradient, across, "mean")')), (SECOND, "mine")),
    wrong("inside-everything", "A rank needs its own chunk of the gradient only.",
          (FIRST, 'all_reduce(gradient, inside, "mean").chunk(factor)[inside.rank]')),
    wrong("over-all-ranks", "Different chunks were averaged with each other: across the machines only the ranks in the "
          "same place have the same chunk.", (SECOND, SECOND.replace("across", "comm"))),
    wrong("groups-exchanged", "One copy is shared by the ranks of its machine, so its shards are gathered there; "
          "replicas are averaged across machines.",
          (SPLIT, "comm.split(comm.rank % (comm.size // factor)), comm.split(comm.rank // (comm.size // factor))")),
    wrong("gathers-from-all", "A rank gathers from the ranks of its own machine only: they have all of the copy.",
          (GATHER, "all_gather(shard, comm)")),
    wrong("keeps-the-parameters", "A name refers to them. Let go of them when the gradient is computed.",
          (GATHER, "(full := all_gather(shard, inside))")),
]  # fmt: skip


class Case(NamedTuple):
    """tiny: all gradients are twice the smallest number above 0, which a division by 4 before the sum makes 0."""

    ranks: int
    sharding_factor: int
    elements_each: int
    dtype: torch.dtype
    rates: tuple[float, float]
    seed: int
    tiny: bool = False


def draw(random: Random) -> list[Case]:
    ways = [(n, factor) for n in rank_kit.SIZES for factor in range(1, n + 1) if n % factor == 0]
    plain = Case(8, 4, 2, torch.float32, (0.5, 0.25), 1)
    tiny = Case(8, 4, 2, torch.float32, (1.0, 1.0), 1, True)  # in 16 bits the mean itself divides before the sum
    return [plain, tiny] + [
        Case(*row) for row in deal(random, ways, [1, 2, 5], rank_kit.FLOATS, [(0.5, 0.25), (1.0, 0.5), (-0.5, 0.0)])
    ]


def result(case: Case) -> dict[str, Any]:
    """Two steps from one shard: the new shards, the bytes sent in groups of one machine, and in others, …"""
    start = rank_kit.whole(case.seed, (case.sharding_factor * case.elements_each,), case.dtype)
    start *= not case.tiny
    start += 2.0**-40 if case.dtype == torch.float64 else 0.0  # what FP32 cannot hold beside 1
    special = (math.inf, -math.inf, math.nan)

    def on_rank(comm) -> dict[str, Any]:
        shard = start.chunk(case.sharding_factor)[comm.rank % case.sharding_factor].clone()
        taken: list[weakref.ref] = []
        alive: list[bool] = []
        parts: list[Any] = []
        split = comm.split

        def noted(*args, **kwargs):
            parts.append(split(*args, **kwargs))
            return parts[-1]

        comm.split = noted

        def gradient_of(w):
            taken.append(weakref.ref(w))
            seed = case.seed + 10 * len(taken) + comm.rank
            if case.tiny:
                return returned(torch.full_like(w, 2 * rank_kit.smallest(w.dtype)))  # a sum of 4 over 8 is one
            return returned(
                comm.size * w + rank_kit.whole(seed, tuple(w.shape), w.dtype, times=comm.size, special=special)
            )

        comm.observers.append(lambda *_: alive.extend(each() is not None for each in taken))
        with Ledger() as ledger:
            new = [hybrid.hybrid_step(shard, gradient_of, comm, case.sharding_factor, rate) for rate in case.rates]
        of_one = [p for p in parts if len({rank // case.sharding_factor for rank in p.ranks}) == 1]
        inside = sum(part.bytes_sent for part in of_one)
        return {
            "the new shards": new,
            "the old shard": shard,
            "bytes at the peak": AtMost(ledger.peak["total"] + 1500, 1.5, 0.02),
            "bytes sent inside": inside,
            "bytes sent across": comm.bytes_sent - inside,
            "calls of gradient_of": len(taken),
            # If F is 1, the shard itself may be given to it.
            "the parameters live while a gradient is sent": any(alive) and case.sharding_factor > 1,
        }

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
