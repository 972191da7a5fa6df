"""A chain of n stages goes backward from its end, but keeps only some of the stages' inputs. Keep every k-th:
then the last segment of k stages is run again from its kept input, this time keeping all inside it, goes
backward, and so on with the segment before. A stage's tape is built by one more forward, just before its backward.
With k = √n about 2√n inputs are kept at once, and nearly every stage runs three times.

A schedule is the answer to one question, which unfold(stages, split) asks again and again: the input of stage i
is the last that is kept, and stages i … end-1 have still to go backward; the input of which stage should be
kept next?

    split(i, end, kept)      i < answer ≤ end-1
"""

from random import Random
from typing import Any, NamedTuple

from minizero.schedules import rules
from minizero.schedules.chain import outputs
from tests.exercises.kit import guard_unfold, wrong

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
    wrong("keeps-everything", "All inputs are kept: that is no saving.", (RETURN, "return i + 1")),
    wrong("keeps-nothing-inside", "Only the first input is kept: each stage is run again from there.",
          (RETURN, "return next_segment if next_segment < end else end - 1")),
    wrong("halves", "That was halving. Segments have k stages.", (RETURN, "return (i + end) // 2")),
    wrong("segments-of-k-plus-1", "These are segments of k + 1 stages.", (NEXT, "(i // (k + 1) + 1) * (k + 1)")),
    wrong("k-segments", "These are k segments, not segments of k stages.",
          (NEXT, "(i // -(-n // k) + 1) * -(-n // k)")),
]  # fmt: skip


class Case(NamedTuple):
    n: Any
    k: Any


def draw(random: Random) -> list[Case]:
    """All short chains, and some long ones. 0, -1, and what is no whole number are errors."""
    cases = [Case(n, k) for n in range(1, 13) for k in range(-1, n + 2)] + [Case(0, 1), Case(4, 2.0), Case(4.0, 2)]
    long = [random.randint(13, 60) for _ in range(20)] + [random.randint(200, 300) for _ in range(4)]
    cases += [Case(n, random.randint(1, random.choice((20, n + 1)))) for n in long]
    return [Case(8, 3), Case(9, 2), *random.sample(cases, len(cases))]


def result(case: Case) -> Any:
    """Of the second of two schedules, whose first was emptied in between."""
    guard_unfold(rules.every_k)
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
