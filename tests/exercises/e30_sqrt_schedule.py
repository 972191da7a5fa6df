"""A chain of n stages goes backward from its end, but keeps only some of the stages' inputs. Keep every k-th:
then the last segment of k stages is run again from its kept input, this time keeping all inside it, goes
backward, and so on with the segment before. A stage's tape is built by one more forward, just before its backward.
With k = √n about 2√n inputs are kept at once, and nearly every stage runs three times.

A schedule is the answer to one question, which unfold(stages, split) asks again and again: the input of stage i
is the last that is kept, and stages i … end-1 have still to go backward; the input of which stage should be
kept next?

    split(i, end, kept)      i < answer ≤ end-1
"""

import math
from random import Random
from typing import Any, NamedTuple

from minizero.schedules import rules
from minizero.schedules.chain import Schedule, Step, outputs
from tests.exercises.kit import fail, guard_unfold, wrong

PLAN = [
    'stages = _equal_stages("every_k", n), and _at_least_one("every_k", "k", k) refuse what is wrong.',
    "split: if a further multiple of k lies before `end`, the way leads over it: keep that. Otherwise i lies in "
    "the segment at work: keep the very next input.",
    "Return unfold(stages, split).",
]
HINTS = [
    "The next multiple of k after i is (i // k + 1) * k.",
    "n = 9, k = 3: first the inputs of 0, 3, 6 are kept; then, in the last segment, that of 7; 8 is used "
    "straight away.",
]
AFTER = (
    "In the package a rule is only the answer to one question, and `unfold` makes all steps of it. So each rule is a "
    "few lines, and no rule can forget to drop an input. Multiples of k are counted from stage 0, not from i, so one "
    "line decides inside a segment and outside. An input at the end of the stretch is used straight away: `unfold` "
    "sees that and does not keep it. Read next: `binomial` in minizero/schedules/rules.py."
)
NEXT = "(i // k + 1) * k"
RETURN = "return next_segment if next_segment < end else i + 1"
WRONG = [
    wrong("keeps-everything", (RETURN, "return i + 1")),
    wrong("keeps-nothing-inside", (RETURN, "return next_segment if next_segment < end else end - 1")),
    wrong("halves", (RETURN, "return (i + end) // 2")),
    wrong("segments-of-k-plus-1", (NEXT, "(i // (k + 1) + 1) * (k + 1)")),
    wrong("k-segments", (NEXT, "(i // -(-n // k) + 1) * -(-n // k)")),
    wrong("one-too-far", ("next_segment < end else", "next_segment <= end else"), says="out-of-range"),
    wrong("only-once", (NEXT, "k"), says="out-of-range"),
    wrong("other-costs", ('stages = _equal_stages("every_k", n)',
                          'stages = [type(s)(1, 1, 1, 0) for s in _equal_stages("every_k", n)]'), says="random"),
]  # fmt: skip


def want(n: int, k: int) -> list[Step]:
    """Written down directly: forward over the segments, then each of them."""
    steps, starts = [], list(range(0, n, k))
    for start in starts:
        if start == n - 1 > 0:  # used straight away
            steps.append(Step("backward", starts.pop()))
            break
        steps.append(Step("keep", start))
        if start + k < n:
            steps += [Step("forward", i) for i in range(start, start + k)]
    for start in reversed(starts):
        inside = list(range(start, min(start + k, n)))
        for i in inside[:-1]:
            steps.append(Step("forward", i))
            if i + 1 != inside[-1]:
                steps.append(Step("keep", i + 1))
        for i in reversed(inside):
            steps.append(Step("backward", i))
            if i != inside[-1] or len(inside) == 1:
                steps.append(Step("drop", i))
    return steps


def check() -> None:
    guard_unfold(rules.every_k)
    got = rules.every_k(18, 3)
    if not isinstance(got, Schedule):
        fail("not-a-schedule", f"Expected what unfold returns, a Schedule, not {type(got).__name__}.")
    kept = [step.stage for step in got.steps if step.action == "keep"]
    first = kept[: next((j for j in range(1, len(kept)) if kept[j] <= kept[j - 1]), len(kept))]
    said = f"With n = 18 and k = 3 the first sweep keeps the inputs of stages {', '.join(map(str, first))}; it should "
    said += "keep 0, 3, 6, 9, 12, 15, and inside the last segment 16"
    if got.slots == 17:
        fail("keeps-everything", f"{said}. All of them: that is no saving.")
    if first == [0, 3, 6, 9, 12, 15]:
        fail("keeps-nothing-inside", f"{said}: without it, each stage is run again from the start of its segment.")
    if first[1] == 9:
        fail("halves", f"{said}. That was halving.")
    if first[1] == 4:
        fail("segments-of-k-plus-1", f"{said}. These are segments of k + 1 stages.")
    if first[1] == 6:
        fail("k-segments", f"{said}. These are k segments, not segments of k stages.")
    for n, k in ((9, 3), (16, 4), (7, 3), (5, 1), (6, 6), (1, 1), (10, 4)):
        if rules.every_k(n, k).steps != want(n, k):
            fail("values", f"The steps for n = {n}, k = {k} are not those: {_show(rules.every_k(n, k).steps)}.")
    many = rules.sqrt_n(64)
    if many.slots > 2 * math.sqrt(64) or many.advances > 2 * 64:
        fail("values", f"√n for 64 stages keeps {many.slots} inputs and runs {many.advances} stages again.")
    try:
        rules.every_k(4, 0)
    except ValueError:
        return
    fail("no-error", "k = 0 must be a ValueError.")


def _show(steps) -> str:
    return ", ".join(f"{step.action} {step.stage}" for step in steps[:12]) + (" …" if len(steps) > 12 else "")


class Case(NamedTuple):
    n: Any
    k: Any


def draw(random: Random) -> list[Case]:
    """All short chains, and some long ones. 0, -1, and what is no whole number are errors."""
    cases = [Case(n, k) for n in range(1, 13) for k in range(-1, n + 2)] + [Case(0, 1), Case(4, 2.0), Case(4.0, 2)]
    long = [random.randint(13, 60) for _ in range(20)] + [random.randint(200, 300) for _ in range(4)]
    cases += [Case(n, random.randint(1, random.choice((20, n + 1)))) for n in long]
    return random.sample(cases, len(cases))


def result(case: Case) -> Any:
    """Of the second of two schedules, whose first was emptied in between."""
    try:
        rules.every_k(int(case.n), int(case.k)).steps.clear()
        rules.every_k(case.n, case.k).steps.clear()
        schedule = rules.every_k(case.n, case.k)
    except (ValueError, TypeError) as error:
        return type(error).__name__
    return {
        "the steps, asked for again after those of the first schedule were deleted": [
            f"{step.action} {step.stage}" for step in schedule.steps
        ],
        "stages": len(schedule.stages),
        "what a stage costs": sorted({(s.forward, s.backward, s.boundary, s.tape) for s in schedule.stages}),
        "the size of the last output": outputs(schedule.stages)[-1],
    }
