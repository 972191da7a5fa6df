"""Which stage inputs to keep, and which to compute again: less memory for more forwards.

    keep                       inputs kept at once      advances of n stages
    every input, no tape       n - 1                    n - 1
    every √n-th                2(√n - 1)                2(n - √n)
    the middle, then halves    log₂ n                   ½ n log₂ n
    binomial, s slots          s                        r·n - C(s+r, r-1), r the least with C(s+r, s) ≥ n
    optimal, any chain         what fits the budget     the least time that the budget allows

All of them answer one question again and again. x_i is the last input that is kept, and stages i … end-1 have still
to go backward. How far away is the next input that should be kept? A rule is that answer, a function `split`, which
`unfold` turns into steps. All schedules here are *persistent*: a kept input stays until its own backward. Each stage
but the last runs at least twice. If tapes are short, `group` several stages into one first: that saves forwards.

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
    """Keeps the inputs of stages 0, k, 2k, …, and inside the running segment all but the last.

    The last one is used straight away. k = n keeps every input. The n stages cost the same,
    `Stage(1, 2, boundary=1, tape=0)`; `Schedule.on` takes others.
    """
    stages = _equal_stages("every_k", n)
    _at_least_one("every_k", "k", k)

    def split(i: int, end: int, kept: list[int]) -> int:
        next_segment = (i // k + 1) * k
        return next_segment if next_segment < end else i + 1

    return unfold(stages, split)


def sqrt_n(n: int) -> Schedule:
    """`every_k` with k = √n, rounded: about √n segments, and √n inputs inside the running one."""
    _at_least_one("sqrt_n", "n", n)
    return every_k(n, round(math.sqrt(n)))


def recursive_halving(n: int) -> Schedule:
    """Keeps the middle stage's input, takes the second half backward, then the first, and halves each of them too."""
    return unfold(_equal_stages("recursive_halving", n), lambda i, end, kept: (i + end) // 2)


def binomial(n: int, slots: int) -> Schedule:
    """The fewest advances that n equal stages take with at most `slots` inputs kept, the chain's own counted.

    With s slots, and no stage advanced more than r times, C(s+r, s) stages can go backward:

        C(s+r, s) = C(s-1+r, s-1)    the part behind the next kept input, which has one slot less
                  + C(s+r-1, s)      the part before it, which has been advanced through once already
    """
    stages = _equal_stages("binomial", n)
    _at_least_one("binomial", "slots", slots)

    def split(i: int, end: int, kept: list[int]) -> int:
        s = slots - len(kept) + 1  # x_i takes one of them
        length = end - i
        r = 0  # the least that is enough
        while math.comb(s + r, s) < length:
            r += 1
        before = math.comb(s + r - 1, s)  # the most stages that r-1 further advances of each can serve
        behind = math.comb(s + r - 2, s - 1)  # the fewest that may lie behind, or slots would be wasted
        return i + min(before, length - behind)

    return unfold(stages, split)


def optimal_schedule(stages: Sequence[Stage], budget: float) -> Schedule:
    """The least time among all persistent schedules whose `peak` is at most `budget`.

    Equal stages have the binomial formula. For others a dynamic programme takes n³/6 · levels operations (100 stages:
    about a second). It is exact if the kept inputs can add up to at most a few thousand different sizes, as they do
    for n ≤ 13. Else a size counts as up to 1/500 of the budget more than it is, and never as less, so that `peak`
    stays within the budget. Raises `ValueError` if there is no stage, or if no schedule meets the budget: the error
    names the least feasible one.
    """
    stages = list(stages)
    if not isinstance(budget, numbers.Real):
        raise TypeError(f"optimal_schedule: the budget must be a number, not {budget!r}")
    sizes = {stage.boundary for stage in stages} | set(outputs(stages))
    # The time of backward does not count: every schedule spends it once.
    if len({(stage.forward, stage.tape) for stage in stages}) == len(sizes) == 1:
        boundary = stages[0].boundary
        beside = 4 * boundary + stages[0].tape  # the running input, the output, their gradients, the tape
        _check_budget(budget, beside + (boundary if len(stages) > 1 else 0))
        slots = sum(beside + kept * boundary <= budget for kept in range(1, len(stages) + 1))
        return binomial(len(stages), max(slots, 1)).on(stages)
    least, thriftiest = least_budget(stages)
    _check_budget(budget, least)
    return fastest_within(stages, budget, thriftiest)


def fit(model: Any, sample: torch.Tensor, budget_bytes: float) -> Schedule:
    """Measures each layer of `model` on `sample`, and returns the schedule that is fastest within `budget_bytes`.

    model: an nn.Sequential or a list of layers, each of one tensor to one tensor; it is left as it was. The
    budget covers what the chain itself holds: inputs, tape, and the gradients of inputs. Parameters and their
    gradients come on top. Raises `ValueError`, naming the least feasible budget, if none fits.
    """
    return optimal_schedule(measure_chain(model, sample), budget_bytes)


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
