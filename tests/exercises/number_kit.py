"""What the random stages of the exercises on bits draw from: formats, bit patterns, numbers."""

import contextlib
import dataclasses
import itertools
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from precision.formats import BF16, FORMATS, FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from precision.layout import BitLayout
from precision.one_number import ROUNDINGS
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error

NARROW = {
    "FP16": FP16,
    "BF16": BF16,
    "FP8_E4M3": FP8_E4M3,
    "FP8_E5M2": FP8_E5M2,
    "FP16 without subnormals": FloatFormat(5, 10, subnormals=False),
    "E4M3 that saturates": FloatFormat(4, 3, saturate=True),
    "E3M4 with bias 5": FloatFormat(3, 4, bias=5),
    "E5M2 without NaN": FloatFormat(5, 2, nans=False),
    "E9M6": FloatFormat(9, 6),
    "E2M1 of numbers only": FloatFormat(2, 1, infinities=False, nans=False),
    "E3M12 with bias -2": FloatFormat(3, 12, bias=-2),
    "E5M0 without infinities": FloatFormat(5, 0, infinities=False),
}
ALL = {**FORMATS, **NARROW}


def drawn_formats(random: Random, count: int, **fixed: bool) -> list[FloatFormat]:
    """Formats of at most 16 bits that nobody has named. fixed: what all of them have, such as subnormals=True."""
    found: list[FloatFormat] = []
    while len(found) < count:
        exponent_bits, options = random.randint(2, 9), ("infinities", "nans", "subnormals")
        drawn = {name: random.random() < 0.7 for name in options} | {"saturate": random.random() < 0.3}
        bias = random.choice((None, random.randint(-3, 2**exponent_bits + 3)))
        every: dict[str, Any] = {"bias": bias, **drawn, **fixed}
        mantissa_bits = random.randint(1, min(13, 15 - exponent_bits))
        with contextlib.suppress(ValueError):  # it cannot exist
            found.append(FloatFormat(exponent_bits, mantissa_bits, **every))
    return found


def format_of(name: Any) -> FloatFormat:
    """That of this name; a format is its own."""
    return ALL.get(name, name)


def typed(value: Any, kind: type) -> Any:
    """The value, or in words that it is none of that kind, even if it is equal to one."""
    return value if isinstance(value, kind) else f"{value!r}, of type {type(value).__name__}"


def bare(fmt: FloatFormat) -> BitLayout:
    """The format as plain data, without the conversions that would be the answer."""
    return BitLayout(**{field.name: getattr(fmt, field.name) for field in dataclasses.fields(fmt)})


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)


def codes(random: Random, fmt: FloatFormat, count: int) -> list[int]:
    """Patterns of a format: all edges with both signs, some NaNs, and others until there are `count`."""
    top = 2 ** (fmt.width - 1)
    normal = 2**fmt.mantissa_bits
    edges = edges_of(fmt)
    result = edges + [code + top for code in edges]
    while len(result) < count:
        result += [random.randrange(2 * top), random.randrange(normal) + top * random.randrange(2)]
    return random.sample(result, len(result))


def edges_of(fmt: FloatFormat) -> list[int]:
    """Patterns of a format beside which something changes, without the sign."""
    top = 2 ** (fmt.width - 1)
    normal = 2**fmt.mantissa_bits
    edges = [0, 1, normal - 1, normal, normal + 1, fmt.max_bits - 1, fmt.max_bits, fmt.max_bits + 1, top - 1]
    edges += [fmt.bias << fmt.mantissa_bits, fmt.nan_bits or 0, (fmt.infinity_bits or 0) + 1]
    return [code for code in edges if 0 <= code < top]


def numbers(random: Random, fmt: FloatFormat, count: int) -> list[float]:
    """Numbers that a format must round: neighbours, half-way between them, a hair beside; tiny, too large, special.

    `count` of them, and those around its smallest and its largest normal number.
    """
    result = [*SPECIAL, *(math.copysign(fmt.max * factor, sign) for factor in (1, 1.001, 8) for sign in (1, -1))]
    edges = [edge * (1 + random.choice((-1, 1)) * 2.0**-bits) for edge in (fmt.max, fmt.smallest_normal)
             for bits in range(1, fmt.mantissa_bits + 4)]  # fmt: skip
    tie = fmt.max + math.ldexp(1, fmt.max_exponent - fmt.mantissa_bits - 1)  # between the largest and what comes next
    edges += [tie, -tie, math.nextafter(tie, 0), math.nextafter(tie, math.inf)]
    while len(result) < count:
        exponent = random.choice((0, fmt.min_exponent, fmt.max_exponent, random.randint(-20, 20)))
        exponent = max(fmt.min_exponent - fmt.mantissa_bits - 2, min(fmt.max_exponent, exponent - random.randrange(4)))
        step = math.ldexp(1, max(exponent, fmt.min_exponent) - fmt.mantissa_bits)
        number = math.floor(math.ldexp(random.uniform(1, 2), exponent) / step) * step
        number += step * random.choice((0, 0.5, 0.5, 0.25, 0.75, random.random()))
        number *= 1 + random.choice((0, 0, 2**-52, -(2**-53)))
        result.append(math.copysign(number, random.choice((1, -1))))
    return edges + result


def nan(sign: int, payload: int) -> float:
    """The float64 NaN of that sign and payload; its highest bit of 52 says that it is quiet."""
    return struct.unpack(">d", (sign << 63 | 0x7FF << 52 | payload).to_bytes(8, "big"))[0]


class Operation(NamedTuple):
    """A case of arithmetic: pairs of patterns of a format, drawn from the seed, under a rounding."""

    format: Any
    rounding: str
    seed: int


def operations(random: Random) -> list[Operation]:
    """Every format under every rounding of IEEE 754, once."""
    formats = [*NARROW, *drawn_formats(random, 3)]
    return [Operation(*row) for row in deal(random, itertools.product(formats, ROUNDINGS[:-1]))]


def bits_and_flags(case: Operation, operate: Callable[..., Any], sign: str) -> dict[str, str]:
    """Of each pair of patterns the result's bits and flags. In a format without NaN, of finite numbers only.

    All pairs of edges with a sign drawn for each, and others. In a format of infinities without NaN some pairs of
    these, one by one: 0 and infinity, or two infinities, may be an error.
    """
    random, fmt = Random(case.seed), format_of(case.format)
    pairs: list[Any] = [[code | random.randrange(2) << fmt.width - 1 for code in pair]
             for pair in itertools.product(edges_of(fmt), repeat=2)]  # fmt: skip
    pairs += zip(*(codes(random, fmt, 200)[:200] for _ in "ab"))
    single: list[Any] = []
    if fmt.infinities and not fmt.nans:
        ends = (0, fmt.max_bits + 1, fmt.max_bits + 1 + 2 ** (fmt.width - 1))
        single = list(itertools.product(ends, repeat=2))
    alone = {f"{x:#x} {sign} {y:#x} alone": str(value_or_error(operate, x, y, fmt, case.rounding)) for x, y in single}
    a, b = torch.tensor(pairs).T
    if fmt.nan_bits is None:
        finite = [pattern % 2 ** (fmt.width - 1) <= fmt.max_bits for pattern in (a, b)]
        a, b = a[finite[0] & finite[1]], b[finite[0] & finite[1]]
    alone["a matrix and a column"] = str(operate(a[:6].view(2, 3).T, b[:3, None], fmt, case.rounding).tolist())
    bits, flags = operate(a, b, fmt, case.rounding, return_flags=True)
    raised = zip(*([name * flag for flag in raised.tolist()] for name, raised in vars(flags).items()))
    return alone | {
        f"{x:#x} {sign} {y:#x}": f"{z:#x}, flags {' '.join(filter(None, names)) or 'none'}"
        for x, y, z, names in zip(a.tolist(), b.tolist(), bits.tolist(), raised)
    }
