"""Which stage inputs to keep, and which to compute again: less memory for more forwards.

    keep                       inputs kept at once      advances of n stages
    everything                 n - 1                    n - 1
    every √n-th                about 2√n                about 2n
    the middle, then halves    log₂ n                   ½ n log₂ n
    binomial, s slots          s                        r·n - C(s+r, r-1), r the least with C(s+r, s) ≥ n
    optimal, any chain         what fits the budget     the least time that the budget allows

All of them answer one question again and again: x_i is the last input that is kept, and stages i … end-1 have
still to go backward, so how far is the next input that should be kept? A schedule here is that answer, a
function `split`, unfolded into steps. All are *persistent*: what is kept stays until its own backward; and each stage
but the last runs at least twice. Where a stage's tape is short, `group` several into one first: fewer forwards.

√n: Chen et al., 2016. Binomial: Griewank & Walther, 2000, who prove that no schedule with s slots has fewer
advances. Optimal: a dynamic programme, after Beaumont et al., 2019.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from minizero.schedules.chain import Schedule, Stage, outputs, unfold
from minizero.schedules.measured import measure_chain
from minizero.schedules.optimal import fastest_within, least_budget


def every_k(n: int, k: int) -> Schedule:
    """Keeps the inputs of stages 0, k, 2k, …, and inside the segment at work all; its last is used straight away.

    n stages of equal cost, `Stage(1, 2, boundary=1, tape=0)`: see `Schedule.on` for others. k = n keeps everything.
    """
    stages = _equal_stages("every_k", n)
    _at_least_one("every_k", "k", k)

    def split(i: int, end: int, kept: list[int]) -> int:
        next_segment = (i // k + 1) * k
        return next_segment if next_segment < end else i + 1

    return unfold(stages, split)


def sqrt_n(n: int) -> Schedule:
    """`every_k` with k = √n, rounded: about √n segments, and √n inputs inside the one at work."""
    _at_least_one("sqrt_n", "n", n)
    return every_k(n, round(math.sqrt(n)))


def recursive_halving(n: int) -> Schedule:
    """Keeps the input of the middle stage, does the second half, then the first, and each of them in this way."""
    return unfold(_equal_stages("recursive_halving", n), lambda i, end, kept: (i + end) // 2)


def binomial(n: int, slots: int) -> Schedule:
    """The fewest advances that n equal stages take with at most `slots` inputs kept, the chain's own counted.

    With s slots and no stage run forward more than r times, C(s+r, s) stages can go backward: so many, since
    C(s+r, s) = C(s-1+r, s-1) + C(s+r-1, s), the part behind the next kept input, which has a slot less,
    and the part before it, which has been run once already.
    """
    stages = _equal_stages("binomial", n)
    _at_least_one("binomial", "slots", slots)

    def split(i: int, end: int, kept: list[int]) -> int:
        s, length, r = slots - len(kept) + 1, end - i, 0
        while math.comb(s + r, s) < length:
            r += 1
        before = math.comb(s + r - 1, s)  # as many as r-1 more runs of each can do
        behind = math.comb(s + r - 2, s - 1)  # so many at least, or its slots would be wasted
        return i + min(before, length - behind)

    return unfold(stages, split)


def optimal_schedule(stages: Sequence[Stage], budget: float) -> Schedule:
    """The least time among all persistent schedules whose `peak` is at most `budget`.

    Equal stages have the binomial formula; for others a dynamic programme takes n³/6 · levels operations
    (100 stages: about a second). It is exact where the kept inputs can add up to a few thousand
    different sizes at most, as they do for n ≤ 13; else a size counts as up to 1/500 of the budget more than it
    is, and never as less, so that `peak` stays within the budget. `ValueError` for a chain of zero stages, and for a
    budget that no schedule meets: it names the least that one does.
    """
    stages = list(stages)
    if not isinstance(budget, numbers.Real):
        raise TypeError(f"optimal_schedule: the budget must be a number, not {budget!r}")
    if _are_equal(stages):
        # Beside the kept inputs: the running one, the output, their gradients, the tape.
        beside, boundary = 4 * stages[0].boundary + stages[0].tape, stages[0].boundary
        _check_budget(budget, beside + (boundary if len(stages) > 1 else 0))
        slots = int((budget - beside) // boundary) if budget - beside < len(stages) * boundary else len(stages)
        if beside + (slots + 1) * boundary <= budget:  # //, of numbers that are not whole, may be one too few
            slots += 1
        return binomial(len(stages), max(slots, 1)).on(stages)
    least, thriftiest = least_budget(stages)
    _check_budget(budget, least)
    return fastest_within(stages, budget, thriftiest)


def fit(model: Any, sample: torch.Tensor, budget_bytes: float) -> Schedule:
    """Measures each layer of `model` on `sample`, and returns the schedule that is fastest within `budget_bytes`.

    model: an nn.Sequential or a list of layers, each of one tensor to one tensor; it is left as it was. The
    budget is for what the chain itself holds: inputs, tape, and the gradients of inputs; parameters and
    their gradients come on top. `ValueError` names the least budget that can be met.
    """
    return optimal_schedule(measure_chain(model, sample), budget_bytes)


def _are_equal(stages: Sequence[Stage]) -> bool:
    """Do all stages cost the same? Backward's time aside, which every schedule spends once."""
    sizes = {stage.boundary for stage in stages} | set(outputs(stages))
    return len({(stage.forward, stage.tape) for stage in stages}) == len(sizes) == 1


def _check_budget(budget: float, least: float) -> None:
    if not budget >= least:
        raise ValueError(
            f"optimal_schedule: no schedule of this chain fits a budget of {budget}; the least feasible is {least}"
        )


def _equal_stages(name: str, n: int) -> list[Stage]:
    _at_least_one(name, "n", n)
    return [Stage(1, 2, boundary=1, tape=0)] * n


def _at_least_one(name: str, argument: str, value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name}: {argument} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}: {argument} must be at least 1, not {value}")
