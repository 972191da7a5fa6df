"""A number goes into the bits of a format: split, align, round, pack, and then what is special. The four steps
are there; you put them together, and say what happened (flags).

    sign, exponent, significand = split(x)          x = (-1)^sign · significand · 2^(exponent - 52)
    drop = align(exponent, fmt)                     so many low bits have no place
    kept = round_off(significand, drop, sign, rounding, draw)
    code = pack(kept, exponent, fmt)                the bits without the sign

fmt.max_bits is the largest number's code, fmt.overflow_bits what a number too large becomes, fmt.nan_bits the
quiet NaN (None where the format has none), fmt.infinity_bits infinity; all without the sign bit, which is
2^(fmt.width - 1).
"""

import itertools
import math
import random
from fractions import Fraction
from typing import Any, NamedTuple

from precision import one_number
from tests.exercises import number_kit
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    "NaN: `ValueError` where the format has none; else its sign, fmt.nan_bits, and the top fmt.mantissa_bits "
    "bits of the payload, the low 52 bits of the significand (only with fmt.infinities). The flag "
    '"invalid" unless bit 51 of the significand, the quiet bit, is set.',
    'Infinity: fmt.overflow_bits. Where that is not fmt.infinity_bits, with the flags "overflow" and "inexact".',
    'Else the four steps. "inexact" where any of the dropped bits is 1.',
    'A code above fmt.max_bits is an overflow: fmt.overflow_bits, with "overflow" and "inexact". But '
    "rounding toward zero, "
    "or against the number's sign (down for positive, up for negative), stops at fmt.max_bits.",
    '"underflow": inexact, and below the smallest normal number even if it were rounded with one bit more: '
    "significand >> drop < 2^mantissa_bits, and round_off(significand, drop - 1, …) < 2^(mantissa_bits + 1).",
    'flush_to_zero, or a format without subnormals: a code below 2^mantissa_bits becomes 0 with "underflow" and '
    '"inexact", unless the number is 0.',
    "Return the sign bit with the code, and the set of flags.",
]
HINTS = [
    "Return early for NaN and infinity: the steps are for numbers.",
    "significand % 2**drop is what was dropped.",
    'to_infinity = rounding not in ("toward-zero", "down" if sign == 0 else "up")',
    "The order matters: overflow, then underflow, then flushing, then the sign.",
]
AFTER = (
    "A significand that is rounded up to the next power of 2 has no case of its own. `pack` adds it to the exponent "
    "field, so the carry raises the exponent. If the largest number is rounded up, the code lies above "
    "`fmt.max_bits`, and one comparison finds every overflow. Whether a number is tiny is decided after rounding, as "
    "if exponents had no end; IEEE 754 also allows to decide before. Read next: `_round` in precision/fast.py, which "
    "takes these steps for whole arrays."
)
WRONG = [
    wrong("overflow-becomes-max", "65520 is beyond FP16's largest number, 65504: to nearest it becomes infinity.",
          ("fmt.overflow_bits if to_infinity else fmt.max_bits", "fmt.max_bits")),
    wrong("overflow-always-infinity", "A rounding that does not go away from 0 makes of an overflow the largest number "
          "of its sign, and not infinity.",
          ("fmt.overflow_bits if to_infinity else fmt.max_bits", "fmt.overflow_bits")),
    wrong("forgets-overflow", "1e6 is too large for FP16:", ("if code > fmt.max_bits:", "if False:")),
    wrong("forgets-the-sign", "The sign is the highest bit.", ("return sign_bit | code, flags", "return code, flags")),
    wrong("loses-the-payload", "A NaN with payload bits became the bare one, 0x7e00: its top bits are kept.",
          (" | (payload if fmt.infinities else 0)", "")),
    wrong("flushes-subnormals", "1e-6 is a subnormal number of FP16, 0x0011, not 0.",
          ("(flush_to_zero or not fmt.subnormals)", "True")),
    wrong("rounds-twice", "1 + 2^-11 + 2^-40 lies above half-way and must go up; rounded to float32 first it is "
          "half-way and goes to even. Round once.",
          ("sign, exponent, significand = split(x)", "import struct\n    if abs(x) < 3e38:\n"
           '        x = struct.unpack(">f", struct.pack(">f", x))[0]\n    sign, exponent, significand = split(x)')),
    wrong("never-inexact", "0.1 is no FP16 number:", ('{"inexact"} if significand % 2**drop else set()', "set()")),
]  # fmt: skip


class Case(NamedTuple):
    format: Any
    rounding: str
    flush_to_zero: bool
    seed: int


def draw(random: random.Random) -> list[Case]:
    formats = [*number_kit.ALL, *number_kit.drawn_formats(random, 5)]
    ways = itertools.product(formats, one_number.ROUNDINGS, [False, True])
    return [Case("FP16", "nearest-even", False, 1)] + [Case(*row) for row in deal(random, ways)]


def result(case: Case) -> dict[str, Any]:
    """The bits and the flags of numbers, and of NaNs, which some formats refuse. Each set of flags is then changed.

    Half of the draws are a hair below the part that is dropped.
    """
    numbers, fmt = random.Random(case.seed), number_kit.format_of(case.format)
    payloads = [1 << 51 | numbers.randrange(2**51) for _ in range(3)] + [1 + numbers.randrange(2**51)]
    given = {repr(x): x for x in number_kit.numbers(numbers, fmt, 60)}
    given |= {f"NaN of sign {s}, payload {p:#x}": number_kit.nan(s, p) for p in payloads for s in (0, 1)}

    def encoded(x: float, rounding: str = case.rounding) -> str:
        draw: float | Fraction = numbers.random()
        if math.isfinite(x) and draw < 0.5:
            _, exponent, significand = one_number.split(x)
            drop = one_number.align(exponent, fmt)
            draw = max(Fraction(significand % 2**drop, 2**drop) - Fraction(1, 2**3100), Fraction(0))
        bits, flags = one_number.encode_one(x, fmt, rounding, draw=draw, flush_to_zero=case.flush_to_zero)
        words = f"{bits:#x}, flags {' '.join(sorted(flags)) or 'none'}"
        flags.add("a flag that the caller of another number added to its set")
        return words

    unknown = {f"{x}, under a rounding that does not exist": value_or_error(encoded, x, "nearest") for x in (0.0, 1.0)}
    return unknown | {name: value_or_error(encoded, x) for name, x in given.items()}
