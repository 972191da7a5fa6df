"""ZeRO stage 2: a rank needs the averaged gradient of its own chunk only, so that is what it keeps. The engine
calls `reduce(unit, gradient)` in the middle of backward; `gradient`, flat and as long as the unit, is the last
reference to the full local gradient. Once its chunk is reduced, its memory must be free for the next unit's.

    self.comm                  the ranks               unit.set_gradient(g)    makes g what the optimizer sees
"""

import weakref
from typing import Any, cast

import torch

from minizero import Zero2
from minizero.memory import Ledger
from tests.exercises.kit import fail, ranks, recognise, size, wrong
from tests.exercises.training import PSI, check_training, local_gradients, one_step, train

PLAN = [
    "Reduce-scatter the gradient over self.comm: the mean of this rank's chunk (label=unit.name).",
    "Give it to the unit. A chunk that is a view of `gradient` would keep all of `gradient` in memory.",
]
HINTS = [
    'reduce_scatter(tensor, comm, "mean") returns a new tensor, 1/N as long: this rank\'s chunk of the average.',
    "Nothing may refer to `gradient` when the method is over: no attribute, no view.",
]
CALL = 'unit.set_gradient(reduce_scatter(gradient, self.comm, "mean", label=unit.name))'
WRONG = [
    wrong("does-not-free", (CALL, "mine = unit.chunk(gradient)\n    reduce_scatter(gradient, self.comm, "
          '"mean", out=mine, label=unit.name)\n    unit.set_gradient(mine)')),
    wrong("keeps-a-list", (CALL, CALL + '\n    self.__dict__.setdefault("full", []).append(gradient)'),
          says="does-not-free"),
    wrong("forgot-divide", ('"mean"', '"sum"')),
    wrong("divides-twice", (CALL, CALL.replace("label=unit.name)", "label=unit.name) / self.comm.size"))),
    wrong("takes-the-largest", ('"mean"', '"max"')),
    wrong("no-communication", (CALL, "unit.set_gradient(unit.chunk(gradient).clone())")),
    wrong("reduces-everything", (CALL, "from minizero.ranks.collectives import all_reduce\n    unit.set_gradient("
          'unit.chunk(all_reduce(gradient, self.comm, "mean", label=unit.name)).clone())')),
    wrong("divides-by-four", (CALL, "unit.set_gradient(reduce_scatter(gradient, self.comm, label=unit.name) / 4)")),
    wrong("keeps-the-last", (CALL, CALL + '\n    self.__dict__["last"] = gradient'), says="frees-late"),
    wrong("frees-at-the-end", (CALL, 'kept = self.__dict__.setdefault("kept", [])\n    kept.append(gradient)\n    '
          + CALL + "\n    if len(kept) == len(self.units):\n        kept.clear()"), says="frees-late"),
    wrong("copies-first", (CALL, CALL.replace("(gradient,", "(gradient.clone(),"))),
    wrong("sends-some-twice", (CALL, "n = gradient.numel() // 40 * 4\n    reduce_scatter(gradient[:n], self.comm)\n    "
          + CALL), says="reduces-everything"),
    wrong("sends-fp32", (CALL, CALL.replace("(gradient,", "(gradient.float(),"))),
]  # fmt: skip


def check() -> None:
    steps = ranks(4, one_step, Zero2)
    local = local_gradients(4)
    mean = local.mean(0)
    held = [step.held["gradients"] for step in steps]
    if max(held) > 1.5 * 4 * PSI / 4:
        r = held.index(max(held))
        fail(
            "does-not-free",
            f"Rank {r} still holds {size(held[r])} of gradients after backward, where its own chunks are "
            f"{size(4 * PSI / 4)}: free the full gradient once it is reduced. A view of it keeps all of it.",
        )
    mistakes = {
        "forgot-divide": (mean * 4, "The gradient is the sum over the 4 ranks, 4 times too large: take the mean."),
        "divides-twice": (mean / 4, "The gradient is 4 times too small: the mean was divided by 4 again."),
        "takes-the-largest": (local.amax(0), "Each gradient is the largest of the ranks', not their mean."),
    }
    by_rank = sum(abs(step.gradient - mean).max() for step in steps)
    if by_rank > 1e-3 * mean.abs().max() and not any(_is(steps[0].gradient, value) for value, _ in mistakes.values()):
        if all(_mixes(steps[0].gradient, local)):
            fail(
                "no-communication",
                "Each chunk of the gradient is its owner's own, not the average: nothing was sent. Reduce over "
                "the ranks.",
            )
    for r, step in enumerate(steps):
        recognise(step.gradient, mean, mistakes, f"The gradient that rank {r} applies", tolerance=1e-4)
    sent = max(step.sent for step in steps)
    if sent > 1.04 * 2 * 4 * PSI * 3 / 4:  # padding
        fail(
            "reduces-everything",
            f"A rank sent {size(sent)} in a step, where {size(2 * 4 * PSI * 3 / 4)} are enough: all-reduce also "
            "gathers the average on all ranks, which need their own chunk only. Reduce-scatter.",
        )
    for step in ranks(2, one_step, Zero2):
        if _is(step.gradient, local_gradients(2).mean(0) / 2):
            fail("divides-by-four", "On 2 ranks the gradient is half of the mean: divide by self.comm.size, not by 4.")
    ranks(4, one_unit)
    sent = max(step.sent for step in ranks(4, in_16_bits))
    if sent > 1.2 * 2 * 2 * PSI * 3 / 4:
        fail(
            "sends-fp32",
            f"In 16 bits a rank sent {size(sent)} in a step, where {size(2 * 2 * PSI * 3 / 4)} are enough: reduce the "
            "gradient as it comes; the unit makes it FP32.",
        )
    check_training(ranks(4, train, Zero2, 2), "ZeRO-2")


class Unit:
    """As much of a unit as the method needs."""

    name = "blocks.0"

    def set_gradient(self, gradient, full=None):
        self.gradient = gradient

    def chunk(self, flat):
        return flat.chunk(4)[0]


class Engine:
    """As much of an engine."""

    def __init__(self, comm):
        self.comm, self.units = comm, [Unit(), Unit(), Unit()]
        self.in_order = self.units


def in_16_bits(comm):
    return one_step(comm, Zero2, dtype=torch.bfloat16)


def one_unit(comm) -> None:
    engine, gradient = Engine(comm), torch.ones(40_000)
    alive = weakref.ref(gradient)
    with Ledger() as ledger:
        Zero2.reduce(cast(Zero2, engine), cast(Any, engine.units[1]), gradient)
    del gradient
    if alive() is not None:
        fail(
            "frees-late",
            f"The unit is reduced, and its full gradient, {size(160_000)}, is still referred to: so they pile up, or "
            "one stays, until much later. Keep no reference to it.",
        )
    if ledger.peak["total"] > 160_000:
        fail(
            "copies-first",
            f"To reduce a gradient of {size(160_000)} it took {size(ledger.peak['total'])} more: a second full "
            "gradient. Reduce the one that is there.",
        )


def _is(a, b) -> bool:
    return bool((a - b).abs().max() < 1e-4 * b.abs().max())


def _mixes(gradient, local):
    """Is every element some rank's own?"""
    yield bool(((gradient - local).abs().amin(0) < 1e-4 * local.abs().max()).float().mean() > 0.99)
