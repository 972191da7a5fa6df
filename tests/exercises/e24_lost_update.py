"""FP16 has 11 significant bits. A small update vanishes when the sum is rounded: the weight stays as it was, however
many such updates come. How small is too small? There is a border. Below it the sum is rounded back to the weight, above
it the weight moves. An update of just this size is a tie: it lies half-way between the weight and its neighbour.

    FP16      … 1 - 2^-11    1    1 + 2^-10    1 + 2·2^-10 …
    bits      … 1111111111   0…0  0000000001   0000000010        a tie goes to the one that ends in 0

    fmt.mantissa_bits    10 in FP16: behind the first 1 of a number there are so many bits
    fmt.min_exponent     -14 in FP16: the smallest number with a first 1 in front of the point is 2^-14; below it
                         are subnormal numbers, which every format has that is asked for here

Adam moves a weight by about the learning rate in each step. So the border of a typical weight is also the smallest
learning rate that trains FP16 weights without a copy in FP32.
"""

from random import Random
from typing import Any, NamedTuple

from precision.one_number import decode_one
from tests.exercises import number_kit
from tests.exercises.draws import deal
from tests.exercises.kit import wrong
from tests.exercises.tasks import lost

PLAN = [
    "The border is half of the distance from the weight to its neighbour on the side to which the update goes.",
    "That distance is the same for all numbers between two powers of two, not proportional to the weight.",
    "A power of two has numbers of two kinds beside it: look at both sides. For a negative weight up and down change "
    "places.",
    "Below 2^min_exponent, and around zero, the distance no longer shrinks.",
    "A tie goes to the neighbour whose last bit is 0: the update is lost if that is the weight.",
]
HINTS = [
    "Draw the numbers from 0.5 to 2 of a format with 2 bits of mantissa, with their last bits. Then draw those from 0 "
    "to 2^min_exponent, and just above. Where does the distance change, and which of the two holds at that place?",
    "Find three things: the exponent of the weight (not below min_exponent), the step there, 2^(exponent - "
    "mantissa_bits), and how many steps the weight is. Whether that number is even decides a tie. Half a step is the "
    "border, but for a power of two on the side of zero.",
    "math.frexp(x) gives (fraction, e) with x = fraction · 2^e and 0.5 <= fraction < 1, so the exponent is e - 1; of 0 "
    "it gives (0.0, 0). A power of two has the fraction 0.5. Towards zero is up for a negative weight.",
]
AFTER = (
    "The package has no such formula. train_classifier in minizero/mixed_precision/experiments.py adds, rounds and "
    "counts: an update is lost if the weight is the same afterwards. That counts any optimizer and any rounding; a "
    "formula predicts, before there is a run. Masters in FP32 move the border down by 2^13, since FP32 has 13 bits "
    "more: they do not abolish it. Stochastic rounding does, on average: an update of a tenth of a step moves the "
    "weight in a tenth of all cases. Read next: precision/master.py, section 1 of "
    "notebooks/04b_masters_sums_bytes.ipynb; "
    'Micikevicius et al., 2018, "Mixed Precision Training", section 3.1.'
)
EXPONENT = "max(exponent - 1, fmt.min_exponent) if weight else fmt.min_exponent"
STEP = "math.ldexp(1.0, exponent - fmt.mantissa_bits)"
EVEN = "abs(weight) / step % 2 == 0"
SIDE = "up == (weight < 0)"
IF = "towards_zero and fraction == 0.5 and exponent > fmt.min_exponent"
WRONG = [
    wrong("the-whole-step", "it is half-way to the neighbour, not at it", ("return step / 2", "return step")),
    wrong("proportional", "from 1 to 2 all neighbours are 2^-10 apart, near 1 and near 2",
          (STEP, "abs(weight) * fmt.epsilon")),
    wrong("one-side-only", "1 - 2^-11 is below 1, and 1 + 2^-10 above: a power of two has a nearer neighbour on the "
          "side of zero", (IF, "False")),
    wrong("both-sides-of-a-power", "1 - 2^-11 is below 1, and 1 + 2^-10 above: a power of two has a nearer neighbour "
          "on the side of zero", (IF, IF.replace("towards_zero and ", ""))),
    wrong("the-other-side", "The sides of 1.0 are exchanged:", (SIDE, "up == (weight >= 0)")),
    wrong("subnormals-shrink", "below the smallest normal number, 2^-14, the numbers of FP16 are 2^-24 apart, all of "
          "them", (EXPONENT, "exponent - 1 if weight else fmt.min_exponent"), (" and exponent > fmt.min_exponent", "")),
    wrong("ties-are-lost", "A tie is not always lost: the even neighbour gets it.", (EVEN, "True")),
    wrong("ties-to-odd", "An update by half a step is a tie. From 1.5, which ends in 0, it is lost; from the next "
          "number, 1.5 + 2^-10, which ends in 1, it is not.", (EVEN, EVEN.replace("== 0", "== 1"))),
]  # fmt: skip


class Case(NamedTuple):
    format: Any
    seed: int


def draw(random: Random) -> list[Case]:
    formats: list[Any] = [name for name, fmt in number_kit.ALL.items() if fmt.subnormals and fmt.mantissa_bits]
    formats += number_kit.drawn_formats(random, 8, subnormals=True)
    return [Case("FP16", 1)] + [Case(*row) for row in deal(random, [(fmt,) for fmt in formats])]


def result(case: Case) -> dict[str, tuple[float, bool]]:
    """Around every power of two of the format, and anywhere."""
    random, fmt = Random(case.seed), number_kit.format_of(case.format)
    codes = [0, 1, 2, 3, 2**fmt.mantissa_bits - 1, 2**fmt.mantissa_bits, 2**fmt.mantissa_bits + 1, fmt.max_bits - 1]
    powers = random.sample(
        range(1, fmt.max_bits >> fmt.mantissa_bits), min(20, (fmt.max_bits >> fmt.mantissa_bits) - 1)
    )
    codes += [(field << fmt.mantissa_bits) + more for field in powers for more in (-1, 0, 1)]
    codes += [random.randrange(fmt.max_bits) for _ in range(40)]
    found = {}
    for code in codes:
        if code < fmt.max_bits:
            for weight in (decode_one(code, fmt), -decode_one(code, fmt)):
                for up in (True, False):
                    size, is_lost = lost.border(weight, up, number_kit.bare(fmt))
                    found[f"{weight!r} {'up' if up else 'down'}"] = float(size), bool(is_lost)
    return found
