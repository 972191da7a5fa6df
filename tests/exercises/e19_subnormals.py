"""A number becomes one of FP16, or of another format: the nearest one. Between two powers of two the format's numbers
are equally far apart, a *step*. So most of the work is to find the step, and to say what happens where the numbers end,
above and below.

    FP16      0   2^-24   2·2^-24   …   2^-14   …   1   1 + 2^-10   …   65472   65504   infinity
    step        2^-24, down to 0        2^-24       2^-10                   32

Below the smallest normal number 2^min_exponent there is no smaller exponent, so the step stays the same. The numbers
there are *subnormal*. Without them 2^-15 would be 0 in FP16. Some formats do not have them.

    fmt.mantissa_bits, fmt.min_exponent       10 and -14 in FP16
    fmt.max, fmt.smallest_normal              65504.0 and 2^-14
    fmt.subnormals                            whether the format has subnormal numbers
"""

import math
import sys
from random import Random
from typing import Any, NamedTuple

from tests.exercises import number_kit
from tests.exercises.kit import wrong
from tests.exercises.tasks import nearest as task

PLAN = [
    "The result is a whole number of steps, the nearest; of two that are equally near, the even one. Round once.",
    "The step is that of the octave from 2^e to 2^(e+1) in which x lies, 2^(e - mantissa_bits); below the normal "
    "numbers, that of the smallest of them.",
    "Whether x is too large or too small for the format is decided by what rounding made of it, not by x.",
    "What is larger than fmt.max is infinity then. What is smaller than the smallest normal number is 0, if the format "
    "has no subnormal numbers: also if the smallest normal number would be nearer.",
    "The sign stays, that of a zero too. Zeros, infinities and NaN are not rounded.",
]
HINTS = [
    "Take 3e-6, 65519, 65520 and 2^-25 by hand first: in which octave, how long is a step there, how many steps is it, "
    "and what is next to it on both sides?",
    "Divide x by its step, round to a whole number, multiply again: all steps are powers of two, so only the rounding "
    "loses anything. The exponent of x may be below fmt.min_exponent: then the step is not that of x.",
    "math.frexp(x) gives (fraction, e) with 0.5 <= |fraction| < 1, so e - 1 is the exponent. round(y) of a float takes "
    "the even one in a tie. math.copysign(y, x) is y with the sign of x.",
]
AFTER = (
    "The package does the same with whole numbers and bits: `align` in precision/one_number.py says how many of the 53 "
    "bits of a float64 have no place, `round_off` drops them in any of six ways, and `pack` makes the code. So it "
    "knows what was lost, which the flags inexact and underflow report. It has no case for the step up to the smallest "
    "normal number or to infinity: adding 1 to the mantissa carries into the exponent, because neighbours have "
    "neighbouring codes. precision/fast.py takes these steps for whole arrays. Read next: exercise 20, section 5 of "
    "notebooks/03_fp16_bits.ipynb, and IEEE 754-2019, sections 3.3 and 7.5."
)
EXPONENT = "max(math.frexp(x)[1] - 1, fmt.min_exponent)"
ROUND = "round(x / step) * step"
LARGE = "abs(rounded) > fmt.max"
SMALL = "not fmt.subnormals and abs(rounded) < fmt.smallest_normal"
WRONG = [
    wrong("no-subnormals", "Below the smallest normal number the step stays as it is: no number there is finer.",
          (EXPONENT, "math.frexp(x)[1] - 1")),
    wrong("starts-an-octave-early", "The step stays the same below the smallest normal number, and not already below "
          "twice of it.", (EXPONENT, EXPONENT.replace("fmt.min_exponent", "fmt.min_exponent + 1"))),
    wrong("flushes", "It is subnormal, and the format has subnormal numbers.", ("not fmt.subnormals and ", "")),
    wrong("flushes-before-rounding", "It is rounded first: what is rounded to the smallest normal number is not "
          "flushed.", (SMALL, SMALL.replace("rounded", "x"))),
    wrong("rounds-twice", "It was rounded twice. Rounded once, with the step that it has in the end, it is another "
          "number.",
          (ROUND, "round(round(x / (fine := math.ldexp(1.0, math.frexp(x)[1] - 1 - fmt.mantissa_bits))) * fine / step) "
           "* step")),
    wrong("overflow-before-rounding", "It is rounded first: what is rounded to the largest number is not infinite.",
          (LARGE, LARGE.replace("rounded", "x"))),
    wrong("saturates", "What is too large after rounding is infinite.", ("rounded = math.inf", "rounded = fmt.max")),
    wrong("loses-the-sign", "A zero keeps the sign.", ("math.copysign(rounded, x)", "rounded")),
]  # fmt: skip


ENDS = (sys.float_info.max, -sys.float_info.max, 5e-324)  # of what a float can be


class Case(NamedTuple):
    format: Any
    seed: int
    plain: tuple[float, ...] = ()


NEAR = 2.0**-14 * (1 - 2.0**-13)  # rounded it is 2^-14
PLAIN = (0.7, 1 + 2.0**-11 + 2.0**-13, 1 + 2.0**-11, 2.0**-14 * (1 + 2.0**-10), 3e-6, 2.5 * 2.0**-24 * (1 + 2.0**-20))


def draw(random: Random) -> list[Case]:
    formats: list[Any] = [name for name, fmt in number_kit.ALL.items() if fmt.infinities and not fmt.saturate]
    formats += number_kit.drawn_formats(random, 10, infinities=True, saturate=False)
    numbers = [("FP16", (*PLAIN, -1e-9, 65519.0, 65520.0)), ("BF16", (1 + 2.0**-9,)), ("FP16", (math.inf, math.nan))]
    plain = [Case(name, 0, each) for name, each in [*numbers, ("FP16 without subnormals", (2.0**-15, NEAR))]]
    return plain + [Case(fmt, random.randrange(10**6)) for fmt in formats]


def result(case: Case) -> dict[str, Any]:
    """Numbers of every kind, and those around the smallest and the largest normal number."""
    fmt = number_kit.format_of(case.format)
    numbers = case.plain or [*ENDS, *number_kit.numbers(Random(case.seed), fmt, 100)]
    return {repr(x): number_kit.typed(task.nearest(x, number_kit.bare(fmt)), float) for x in numbers}
