"""Below the smallest normal number 2^min_exponent, a format has no smaller exponent: its steps stay the same,
and a number loses one bit for each octave that it lies lower. These are the subnormal numbers; without them
2^-15 would be 0 in FP16.

    FP16, min_exponent -14, 10 bits     a float64 brings 52 bits behind the point, 42 of which have no place
    x = 1.… · 2^-14                     42 go: 10 bits are left behind the point
    x = 1.… · 2^-16                     44 go

`align` says how many of the low bits go, before rounding.
"""

from random import Random
from typing import NamedTuple

import numpy as np

from precision import one_number
from precision.formats import BF16, FP16
from tests.exercises import number_kit
from tests.exercises.kit import fail, wrong

PLAN = [
    "A normal number loses the 52 bits that a float64 has, less fmt.mantissa_bits.",
    "Below fmt.min_exponent: one more for each octave that `exponent` is lower.",
]
HINTS = [
    "At exponent == fmt.min_exponent nothing is added yet.",
    "max(0, something) is 0 for all normal numbers.",
]
TERM = "max(0, fmt.min_exponent - exponent)"
WRONG = [
    wrong("no-subnormals", (f" + {TERM}", "")),
    wrong("starts-an-octave-early", (TERM, "max(0, fmt.min_exponent - exponent + 1)")),
    wrong("starts-an-octave-late", (TERM, "max(0, fmt.min_exponent - exponent - 1)")),
    wrong("backwards", (TERM, "max(0, exponent - fmt.min_exponent)")),
    wrong("one-octave-for-all", (TERM, "(exponent < fmt.min_exponent)")),
    wrong("normals-gain", (TERM, "(fmt.min_exponent - exponent)")),
    wrong("forgets-the-mantissa", ("52 - fmt.mantissa_bits +", "52 +")),
]


def check() -> None:
    drop = [one_number.align(exponent, FP16) for exponent in (0, -13, -14, -15, -16, -24)]
    if drop[2] == 52:
        fail("forgets-the-mantissa", "All 52 bits would go: FP16 keeps 10 of them.")
    if drop[0] > 42:
        fail(
            "backwards",
            f"Of 1.0 {drop[0]} bits would go, and normal numbers lose 42: it is the small ones that lose more.",
        )
    if drop[3:] == [42, 42, 42]:
        fail(
            "no-subnormals", "2^-16 keeps 10 bits behind the point, finer than FP16's smallest step, 2^-24: drop more."
        )
    if drop[3:] == [43, 43, 43]:
        fail("one-octave-for-all", "2^-16 loses one bit more than 2^-15: one for each octave.")
    if drop[2] == 43:
        fail("starts-an-octave-early", "2^-14 is FP16's smallest normal number, and would lose a bit: begin below it.")
    if drop[3] == 42:
        fail("starts-an-octave-late", "2^-15 is subnormal already, and would keep 10 bits: one of them must go.")
    if drop[0] < 42:
        fail("normals-gain", f"Of 1.0 only {drop[0]} bits would go: normal numbers all lose 42, large ones not fewer.")
    if drop != [42, 42, 42, 43, 44, 52] or one_number.align(-130, BF16) != 49:
        fail("values", f"For exponents 0, -13, -14, -15, -16, -24 FP16 drops 42, 42, 42, 43, 44, 52 bits, not {drop}.")
    for x in (2.0**-15, 3e-6, 5.97e-8, 2.0**-25, 6.1e-5):
        want = int(np.float64(x).astype(np.float16).view(np.uint16))
        if one_number.encode_one(x, FP16)[0] != want:
            fail("values", f"{x!r} becomes {one_number.encode_one(x, FP16)[0]:#06x} in FP16, not {want:#06x}.")


class Case(NamedTuple):
    format: str
    seed: int


def draw(random: Random) -> list[Case]:
    return [Case(name, random.randrange(10**6)) for name in number_kit.ALL]


def result(case: Case) -> dict[str, int]:
    """Around the smallest and the largest normal number, and anywhere."""
    random, fmt = Random(case.seed), number_kit.ALL[case.format]
    exponents = [edge + more for edge in (fmt.min_exponent, fmt.max_exponent) for more in range(-12, 13)]
    exponents += [random.randint(-1022, 1023) for _ in range(50)]
    return {f"exponent {e}": one_number.align(e, fmt) for e in exponents if -1022 <= e <= 1023}
