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

import math
from random import Random
from typing import Any, NamedTuple

import torch

from precision import formats
from precision.one_number import decode_one
from tests.exercises import number_kit
from tests.exercises.draws import deal
from tests.exercises.kit import fail, wrong
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
    wrong("the-whole-step", ("return step / 2", "return step")),
    wrong("proportional", (STEP, "abs(weight) * fmt.epsilon")),
    wrong("frexp-s-exponent", (STEP, STEP.replace("exponent -", "exponent + 1 -")), says="the-whole-step"),
    wrong("one-side-only", (IF, "False")),
    wrong("both-sides-of-a-power", (IF, IF.replace("towards_zero and ", ""))),
    wrong("the-other-side", (SIDE, "up == (weight >= 0)")),
    wrong("up-is-up", (SIDE, "not up"), says="negative-weights"),
    wrong("every-weight-downwards", (IF, IF.replace(" and fraction == 0.5", "")), says="twice-as-close-everywhere"),
    wrong("subnormals-shrink", (EXPONENT, "exponent - 1 if weight else fmt.min_exponent"),
          (" and exponent > fmt.min_exponent", "")),
    wrong("halves-at-the-smallest-normal", (" and exponent > fmt.min_exponent", "")),
    wrong("zero-is-one-half", (EXPONENT, "max(exponent - 1, fmt.min_exponent)"), says="zero"),
    wrong("zero-loses-nothing", ("return step / 2, is_even", "return (step / 2, is_even) if weight else (0.0, False)"),
          says="zero"),
    wrong("ties-are-lost", (EVEN, "True")),
    wrong("ties-survive", (EVEN, "False")),
    wrong("ties-to-odd", (EVEN, EVEN.replace("== 0", "== 1"))),
    wrong("ten-bits", (STEP, STEP.replace("fmt.mantissa_bits", "10")), says="fp16-only"),
]  # fmt: skip

FP16 = number_kit.bare(formats.FP16)


def check() -> None:
    one = lost.border(1.5, True, FP16)
    if not (isinstance(one, tuple) and len(one) == 2):
        fail("not-a-pair", f"Expected a pair, the border and whether a tie is lost; got {one!r}.")
    mistakes = {
        "the-whole-step": (2.0**-10, "it is half-way to the neighbour, not at it"),
        "proportional": (1.5 * 2.0**-11, "from 1 to 2 all neighbours are 2^-10 apart, near 1 and near 2"),
    }
    expect(1.5, True, mistakes)
    ties()
    expect(
        1.5, False, {"twice-as-close-everywhere": (2.0**-12, "1.5 is no power of two: its neighbours are 2^-10 away")}
    )
    other_side = "1 - 2^-11 is below 1, and 1 + 2^-10 above: a power of two has a nearer neighbour on the side of zero"
    if lost.border(1.0, True, FP16)[0] == 2.0**-12 and lost.border(1.0, False, FP16)[0] == 2.0**-11:
        fail("the-other-side", f"The sides of 1.0 are exchanged: {other_side}.")
    expect(1.0, False, {"one-side-only": (2.0**-11, other_side)})
    expect(1.0, True, {"both-sides-of-a-power": (2.0**-12, other_side)})
    turned = "adding to a negative weight moves it towards zero: up and down change places"
    expect(-1.0, True, {"negative-weights": (2.0**-11, turned)})
    expect(-1.0, False, {"negative-weights": (2.0**-12, turned)})
    expect(2048.0, True, {})
    even = "below the smallest normal number, 2^-14, the numbers of FP16 are 2^-24 apart, all of them"
    expect(2.0**-16, True, {"subnormals-shrink": (2.0**-27, even)})
    expect(2.0**-14, False, {"halves-at-the-smallest-normal": (2.0**-26, even)})
    for up in (True, False):
        if lost.border(0.0, up, FP16) != (2.0**-25, True):
            fail(
                "zero",
                f"From 0 {'up' if up else 'down'} you say {lost.border(0.0, up, FP16)}. 0 has the neighbours ±2^-24: "
                "half of that, 2^-25, is the border, and a tie goes back to 0, which is even.",
            )
    for fmt, name, step in ((formats.BF16, "BF16", 2.0**-7), (formats.FP8_E4M3, "E4M3", 0.125)):
        got = lost.border(1.5, True, number_kit.bare(fmt))[0]
        if got != step / 2:
            fail(
                "fp16-only",
                f"In {name} the neighbour above 1.5 is {step} away, and you say that the border is {got}: take the "
                "format's own number of bits.",
            )
    for weight in (0.1, 3.14159, -0.02, 6e-5, 1e-6, -7e-7, 300.0):
        for up in (True, False):
            moves(formats.FP16.quantize(torch.tensor(weight, dtype=torch.float64)).item(), up)


def expect(weight: float, up: bool, mistakes: dict[str, tuple[float, str]]) -> None:
    """The border in FP16, by trial."""
    got, want = lost.border(weight, up, FP16)[0], by_trial(weight, up)
    if got == want:
        return
    what = (
        f"{weight:g} {'+' if up else '-'} an update, in FP16: you say the border is {power(got)}, it is {power(want)}"
    )
    for name, (value, words) in mistakes.items():
        if got == value:
            fail(name, f"{what}: {words}.")
    fail("values", f"{what}.")


def ties() -> None:
    """1.5 ends in 0, and its neighbour in 1."""
    found = lost.border(1.5, True, FP16)[1], lost.border(1.5 + 2.0**-10, True, FP16)[1]
    words = (
        "An update by half a step is a tie. From 1.5, which ends in 0, it is lost; from the next number, 1.5 + 2^-10, "
        f"which ends in 1, it is not. You say {'lost' if found[0] else 'not lost'} and "
        f"{'lost' if found[1] else 'not lost'}."
    )
    if found != (True, False):
        name = {(True, True): "ties-are-lost", (False, False): "ties-survive"}.get((bool(found[0]), bool(found[1])))
        fail(name or "ties-to-odd", words)


def power(number: float) -> str:
    """2^-25, if it is such a number."""
    fraction, exponent = math.frexp(number)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{number:g}"


def by_trial(weight: float, up: bool) -> float:
    """Half of the distance to the next number of FP16 on that side."""
    toward = torch.tensor(math.inf if up else -math.inf, dtype=torch.float16)
    return abs(torch.nextafter(torch.tensor(weight, dtype=torch.float16), toward).item() - weight) / 2


def moves(weight: float, up: bool) -> None:
    """A little below the border the weight must stay, a little above it move."""
    size, tie_is_lost = lost.border(weight, up, FP16)
    for factor, stays in ((0.999, True), (1.001, False), (1.0, tie_is_lost)):
        after = weight + (size if up else -size) * factor
        rounded = formats.FP16.quantize(torch.tensor(after, dtype=torch.float64)).item()
        if (rounded == weight) != stays:
            fail(
                "values",
                f"{weight:g} {'+' if up else '-'} {size * factor:g} is rounded to {rounded:g} in FP16; by your border, "
                f"{power(size)}, this update would be {'lost' if stays else 'kept'}.",
            )


class Case(NamedTuple):
    format: Any
    seed: int


def draw(random: Random) -> list[Case]:
    formats: list[Any] = [name for name, fmt in number_kit.ALL.items() if fmt.subnormals and fmt.mantissa_bits]
    formats += number_kit.drawn_formats(random, 8, subnormals=True)
    return [Case(*row) for row in deal(random, [(fmt,) for fmt in formats])]


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
