"""A significand has more bits than the format: the last `drop` of them must go, and what is kept may go up by 1. To
nearest; and half-way to the even one of the two neighbours, so that ties go up as often as down.

    significand 1011 01, drop 2:   1011 and a rest of 1 of 4     → 1011
                1011 10            1011 and a rest of 2 of 4     → 1100   (half-way: to even)
                1010 10            1010 and a rest of 2 of 4     → 1010   (half-way: to even)

The other roundings of IEEE 754: "nearest-away" (ties away from zero), "toward-zero", "up" (to +∞), "down" (to
-∞). What is rounded is the magnitude, and `sign` says of what: 0 of a positive number, 1 of a negative one.
"stochastic": away from zero as often as the rest says, for a random `draw` in [0, 1): if rest / 2^drop > draw.
"""

import itertools
import random
from fractions import Fraction
from typing import Any, NamedTuple

from precision import one_number
from tests.exercises import number_kit
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    "Cut the significand into what is kept and the rest; 2^drop is a whole unit of what is kept. `drop` may be 0, and "
    "may be 1,000: only whole numbers and fractions compare exactly then.",
    "Decide for each rounding whether 1 is added: away from zero, or not. `ValueError` for an unknown name.",
    "nearest-even: the rest is more than half; or it is exactly half and what is kept is odd.",
    "Return kept, or kept + 1.",
]
HINTS = [
    "kept = significand >> drop, rest = significand % 2**drop. Compare 2 * rest with 2**drop: no fractions needed.",
    "up: only positive numbers (sign 0) with a rest go away from zero; down: only negative ones.",
    "Fraction(rest, 2**drop) > draw compares exactly.",
]
AFTER = (
    "The package compares twice the rest with a whole unit, and not the rest with half a unit. For `drop` 0 half a "
    "unit is no whole number: `one // 2` would be 0, and an exact number would look like a tie. Only the magnitude is "
    'rounded, so "up" adds 1 to positive numbers and "down" to negative ones. For "stochastic" it compares fractions, '
    "since a rest of 60 bits does not fit into a float. Read next: section 4 of notebooks/03_fp16_bits.ipynb."
)
TIE = "(2 * rest == one and kept % 2 == 1)"
WRONG = [
    wrong("half-up", "1010 10 is half-way between 1010 and 1011, and went up to the odd one: ties go to the even one.",
          (TIE, "2 * rest == one")),
    wrong("half-down", "1011 10 is half-way between 1011 and 1100, and stayed at the odd one: ties go to the even "
          "one.", (f" or {TIE}", "")),
    wrong("ties-to-odd", "Ties went to the odd neighbour: 1011 10 stayed, 1010 10 went up. Even is what ends in 0.",
          ("kept % 2 == 1)", "kept % 2 == 0)")),
    wrong("truncates", "A significand of 1011 11: the rest is 3 of 4, above half, and was cut off: nearest is up.",
          (f"away = 2 * rest > one or {TIE}", "away = False")),
    wrong("any-rest-goes-up", "Nearest is down.", (f"2 * rest > one or {TIE}", "rest > 0")),
    wrong("away-like-even", '"nearest-away" sends every tie away from zero, whatever is kept.',
          ("away = 2 * rest >= one", f"away = 2 * rest > one or {TIE}")),
    wrong("stochastic-backwards", 'A rest of 1/4 goes up with "stochastic" for a draw of 0.1 and stays for 0.5.',
          ("> draw", "< draw")),
    wrong("divides-in-floats", "With drop = 60 a rest a hair above half, or as large as the draw, was taken for "
          "another: a float has 53 bits. Compare whole numbers, 2 * rest with 2**drop, and use Fraction for the draw.",
          ("2 * rest > one or (2 * rest == one and", "rest / one > 0.5 or (rest / one == 0.5 and")),
]  # fmt: skip


class Case(NamedTuple):
    drop: int
    sign: int
    rounding: str
    seed: int


def draw(random: random.Random) -> list[Case]:
    drops = [*range(61), random.randint(61, 1000), random.randint(1001, 3000)]
    plain = [Case(3, sign, rounding, 1) for rounding in one_number.ROUNDINGS for sign in (0, 1)]
    return plain + [Case(*row) for row in deal(random, itertools.product(drops, (0, 1), one_number.ROUNDINGS))]


def result(case: Case) -> dict[str, Any]:
    """What significands become: of each rest that is a tie, beside one, none or any, with an odd and an even one.

    Only "stochastic" looks at the draw: one that is equal to the rest, one a hair below, and any.
    """
    numbers, one = random.Random(case.seed), 2**case.drop
    rests = {"no rest": 0, "a rest of 1": 1, "a bit less than half": one // 2 - 1, "half": one // 2}
    rests |= {"a bit more than half": one // 2 + 1, "all but 1": one - 1, "any rest": numbers.randrange(one)}
    unknown = value_or_error(one_number.round_off, one, case.drop, case.sign, "nearest")
    results = {"under a rounding that does not exist": unknown}
    for name, rest in [(name, rest) for name, rest in rests.items() if 0 <= rest < one]:
        kept = 2 * numbers.randrange(2 ** numbers.choice((0, 10, 52, 200)))
        exact = Fraction(rest, one)
        below, some = max(exact - Fraction(1, 2**3100), Fraction(0)), numbers.random()
        for whole in (kept, kept + 1):
            for draw, words in ((exact, "as large as the rest"), (below, "a hair smaller"), (some, str(some))):
                rounded = one_number.round_off(whole * one + rest, case.drop, case.sign, case.rounding, draw)
                results[f"{whole} kept, {name}, a draw {words}"] = number_kit.typed(rounded, int)
    return results
