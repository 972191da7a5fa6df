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

import numpy as np

from precision import formats
from tests.exercises import number_kit
from tests.exercises.kit import fail, wrong
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
    wrong("no-subnormals", (EXPONENT, "math.frexp(x)[1] - 1")),
    wrong("starts-an-octave-early", (EXPONENT, EXPONENT.replace("fmt.min_exponent", "fmt.min_exponent + 1"))),
    wrong("starts-an-octave-late", (EXPONENT, EXPONENT.replace("fmt.min_exponent", "fmt.min_exponent - 1"))),
    wrong("frexp-s-exponent", (EXPONENT, EXPONENT.replace(" - 1", ""))),
    wrong("flushes", ("not fmt.subnormals and ", "")),
    wrong("never-flushes", (SMALL, "False")),
    wrong("flushes-before-rounding", (SMALL, SMALL.replace("rounded", "x"))),
    wrong("rounds-twice", (ROUND, "round(round(x / (fine := math.ldexp(1.0, math.frexp(x)[1] - 1 - "
          "fmt.mantissa_bits))) * fine / step) * step")),
    wrong("overflow-before-rounding", (LARGE, LARGE.replace("rounded", "x"))),
    wrong("saturates", ("rounded = math.inf", "rounded = fmt.max")),
    wrong("never-too-large", (LARGE, "False"), says="saturates-not"),
    wrong("half-up", (ROUND, "math.floor(x / step + 0.5) * step")),
    wrong("cuts-off", (ROUND, "int(x / step) * step")),
    wrong("loses-the-sign", ("math.copysign(rounded, x)", "rounded")),
    wrong("rounds-infinity", (" or not math.isfinite(x)", ""), says="OverflowError"),
    wrong("fp16-s-smallest", ("fmt.smallest_normal", "2.0**-14"), says="random"),
    wrong("fp16-only", ("exponent - fmt.mantissa_bits", "exponent - 10")),
]  # fmt: skip
FP16, BF16 = number_kit.bare(formats.FP16), number_kit.bare(formats.BF16)
WITHOUT = number_kit.bare(number_kit.NARROW["FP16 without subnormals"])


def check() -> None:
    expect(0.7, {"cuts-off": (1433 * 2.0**-11, "it was cut off, not rounded")})
    expect(1 + 2.0**-11 + 2.0**-13, {"frexp-s-exponent": (1.0, "from 1 to 2 the step is 2^-10")})
    expect(1 + 2.0**-11, {"half-up": (1 + 2.0**-10, "a tie goes to the even one, here to 1")})
    expect(math.inf, {})
    expect(-math.inf, {})
    if not math.isnan(task.nearest(math.nan, FP16)):
        fail("values", f"NaN becomes {task.nearest(math.nan, FP16)}, and should stay NaN.")
    normal = "2^-14 is normal, and so is all above: 10 bits behind the first 1"
    expect(2.0**-14 * (1 + 2.0**-10), {"starts-an-octave-early": (2.0**-14, normal)})
    small = {
        "flushes": (0.0, "it is subnormal, and FP16 has subnormal numbers"),
        "no-subnormals": (1611 * 2.0**-29, "below 2^-14 the step of FP16 stays 2^-24: no number there is finer"),
        "starts-an-octave-late": (101 * 2.0**-25, "from 2^-15 to 2^-14 the step is 2^-24 already, and not half of it"),
    }
    expect(3e-6, small)
    twice = "first it was rounded to 11 digits, which made it a tie, and then once more: round once, to the right step"
    expect(2.5 * 2.0**-24 * (1 + 2.0**-20), {"rounds-twice": (2 * 2.0**-24, twice)})
    expect(2.0**-25, {})
    expect(2.0**-25 * 1.001, {})
    if math.copysign(1, task.nearest(-1e-9, FP16)) > 0 or math.copysign(1, task.nearest(-0.0, FP16)) > 0:
        fail("loses-the-sign", "-1e-9 becomes 0, and must become -0: a zero keeps the sign.")
    largest = "65520 is half-way from 65504 to the next number that there would be, 65536. What is below is 65504"
    expect(65519.0, {"overflow-before-rounding": (math.inf, largest)})
    too_large = {
        "saturates": (65504.0, "this tie goes up, and that is infinity"),
        "saturates-not": (65536.0, "FP16 ends at 65504: what is larger after rounding is infinity"),
    }
    expect(65520.0, too_large)
    expect(-1e9, {})
    got = task.nearest(1 + 2.0**-9, BF16)
    if got != 1:
        fail("fp16-only", f"1 + 2^-9 becomes {got!r} in BF16, which has 7 bits behind the point: it is 1.")
    near = 2.0**-14 * (1 - 2.0**-13)
    for x, want, name, words in (
        (2.0**-15, 0.0, "never-flushes", "a format without subnormal numbers has none between 0 and 2^-14"),
        (
            near,
            2.0**-14,
            "flushes-before-rounding",
            "rounded it is 2^-14, a normal number: look at the result, not at x",
        ),
    ):
        if task.nearest(x, WITHOUT) != want:
            fail(name, f"In FP16 without subnormal numbers {x!r} becomes {task.nearest(x, WITHOUT)!r}: {words}.")
    for exponent in range(-26, 17):
        for more in (1.0, 1.1, 1.37, 1.9995):
            expect(more * 2.0**exponent, {})


def expect(x: float, mistakes: dict[str, tuple[float, str]]) -> None:
    """NumPy says what is right in FP16."""
    with np.errstate(over="ignore"):
        want = float(np.float64(x).astype(np.float16))
    got = task.nearest(x, FP16)
    if got == want:
        return
    for name, (value, words) in mistakes.items():
        if got == value:
            fail(name, f"{x!r} becomes {got!r} in FP16, not {want!r}: {words}.")
    fail("values", f"{x!r} becomes {got!r} in FP16, not {want!r}.")


ENDS = (sys.float_info.max, -sys.float_info.max, 5e-324)  # of what a float can be


class Case(NamedTuple):
    format: Any
    seed: int


def draw(random: Random) -> list[Case]:
    formats: list[Any] = [name for name, fmt in number_kit.ALL.items() if fmt.infinities and not fmt.saturate]
    formats += number_kit.drawn_formats(random, 10, infinities=True, saturate=False)
    return [Case(fmt, random.randrange(10**6)) for fmt in formats]


def result(case: Case) -> dict[str, Any]:
    """Numbers of every kind, and those around the smallest and the largest normal number."""
    fmt = number_kit.format_of(case.format)
    numbers = [*ENDS, *number_kit.numbers(Random(case.seed), fmt, 100)]
    return {repr(x): number_kit.typed(task.nearest(x, number_kit.bare(fmt)), float) for x in numbers}
