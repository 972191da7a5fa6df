"""A number of 4 bits ends at 6. So 32 numbers share a scale, a power of two X of 8 bits. Its code is its exponent plus
127 (OCP Microscaling, section 6.3):

    X = 2^(e - emax)      2^e: the octave in which the largest |v| lies; emax: fmt.max_exponent
    code_i                of the number of the format that is nearest to v_i / X

The exponent of X lies between -127 and 127; beyond, it is the nearer end. A block of zeros has -127. A v_i / X above
the format's largest number becomes that number: nothing becomes infinite. Ties go to the even code.

Return the code of the scale, and the list of the numbers' codes. fmt says all: exponent_bits, mantissa_bits, bias,
width, max_exponent, min_exponent (of the smallest normal number), max_bits (the largest number's code). A code is the
sign, the exponent field and the mantissa; below the smallest normal number the numbers are subnormal. -0.0 keeps its
sign. Use Python's numbers: each quotient is exact in them.
"""

import math
from random import Random
from typing import Any, NamedTuple

import torch

from precision.blocks import FORMATS
from tests.exercises import number_kit
from tests.exercises.draws import deal
from tests.exercises.kit import wrong
from tests.exercises.tasks import block as task

PLAN = [
    "The largest magnitude, and the exponent of its octave. Zero has none.",
    "The scale's exponent: that minus fmt.max_exponent, kept between its two ends.",
    "For each number: its magnitude divided by the scale, and the octave of that, which is never below the smallest "
    "normal number's.",
    "How many steps of 2^(octave - mantissa_bits) is it? To the nearest whole number, ties to even.",
    "The code from octave and steps, at most that of the largest number; then the sign's bit.",
]
HINTS = [
    "math.frexp(x) gives (fraction, e) with 0.5 <= fraction < 1: the octave of x is e - 1.",
    "math.ldexp(x, n) is x times 2^n, exactly. round(y) takes the even one in a tie.",
    "Neighbouring numbers have neighbouring codes: if rounding carries into the next octave, adding up still fits. A "
    "normal number has at least 2^mantissa_bits steps, which raise the exponent field by one.",
]
AFTER = (
    "The package does this for whole tensors: float64 holds each quotient exactly, and the format's own `encode` "
    "rounds it once. The largest number of a block lies between 2^emax and 2^(emax + 1) times the scale, so one near "
    "the upper end is clamped: 7 becomes 6 in 4 bits. NVIDIA's NVFP4 has blocks of 16 numbers, and a scale with a "
    "mantissa, so that it can lie closer. Read next: `quantize` in precision/blocks.py."
)
SCALE = "math.frexp(largest)[1] - 1 - fmt.max_exponent"
OCTAVE = "max(math.frexp(scaled)[1] - 1, fmt.min_exponent)"
WRONG = [
    wrong("forgets-emax", "The largest number shall lie in the format's highest octave: subtract fmt.max_exponent.",
          (SCALE, "math.frexp(largest)[1] - 1")),
    wrong("largest-without-sign", "The largest magnitude counts, and a number may be negative.",
          ("max(abs(x) for x in numbers)", "max(numbers)")),
    wrong("not-clamped", "A number above the format's largest has that one's code: nothing becomes infinite or another "
          "code.", ("min(code, fmt.max_bits)", "code")),
    wrong("no-subnormals", "Below the smallest normal number the steps stay as long as there.",
          (OCTAVE, "math.frexp(scaled)[1] - 1")),
    wrong("cuts-off", "It was cut off, not rounded.", ("round(math", "int(math")),
    wrong("no-ends", "The scale's exponent lies between -127 and 127.", ("min(max(exponent, -127), 127)", "exponent")),
    wrong("zero-in-an-octave", "frexp says that the exponent of 0.0 is 0. But 0.0 has no octave: its code is the "
          "sign's bit alone.", (" if scaled else fmt.min_exponent", "")),
    wrong("loses-the-sign", "The sign's bit is missing. -0.0 has one, too.", ("math.copysign(1, x) < 0", "False")),
]  # fmt: skip


class Case(NamedTuple):
    format: str
    seed: int
    plain: tuple[float, ...] = ()


PLAIN = (6.0, -1.0, 0.3, 0.75, 2.5, -0.0, 0.1, 7.0), (-12.0, 1.0, 0.4, 3.0), (0.0, -0.0), (1e-45, -3e-39), (3e38, 1.0)


def draw(random: Random) -> list[Case]:
    plain = [Case(name, 0, numbers) for numbers in PLAIN for name in ("MXFP4", "MXFP8_E5M2", "MXFP6_E2M3")]
    return plain + [Case(*row) for row in deal(random, [(name,) for name in FORMATS] * 8)]


def result(case: Case) -> dict[str, Any]:
    """Numbers of several octaves, of which some lie half-way between two of the format."""
    random, fmt = Random(case.seed), FORMATS[case.format].element
    size = math.ldexp(1, random.randint(-150, 122))  # so that 31.5 times it is finite
    steps = [random.choice((-1, 1)) * random.randrange(64) / random.choice((2, 4, 8, 64, 1024)) for _ in range(32)]
    numbers = [*case.plain] or [size * step for step in steps]
    numbers = torch.tensor(numbers, dtype=torch.float32).tolist()
    answer = task.encode_block([*numbers], number_kit.bare(fmt))
    scale, codes = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    of_numbers = {f"the code of {x!r}": code for x, code in zip(numbers, codes)} if isinstance(codes, list) else codes
    return {"the scale's code": number_kit.typed(scale, int), "codes": of_numbers, "how many": len(codes or ())}
