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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash import tiled
from tests.exercises.draws import deal
from tests.exercises.kit import fail, same, wrong

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
    wrong("rescales-the-sum-only", (OUTPUT, "output = output + p @ v")),
    wrong("rescales-the-output-only", (TOTAL, "total = total + p.sum().item()")),
    wrong("no-maximum", ("larger = max(maximum, s.max().item())", "larger = 0.0")),
    wrong("forgets-the-old-maximum", ("larger = max(maximum, s.max().item())", "larger = s.max().item()")),
    wrong("rescales-backwards", ("math.exp(maximum - larger)", "math.exp(min(larger - maximum, 700.0))")),
    wrong("forgets-to-divide", ("output / total))", "output))")),
    wrong("divides-the-running-output", ("        maximum = larger", "        maximum = larger\n        "
                                                                     "output = output / total"),
          ("output / total))", "output))")),
    wrong("skips-keys", ("scores[start : start + block], values[start : start + block]",
                         "scores[start : start + 1], values[start : start + 1]")),
    wrong("never-remembers-the-maximum", ("        maximum = larger\n", "")),
    wrong("all-at-once", ("s, v = scores[start : start + block], values[start : start + block]",
                          "s, v = scores[: start + block], values[: start + block]\n        total, output = 0.0, 0.0"),
          ("range(start, start + len(s))", "range(start, len(s))")),
    wrong("steps-share-a-tensor", ("    steps = []", "    steps, shown = [], torch.zeros_like(values[0])"),
          ("output / total))", "torch.div(output, total, out=shown)))")),
    wrong("notes-another-rescale", ("maximum, rescale, total, output", "maximum, 1.0, total, output")),
    wrong("notes-the-block-s-sum", ("rescale, total, output / total", "rescale, p.sum().item(), output / total")),
    wrong("notes-the-last-sum", ("    return steps", "    return [step._replace(total=total) for step in steps]")),
    wrong("computes-all-again", ("    steps = []", "    steps, rates = [], torch.zeros(0)"),
          ("total = rescale * total + p.sum().item()", "rates = torch.cat([rates.to(p.dtype) * rescale, p])\n        "
           "total = rates.sum().item()"), (OUTPUT, "output = rates @ values[: start + len(s)]")),
    wrong("begins-at-a-number", ("-math.inf", "-1e9"), says="random"),
    wrong("overwrites-the-values", ("output = rescale", "v.mul_(p[:, None])\n        output = rescale"),
          ("p @ v", "v.sum(0)")),
    wrong("overwrites-the-scores", ("(s - larger).exp()", "s.sub_(larger).exp()")),
    wrong("range-too-long", ("range(start, start + len(s))", "range(start, start + block)")),
]  # fmt: skip


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    rising = torch.tensor([-1.0, 0.5, 0.2, 2.0, 3.5, 3.0], dtype=torch.float64)
    want = rising.softmax(0) @ values
    given, given_values = rising.clone(), values.clone()
    two = tiled.online_softmax(given, given_values, block=2)
    if not torch.equal(given, rising):
        fail(
            "overwrites-the-scores",
            f"The scores were {rising.tolist()} and are {[round(x, 2) for x in given.tolist()]} afterwards: a slice is "
            "a view, so write nothing into it.",
        )
    if not torch.equal(given_values, values):
        fail("overwrites-the-values", "The values are others afterwards: a slice is a view, so write nothing into it.")
    got = two[-1].output
    if got.shape != want.shape:
        fail("values", f"The output has shape {tuple(got.shape)}, expected {tuple(want.shape)}: a row of values.")
    if not same(got, want, 1e-9):
        said = f"With blocks of 2 keys the output is {got[0]:.4f} …, expected {want[0]:.4f} …"
        p = (rising - 3.5).exp()
        if same(got, p @ values, 1e-9):
            fail("forgets-to-divide", f"{said}: divide by the sum.")
        last = two[-1]
        if any(abs(step.rescale - 1) > 1e-9 and step.rescale == 0 for step in two[1:]):
            fail(
                "never-remembers-the-maximum",
                "After the first block everything summed so far was multiplied by 0: remember the new maximum.",
            )
        if any(step.rescale > 1 for step in two[1:]):
            fail("rescales-backwards", f"{said}: a larger maximum must make what was summed smaller: exp(old - new).")
        if [key for step in two for key in step.keys] != list(range(6)):
            fail("skips-keys", f"{said}: of each block only the first key counts.")
        if abs(last.total - float(p.sum())) < 1e-9:
            blocks = [(rising[i : i + 2] - rising[: i + 2].max()).exp() @ values[i : i + 2] for i in (0, 2, 4)]
            if same(got, torch.stack(blocks).sum(0) / last.total, 1e-9):
                fail("rescales-the-sum-only", f"{said}: when the maximum rises, the output must be rescaled too.")
            fail(
                "divides-the-running-output", f"{said}: divide only what a Step shows; the running output stays a sum."
            )
        if same(got * last.total, p @ values, 1e-9):
            fail("rescales-the-output-only", f"{said}: when the maximum rises, the sum must be rescaled too.")
        fail("values", f"{said}.")
    falling = torch.tensor([900.0, 0.0, -900.0], dtype=torch.float64)
    try:
        steps = tiled.online_softmax(falling, values[:3])
        high = tiled.online_softmax(falling + 900, values[:3])
    except OverflowError:
        fail(
            "forgets-the-old-maximum", "Scores 900, 0: exp(900 - 0) overflows. The maximum never falls: max(old, new)."
        )
    if steps[-1].maximum == 0 or not bool(high[-1].output.isfinite().all()):
        fail("no-maximum", "Scores of 1800 give inf or NaN: subtract the largest score so far before exp.")
    for block in (1, 4, 6, 10):
        steps = tiled.online_softmax(rising, values, block)
        total = float(steps[-1].total)
        if total <= 0 or not math.isfinite(total):
            fail("values", f"With blocks of {block} keys the sum of exponentials is {total:g}.")
        lse = float(steps[-1].maximum) + math.log(total)
        if not same(steps[-1].output, want, 1e-9) or abs(lse - rising.logsumexp(0).item()) > 1e-5:
            if total * (1 + 1e-9) < float((rising - rising.max()).exp().sum()):
                fail("notes-the-block-s-sum", "A Step's total is that of all scores so far, not of its block.")
            fail("values", f"With blocks of {block} keys the result is another one.")
        if max(key for step in steps for key in step.keys) >= 6:
            fail(
                "range-too-long",
                f"6 keys in blocks of {block}: the last step names key {steps[-1].keys[-1]}, which there is not. The "
                "last block may be shorter.",
            )
        if [key for step in steps for key in step.keys] != list(range(6)):
            fail("values", f"With blocks of {block} keys the steps do not name every key once.")
    each_step(rising, values)
    work()


PICKS = {"index", "index_select", "gather", "take"}  # they read only what they write


class Work(TorchDispatchMode):
    """How many numbers the operations read and write in all. Views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not any(given.alias_info and not given.alias_info.is_write for given in func._schema.returns):
            read = () if func.__name__.split(".")[0] in PICKS else args
            self.numbers += sum(x.numel() for x in tree_leaves([read, made]) if isinstance(x, torch.Tensor))
        return made


def work() -> None:
    """A right answer takes about 10 operations for each block, on the block or on a row of values."""
    numbers = []
    for keys in (100, 400):
        with Work() as seen:
            tiled.online_softmax(torch.linspace(0, 1, keys), torch.ones(keys, 3))
        numbers.append(seen.numbers)
    if numbers[1] > 6 * numbers[0]:
        fail(
            "computes-all-again",
            f"For 4 times as many keys its operations read and write {numbers[1] / numbers[0]:.1f} times as many "
            "numbers: a step needs its block, the sum and the output, and nothing of the blocks before.",
        )


EXPONENTIALS = {"exp", "exp_", "exp2", "exp2_", "expm1", "_softmax", "_log_softmax", "logsumexp", "sigmoid", "pow"}


class LargestExp(TorchDispatchMode):
    """The most scores that one exp is given, and how many exponentials there are in all."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in EXPONENTIALS:
            numbers = max(x.numel() for x in args if isinstance(x, torch.Tensor))
            self.most, self.total = max(self.most, numbers), self.total + numbers
        return func(*args, **(kwargs or {}))


def each_step(scores: torch.Tensor, values: torch.Tensor) -> None:
    with LargestExp() as seen:
        steps = tiled.online_softmax(scores, values, block=2)
    if seen.most > 2:
        fail(
            "all-at-once",
            f"With blocks of 2 keys it took exp of {seen.most} scores at once: only the block's. What came before is "
            "in the sum and the output already.",
        )
    before = -math.inf
    for i, step in enumerate(steps):
        so_far = slice(0, 2 * i + 2)
        if not same(step.output, scores[so_far].softmax(0) @ values[so_far], 1e-9):
            fail(
                "steps-share-a-tensor",
                f"Step {i} of {len(steps)} does not show the output after its keys: does a later step overwrite its "
                "tensor?",
            )
        if abs(float(step.rescale) - math.exp(before - float(step.maximum))) > 1e-9:
            fail(
                "notes-another-rescale",
                f"Step {i} notes a rescale of {float(step.rescale):.4f}, expected exp(old maximum - new one) = "
                f"{math.exp(before - float(step.maximum)):.4f}.",
            )
        total = (scores[so_far] - float(step.maximum)).exp().sum().item()
        if abs(float(step.total) - total) > 1e-9 * total:
            fail(
                "notes-the-last-sum",
                f"Step {i} notes a sum of {float(step.total):.4f}, and after its keys it was {total:.4f}: each Step "
                "has its own.",
            )
        before = float(step.maximum)


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
    orders = ["rising", "falling", "as they come", "some hidden"]
    return [
        Case(*row)
        for row in deal(
            random,
            [*ways] * 3,
            [torch.float64, torch.float32],
            [0.03, 1.0, 10.0, 300.0],
            [0.0, 0.0, -3e4, 3e4, -1e30],
            orders,
            [1, 3, 8],
            [False, True],
        )
    ]


def result(case: Case) -> dict[str, Any]:
    """Each exponential once: one for every score, and for every block perhaps one that rescales.

    A hidden score is -∞, as behind a causal mask. The first is never hidden.
    """
    generator = torch.Generator().manual_seed(case.seed)
    scores = torch.randn(case.keys, generator=generator, dtype=torch.float64) * case.spread + case.middle
    if case.order == "some hidden":
        scores[1:][torch.rand(case.keys - 1, generator=generator) < 0.5] = -math.inf
    elif case.order != "as they come":
        scores = scores.sort(descending=case.order == "falling").values
    values = torch.randn(case.keys, case.head_dim, generator=generator, dtype=torch.float64).to(case.dtype)
    scores = scores.to(case.dtype)
    if case.gaps:  # in memory, as in a column of a matrix
        scores, values = (torch.stack([x, x], -1)[..., 0] for x in (scores, values))
    with LargestExp() as seen:
        steps = tiled.online_softmax(scores, values, case.block)
    enough = case.keys + -(-case.keys // case.block)
    return {
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
        "the scores and the values afterwards": (scores, values),
        "exponentials, if they are too many": seen.total if seen.total > enough else 0,
        "the largest exp, if it is too large": seen.most if seen.most > case.block else 0,
    }


def tolerance(case: Case) -> float:
    return 1e-9 if case.dtype == torch.float64 else 1e-4
