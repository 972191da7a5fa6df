"""A floating-point number is three whole numbers next to each other: sign, exponent field, mantissa. FP16 has 1
+ 5 + 10 bits, and its bias is 15.

    field 1 to 30     (-1)^sign · 1.mantissa · 2^(field - bias)
    field 0           (-1)^sign · 0.mantissa · 2^(1 - bias)          zero and the subnormal numbers
    field 31          infinity where the mantissa is 0, else NaN

`fmt` says how wide the fields are (fmt.width, fmt.mantissa_bits), and fmt.infinity_bits is the code of infinity
(None in a format without), fmt.max_bits the largest number's, both without the sign bit. fmt.min_exponent is 1
- bias.
"""

import math
from random import Random
from typing import Any, NamedTuple

from precision import one_number
from tests.exercises import number_kit
from tests.exercises.kit import wrong

PLAN = [
    "Cut the bits: the sign is the highest; `code` is the rest; field and mantissa are its two parts.",
    "Is the code that of infinity? Is it above fmt.max_bits (then it is NaN; the package keeps the payload, "
    "math.nan is right too)?",
    "Field 0: the mantissa is a whole number of steps of 2^(fmt.min_exponent - fmt.mantissa_bits). Formats "
    "without subnormals (fmt.subnormals is False) have zeros there.",
    "Else the leading 1, which is not stored, comes in front of the mantissa: 2^mantissa_bits + mantissa steps.",
    "Give it its sign: also to zero, infinity, NaN.",
]
HINTS = [
    "bits >> (fmt.width - 1) is the sign; bits % 2 ** (fmt.width - 1) is the rest.",
    "math.ldexp(m, e) is m · 2^e, exactly.",
    "One step of a normal number is 2^(field - bias - mantissa_bits).",
    "math.copysign(magnitude, -1.0) also makes -0.0.",
]
AFTER = (
    "The package computes with whole numbers and scales once, with `math.ldexp`, which multiplies by a power of 2. "
    "Every code above the largest number's and not infinity's is NaN, so the same lines decode formats without "
    "infinity, such as E4M3. It writes the 64 bits of a NaN itself, because then the payload is kept. `copysign` "
    "comes last and gives its sign to zero, infinity and NaN as well. Read next: precision/layout.py."
)
WRONG = [
    wrong("forgets-the-leading-1", "1.mantissa, the 1 is not stored.",
          ("2**fmt.mantissa_bits + mantissa, field", "mantissa, field")),
    wrong("wrong-bias", "FP16's bias is 15.", ("field - fmt.bias - fmt", "field - fmt.bias - 1 - fmt")),
    wrong("subnormals-as-normals", "With field 0 there is no leading 1.",
          ("elif field == 0:", "elif field == 0 and mantissa == 0:")),
    wrong("flushes-subnormals", "This is a subnormal number, not 0.",
          ("if fmt.subnormals else 0.0", "if False else 0.0")),
    wrong("subnormals-half", "Field 0 has the exponent of field 1.",
          ("fmt.min_exponent - fmt.mantissa_bits) if", "fmt.min_exponent - 1 - fmt.mantissa_bits) if")),
    wrong("loses-the-sign", "The highest bit is the sign.", ("-1.0 if sign else 1.0", "1.0")),
    wrong("infinity-is-nan", "0x7c00 is infinity, not NaN.", ("if code == fmt.infinity_bits:", "if False:")),
    wrong("nan-is-a-number", "Field 31 holds no numbers.", ("elif code > fmt.max_bits:", "elif False:")),
]  # fmt: skip


class Case(NamedTuple):
    format: Any
    seed: int


def draw(random: Random) -> list[Case]:
    formats = [*number_kit.ALL, *number_kit.drawn_formats(random, 10)]
    return [Case(fmt, random.randrange(10**6)) for fmt in formats]


def result(case: Case) -> dict[str, float | str]:
    fmt = number_kit.format_of(case.format)
    codes = number_kit.codes(Random(case.seed), fmt, 300) if fmt.width > 8 else range(2**fmt.width)
    return {f"{bits:#x}": written(one_number.decode_one(bits, fmt)) for bits in codes}


def written(x: float) -> float | str:
    """A number as it is; of a NaN the sign."""
    return number_kit.typed(x, float) if x == x else f"NaN, its sign bit {int(math.copysign(1, x) < 0)}"
