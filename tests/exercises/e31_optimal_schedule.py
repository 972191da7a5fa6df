"""What is the least memory in which a chain can go backward, in whatever time? Let x_i be kept and stages i …
j-1 have still to go backward; least[i, j] is what that needs beside x_i. A dynamic programme over ever longer
stretches:

    least[i, i+1] = what stage i's backward needs
    least[i, j]   = min over k of  max( boundary of k + least[k, j],      x_k is kept too, while k … j-1 go backward
                                        least[i, k] )                     then x_k is gone, and i … k-1 go backward

Their maximum, not their sum: one comes after the other. The whole chain needs that of [0, n], and its own input.

backward_sizes(stages) gives what each stage's backward needs. unfold(stages, split) makes a Schedule of the choices:
split(i, end, kept) says which k was best.
"""

import dataclasses
from random import Random
from typing import Any, NamedTuple

from minizero.schedules import optimal
from minizero.schedules.chain import Stage
from tests.exercises.kit import guard_unfold, wrong

PLAN = [
    "Tables least and choice, (n, n+1). On the diagonal [i, i+1]: backward_sizes.",
    "For each length from 2 on, for each i: j = i + length; over all k from i+1 to j-1 the larger of the two; "
    "the least of these, and the k that gives it.",
    "The total: the boundary of stage 0 and least[0, n]. (Where that is no whole number, a hair more, 1e-12 of "
    "it, so that rounding does not matter.)",
    "Return the total and unfold with the choices.",
]
HINTS = [
    "boundary[i + 1 : j] + least[i + 1 : j, j] is the first of the two, for all k at once; least[i, i + 1 : j] "
    "the second.",
    "numpy's argmin gives the place of the least; k is i + 1 more.",
    "unfold(stages, lambda i, end, kept: int(choice[i, end]))",
]
AFTER = (
    "The package tries all k of a stretch in one line of NumPy. The time is still cubic in n, but Python takes only "
    "about n²/2 steps of it. `choice` remembers each best k, so `unfold` reads the schedule off and searches nothing. "
    "Sums of numbers that are not whole are rounded: without the hair more, a schedule could miss its own budget. "
    "This is the least memory, in whatever time. Read next: `fastest_within` in minizero/schedules/optimal.py."
)
LARGEST = "np.maximum(boundary[i + 1 : j] + least[i + 1 : j, j], least[i, i + 1 : j])"
WRONG = [
    wrong("adds-instead", "The two parts come one after the other. The larger counts, not the sum.",
          (LARGEST, "boundary[i + 1 : j] + least[i + 1 : j, j] + least[i, i + 1 : j]")),
    wrong("forgets-the-kept-input", "While stages k … j-1 go backward, x_k is kept and counts.",
          (LARGEST, "np.maximum(least[i + 1 : j, j], least[i, i + 1 : j])")),
    wrong("keeps-it-twice", "When stages i … k-1 go backward, x_k is gone already.",
          (LARGEST, "boundary[i + 1 : j] + np.maximum(least[i + 1 : j, j], least[i, i + 1 : j])")),
    wrong("forgets-the-chain's-input", "The chain's own input is kept, too.",
          ("total = float(boundary[0] + least[0, n])", "total = float(least[0, n])")),
    wrong("chooses-the-worst", "The total is right, and its schedule needs more: remember the k that gave the least.",
          ("choice[i, j] = i + 1 + largest.argmin()", "choice[i, j] = i + 1 + largest.argmax()")),
    wrong("not-the-least", "Look at every k between i and j, and take the best.",
          ("choice[i, j] = i + 1 + largest.argmin()\n            least[i, j] = largest.min()",
           "choice[i, j] = (i + j) // 2\n            least[i, j] = largest[length // 2 - 1]")),
]  # fmt: skip


class Case(NamedTuple):
    boundaries: list[float]
    tapes: list[float]
    outputs: list[float | None]
    container: type


def draw(random: Random) -> list[Case]:
    """Chains of 1 to 14 stages, and long ones, of whole sizes and others.

    outputs: None stands for the next stage's boundary. Boundaries that fall, rise or are equal have their best k at
    the one end of a stretch or at the other, and those of any size in between.
    """
    cases = [Case([1, 1, 1], [2, 2, 2], [None] * 3, list), Case([3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [None] * 5, list)]
    for n in [*range(1, 15)] * 8 + [random.randint(20, 60) for _ in range(8)] + [random.randint(70, 90)]:
        divisor = random.choice((1, 1, 10, 7, 1e-9))  # the last: sizes as of bytes on a GPU
        boundaries, tapes, outputs = ([random.randint(0, 20) / divisor for _ in range(n)] for _ in range(3))
        order = random.choice(("as they come", "equal", "rising", "falling")) if n > 14 else "as they come"
        if order == "equal":
            boundaries = [boundaries[0] + 1] * n
        elif order != "as they come":
            boundaries.sort(reverse=order == "falling")
        if n > 14:
            tapes = [random.choice((size, 0)) for size in tapes] if random.random() < 0.5 else [0] * n
        sizes = [random.choice((None, size)) if order == "as they come" else None for size in outputs]
        cases.append(Case(boundaries, tapes, sizes, random.choice((list, tuple))))
    return cases


def result(case: Case) -> dict[str, Any]:
    """Of the schedules that need so little any is right: two choices may be equally good."""
    *sizes, container = case
    stages = container(Stage(1, 2, boundary=b, tape=t, output=o) for b, t, o in zip(*sizes))
    given = list(stages)
    guard_unfold(optimal.least_budget)
    optimal.least_budget(
        [dataclasses.replace(stage, tape=1 + 2 * stage.tape) for stage in stages]
    )  # another chain before
    optimal.least_budget(stages)[1].steps.clear()
    total, schedule = optimal.least_budget(stages)
    actions = [step.action for step in schedule.steps]
    rounding = 0 if all(float(size).is_integer() for size in [*case.boundaries, *case.tapes]) else 1e-11
    # Tenths may add up to a whole number, which gets no hair more: then the sum for the peak may be rounded up.
    hair = 1e-13 if float(total).is_integer() else 0
    return {
        "the total": float(total),
        "the schedule's peak is within the total": bool(schedule.peak <= total * (1 + hair)),
        "the total is the schedule's peak, or a hair more": bool(total <= schedule.peak * (1 + rounding)),
        "stages that go backward": actions.count("backward"),
        "the schedule has the stages that were given": list(schedule.stages) == given == list(stages),
    }


def tolerance(_: Case) -> float:
    return 1e-9
