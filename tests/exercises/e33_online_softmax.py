"""Softmax needs the largest score (or exp overflows) and the sum of all exponentials: so it seems, all scores
at once. But both can be kept up to date while the scores go by. When a larger one appears, everything summed so
far was measured against the old maximum, and is scaled down:

    m' = max(m, largest of the block)       rescale = exp(m - m')       p = exp(s - m')
    l = rescale · l + Σ p                   o = rescale · o + p V       in the end softmax(s) V = o / l

The lesson goes key by key, and a value is one number. Here a block of keys comes at a time, and a value is a row.
One row of attention: scores (Nk,), values (Nk, head dim), `block` keys at a time, a `Step` for each block.
"""

import itertools
import math
from random import Random
from typing import Any, NamedTuple

import torch

from flash import tiled
from minizero.memory.operators import Watcher
from tests.exercises.draws import deal
from tests.exercises.kit import observed, wrong

PLAN = [
    "Begin with maximum -∞, total 0, output zeros like a row of values.",
    "For each block of scores and of values: the new maximum, over the old one and the block.",
    "rescale = exp(old maximum - new one): 0 the first time. p = exp(scores - new maximum).",
    "Update total and output, both rescaled first. Remember the new maximum.",
    "Note a Step: Step(keys, maximum, rescale, total, output / total), where keys is the range of the block. The "
    "running output itself stays undivided.",
]
HINTS = [
    "math.exp(-math.inf) is 0.0: nothing was summed before the first block.",
    "A block is scores[start : start + block]; the last one may be shorter.",
    "total and output measure against the same maximum: what rescales one rescales the other.",
]
AFTER = (
    "The running output stays undivided. The package divides for the `Step` that it notes; attention itself divides "
    "once, at the end of a row. The maximum begins at -∞ and exp(-∞) is 0, so the first block is no case of its own. "
    "For a row that sees no key it would make -∞ - -∞, which is NaN. So the tiled version begins at the lowest finite "
    "number. Read next: `forward_tiles` in flash/tiled.py."
)
OUTPUT, TOTAL = "output = rescale * output + p @ v", "total = rescale * total + p.sum().item()"
WRONG = [
    wrong("rescales-the-sum-only", "When the maximum rises, the output must be rescaled too.",
          (OUTPUT, "output = output + p @ v")),
    wrong("rescales-the-output-only", "When the maximum rises, the sum must be rescaled too.",
          (TOTAL, "total = total + p.sum().item()")),
    wrong("no-maximum", "Large scores give inf or NaN: subtract the largest score so far before exp.",
          ("larger = max(maximum, s.max().item())", "larger = 0.0")),
    wrong("forgets-the-old-maximum", "The maximum never falls: max(old, new).",
          ("larger = max(maximum, s.max().item())", "larger = s.max().item()")),
    wrong("forgets-to-divide", "Divide by the sum.", ("output / total))", "output))")),
    wrong("divides-the-running-output", "Divide only what a Step shows; the running output stays a sum.",
          ("        maximum = larger", "        maximum = larger\n        output = output / total"),
          ("output / total))", "output))")),
    wrong("all-at-once", "It took exp of more scores than a block has: only the block's. What came before is in the "
          "sum and the output already.",
          ("s, v = scores[start : start + block], values[start : start + block]",
           "s, v = scores[: start + block], values[: start + block]\n        total, output = 0.0, 0.0"),
          ("range(start, start + len(s))", "range(start, len(s))")),
    wrong("range-too-long", "The last step names a key that there is not. The last block may be shorter.",
          ("range(start, start + len(s))", "range(start, start + block)")),
]  # fmt: skip


EXPONENTIALS = {"exp", "exp_", "exp2", "exp2_", "expm1", "_softmax", "_log_softmax", "logsumexp", "sigmoid", "pow"}


class LargestExp(Watcher):
    """The most scores that one exp is given, and how many exponentials there are in all."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in EXPONENTIALS:
            numbers = max(x.numel() for x in args if isinstance(x, torch.Tensor))
            self.most, self.total = max(self.most, numbers), self.total + numbers
        return func(*args, **(kwargs or {}))


class Case(NamedTuple):
    keys: int
    block: int
    dtype: torch.dtype
    spread: float
    middle: float
    order: str
    head_dim: int
    gaps: bool
    seed: int


def draw(random: Random) -> list[Case]:
    ways = itertools.product((1, 2, 7, 16, 40), (1, 3, 16, 64))
    dtypes, middles = [torch.float64, torch.float32, torch.bfloat16, torch.float16], [0.0, 0.0, -3e4, 3e4, -1e30]
    orders = ["rising", "falling", "as they come", "some hidden"]
    rows = deal(random, [*ways] * 3, dtypes, [0.03, 1.0, 10.0, 300.0], middles, orders, [1, 3, 8], [False, True])
    plain = [Case(6, 2, dtypes[0], 1.0, 0.0, order, 3, False, 1) for order in ("as they come", "rising", "falling")]
    return [*plain, Case(200, 1, dtypes[1], 1.0, 0.0, "as they come", 3, False, 1), *map(Case._make, rows)]


HEAVY = Case(4000, 64, torch.float32, 1.0, 0.0, "as they come", 8, False, 1)


def result(case: Case) -> dict[str, Any]:
    """Each exponential once: one for every score, and for every block perhaps one that rescales.

    A hidden score is -∞, as behind a causal mask. The first is never hidden.
    """
    generator = torch.Generator().manual_seed(case.seed)
    scores = torch.randn(case.keys, generator=generator, dtype=torch.float64) * case.spread
    scores += max(case.middle, torch.finfo(case.dtype).min / 2)
    if case.order == "some hidden":
        scores[1:][torch.rand(case.keys - 1, generator=generator) < 0.5] = -math.inf
    elif case.order != "as they come":
        scores = scores.sort(descending=case.order == "falling").values
    values = torch.randn(case.keys, case.head_dim, generator=generator, dtype=torch.float64).to(case.dtype)
    scores = scores.to(case.dtype)
    if case.head_dim == 1:  # of a mean that is nearly 0, 16 bits leave too few digits to compare
        values = values.abs() + 1
    if case.gaps:  # in memory, as in a column of a matrix
        scores, values = (torch.stack([x, x], -1)[..., 0] for x in (scores, values))
    more = 2000 + 24 * min(case.block, case.keys) * case.head_dim  # products of a block, and copies of it
    with LargestExp() as exps:
        steps = tiled.online_softmax(scores, values, case.block)
    seen = observed(tiled.online_softmax, scores, values, case.block, most=2, slack=more, meta=False)
    del seen["the result"]
    enough = case.keys + -(-case.keys // case.block)
    return {
        "exponentials, if they are too many": exps.total if exps.total > enough else 0,
        "the largest exp, if it is too large": exps.most if exps.most > case.block else 0,
        "steps": [
            {
                "keys": step.keys,
                "maximum": float(step.maximum),
                "rescale": torch.tensor([float(step.rescale), 1.0]),  # a tolerance is relative to the 1
                "total": float(step.total),
                "output": step.output,
            }
            for step in steps
        ],
        **seen,
    }


def tolerance(case: Case) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[case.dtype]
