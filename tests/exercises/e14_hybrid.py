"""Sharding factor F: the N ranks form groups of F. Inside a group ZeRO-3 shards; across groups the ranks with
the same chunk are replicas of each other. So a gradient is averaged in two steps: reduce-scatter inside the
group, and then, of the chunk only, all-reduce across the groups.

    ranks 0 … 7, F = 4      inside:  0 1 2 3 | 4 5 6 7       across:  0 4 | 1 5 | 2 6 | 3 7

`inside` are the ranks of this one's group, `across` those across. What goes across, where links are slow, is 1/F of
the gradient.
"""

from random import Random
from typing import Any, NamedTuple

import torch

from minizero import Zero3
from minizero.engines import hybrid
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import fail, ranks, recognise, size, wrong
from tests.exercises.training import PSI, check_training, local_gradients, one_step, train

PLAN = [
    "This rank's chunk of the mean over its group: a reduce-scatter, as ZeRO-3 does (label=label).",
    "The mean of that chunk over `across`; out=shard makes no second buffer. Return it.",
]
HINTS = [
    "A mean of means over groups of one size is the mean over all: both steps take the mean.",
    'reduce_scatter(gradient, inside, "mean", label=label) gives the chunk.',
]
FIRST = 'reduce_scatter(gradient, inside, "mean", label=label)'
SECOND = 'all_reduce(shard, across, "mean", out=shard, label=label)'
WRONG = [
    wrong("inside-only", (f"return {SECOND}", "return shard")),
    wrong("sums-across", ('across, "mean"', 'across, "sum"')),
    wrong("across-everything", (FIRST, FIRST.replace("gradient", 'all_reduce(gradient, across, "mean", label=label)')),
          (f"return {SECOND}", "return shard")),
    wrong("divides-by-all", (SECOND, SECOND + " / inside.size")),
    wrong("across-instead", (FIRST, FIRST + ".zero_().add_(gradient.chunk(inside.size)[inside.rank])")),
    wrong("over-all-ranks", (f"return {SECOND}", "shard = all_reduce(shard, inside, \"mean\", label=label)\n    "
          f"return {SECOND}")),
]  # fmt: skip


def check() -> None:
    steps = ranks(4, in_groups)
    local = local_gradients(4)
    mean = local.mean(0)
    groups = local.view(2, 2, -1).mean(1)
    across = local.view(2, 2, -1).mean(0)
    for r, step in enumerate(steps):
        group = r // 2
        mistakes = {
            "inside-only": (
                groups[group],
                f"Rank {r} applies the mean of its own group: the two groups drift apart. Average across them too.",
            ),
            "sums-across": (mean * 2, "The gradient is 2 times too large, for 2 groups: take the mean across them."),
            "divides-by-all": (mean / 2, "The gradient is too small: a mean of means needs no further division."),
        }
        mixed = (step.gradient - across).abs().amin(0).max() < 1e-4 * local.abs().max()
        if mixed and not near(step.gradient, mean):
            fail("across-instead", "The gradient is averaged across the groups and not inside them.")
        blended = _over_all(step.gradient, groups)
        if blended and not any(near(step.gradient, x) for x in (mean, *(value for value, _ in mistakes.values()))):
            fail(
                "over-all-ranks",
                "Different chunks were averaged with each other: across the groups only the ranks in `across` "
                "have the same chunk.",
            )
        recognise(step.gradient, mean, mistakes, f"The gradient that rank {r} applies", tolerance=1e-4)
    sent = max(step.sent for step in steps)
    enough = 4 * PSI * (4 * 1 / 2 + 1 / 2)  # gathered three times at most, reduced once; then half of it across
    if sent > enough:
        fail(
            "across-everything",
            f"A rank sent {size(sent)} in a step: too much goes across. First reduce inside the group, then send "
            "the chunk, 1/F of the gradient, across.",
        )
    check_training(ranks(4, trained), "ZeRO-3 with a sharding factor of 2")


def near(a, b) -> bool:
    return bool((a - b).norm() < 1e-3 * b.norm())


def _over_all(gradient, groups) -> bool:
    """Is it neither the mean nor any group's, on most of the elements?"""
    distance = (gradient - groups.mean(0)).norm() / groups.mean(0).norm()
    ratio = gradient.norm() / groups.mean(0).norm()
    return bool(distance > 0.3 and 0.2 < ratio < 0.95 and distance < 1.5)


def in_groups(comm):
    return one_step(comm, Zero3, sharding_factor=2, prefetch=0)


def trained(comm):
    return train(comm, lambda module, comm, dtype: Zero3(module, comm, sharding_factor=2), 2)


class Case(NamedTuple):
    ranks: int
    sharding_factor: int
    elements_each: int
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [(n, factor) for n in range(1, 9) for factor in range(1, n + 1) if n % factor == 0]
    return [Case(*row) for row in deal(random, ways, [1, 2, 5], [torch.float32, torch.float16, torch.bfloat16])]


def result(case: Case) -> dict[str, Any]:
    """Each gradient is a multiple of N, so that every mean is exact."""

    def on_rank(comm) -> dict[str, Any]:
        inside, across = comm.split(comm.rank // case.sharding_factor), comm.split(comm.rank % case.sharding_factor)
        shape = (comm.size * case.elements_each,)
        gradient = rank_kit.whole(case.seed + comm.rank, shape, case.dtype, times=comm.size)
        sent = inside.bytes_sent, across.bytes_sent
        mine = hybrid.average_in_two_steps(gradient, inside, across, "drawn")
        return {
            "the chunk": mine,
            "bytes sent inside": inside.bytes_sent - sent[0],
            "bytes sent across": across.bytes_sent - sent[1],
        }

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
