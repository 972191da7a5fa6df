"""Encoding begins with a float64 taken apart into whole numbers, with which nothing is lost by accident:

    x = (-1)^sign · significand · 2^(exponent - 52)

A float64 has 1 bit of sign, 11 of exponent field (bias 1023) and 52 of mantissa. In normal numbers a 1 stands
before the mantissa, which is not stored: the significand has 53 bits. Field 0 has none, and the exponent of
field 1.
"""

import math
import struct
from random import Random
from typing import Any, NamedTuple

from precision import one_number
from tests.exercises import number_kit
from tests.exercises.kit import wrong

PLAN = [
    'The 64 bits as a whole number: struct.pack(">d", x) gives 8 bytes, int.from_bytes(…, "big") the number.',
    "Cut out the sign (1 bit), the field (11 bits), the mantissa (52 bits).",
    "The exponent is the field less 1023; field 0 counts as field 1.",
    "The significand is the mantissa, with 2^52 added unless the field is 0. (Infinity and NaN have field 2047 and are "
    "cut in the same way. Of theirs only the sign and the 52 bits count here.)",
]
HINTS = [
    "bits >> 52 has sign and field; & 0x7FF leaves the lowest 11 bits.",
    "bits % 2**52 is the mantissa.",
    "max(field, 1) treats field 0 as field 1.",
]
AFTER = (
    "The package reads the bits and computes nothing with x. So zero, subnormal numbers, infinity and NaN all go "
    "through the same three lines. Field 0 has the exponent of field 1, and `max(field, 1)` says that without a case "
    "of its own. Nothing is rounded, because whole numbers of Python have no end. `encode_one` later takes the "
    "payload of a NaN from the same significand. Read next: `_round` in precision/fast.py."
)
WRONG = [
    wrong("forgets-the-leading-1", "The significand has 53 bits, a 1 before the mantissa.",
          ("mantissa + (2**52 if field else 0)", "mantissa")),
    wrong("leading-1-always", "Field 0 has no leading 1: the smallest float64 has significand 1.",
          ("(2**52 if field else 0)", "2**52")),
    wrong("wrong-bias", "The bias is 1023.", ("1023", "1024")),
    wrong("subnormal-exponent", "Field 0 has the exponent of field 1, -1022.", ("max(field, 1)", "field")),
    wrong("sign-in-the-field", "The sign bit got into the field, which has 11 bits.", ("0x7FF", "0xFFF")),
    wrong("loses-the-sign", "The highest bit is the sign.", ("bits >> 63", "0")),
    wrong("exponent-of-the-last-bit", "The exponent is that of the leading 1, not of the last bit.",
          ("max(field, 1) - 1023,", "max(field, 1) - 1075,")),
]  # fmt: skip


class Case(NamedTuple):
    bits: str


def draw(random: Random) -> list[Case]:
    """Of each exponent field the first number, the last, and a random one. Field 2047: infinity, and NaNs."""
    mantissas = [(field, mantissa) for field in range(2048) for mantissa in (0, 2**52 - 1, random.randrange(2**52))]
    mantissas += [(2047, random.randrange(1, 2**51)) for _ in range(8)]
    plain = [Case(f"{bits:#018x}") for bits in (0x3FF8000000000000, 0xC000000000000000, 1)]
    return plain + [
        Case(f"{random.randrange(2) << 63 | field << 52 | mantissa:#018x}") for field, mantissa in mantissas
    ]


def result(case: Case) -> dict[str, Any]:
    (x,) = struct.unpack(">d", int(case.bits, 16).to_bytes(8, "big"))
    found: dict[str, Any] = {}
    for name, number in (("x", x), ("-x", -x)):
        sign, exponent, significand = one_number.split(number)
        if math.isfinite(x):
            parts = {"sign": sign, "exponent": exponent, "significand": significand}
        else:  # it has no exponent and no leading 1
            parts = {"sign": sign, "the lower 52 bits": significand % 2**52}
        found |= {f"{part} of {name}": number_kit.typed(value, int) for part, value in parts.items()}
    return found
