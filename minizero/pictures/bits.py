"""Bits as rows of boxes, coloured by field: the sign, the exponent, the mantissa.

Patterns come as whole numbers, and a format as the widths of its two fields. The value of a pattern comes from the
caller; the words beside it say how it follows from the fields.
"""

import math
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes

from minizero.pictures.style import FONT, box, label_axes, new_axes

# One colour for each field, and for nothing else.
SIGN, EXPONENT, MANTISSA = "#CC79A7", "#E69F00", "#8DA0CB"
SUBNORMAL = "#5E2750"
NORMAL = "#555555"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(exponent: int) -> str:
    """2 to the `exponent`, as it is printed: 2⁻¹⁴."""
    return "2" + str(exponent).translate(_RAISED)


def fields(bits: int, exponent_bits: int = 5, mantissa_bits: int = 10) -> tuple[int, int, int]:
    """Sign, exponent field and mantissa of a pattern, as whole numbers."""
    sign, code = divmod(bits, 2 ** (exponent_bits + mantissa_bits))
    return sign, *divmod(code, 2**mantissa_bits)


def spell(bits: int, exponent_bits: int = 5, mantissa_bits: int = 10) -> str:
    """The pattern in binary, a space between the fields: 0 01011 1001100110."""
    sign, field, mantissa = fields(bits, exponent_bits, mantissa_bits)
    return f"{sign} {field:0{exponent_bits}b} {mantissa:0{mantissa_bits}b}"


def written(x: float) -> str:
    """A number in decimal as it is printed: 65504, or 5.9605 × 10⁻⁸ with five digits if it is very large or small."""
    if x == 0 or 1e-4 <= abs(x) < 1e7:
        return f"{x:.13g}".replace("-", "−")
    digits, exponent = f"{x:.4e}".split("e")
    return f"{float(digits):.5g} × 10{str(int(exponent)).translate(_RAISED)}".replace("-", "−")


def explain(bits: int, value: float, exponent_bits: int = 5, mantissa_bits: int = 10) -> str:
    """How the value follows from the fields: + 1.5 × 2¹ = 3."""
    sign, field, mantissa = fields(bits, exponent_bits, mantissa_bits)
    if math.isnan(value):
        return "NaN: not a number"
    if math.isinf(value):
        return f"{'−' if sign else '+'} infinity"
    leading, exponent = min(field, 1), max(field, 1) - (2 ** (exponent_bits - 1) - 1)
    significand, result = f"{leading + mantissa / 2**mantissa_bits:.13g}", written(value)
    return f"{'−' if sign else '+'} {significand} × {power(exponent)} {'≈' if '×' in result else '='} {result}"


def draw_bits(rows: Iterable[tuple[str, int, float]], exponent_bits: int = 5, mantissa_bits: int = 10) -> Axes:
    """A row of boxes for each (title, pattern, value), with words on how the value follows from the bits."""
    rows, width = list(rows), 1 + exponent_bits + mantissa_bits
    axes = new_axes(15, 0.62 * len(rows) + 0.7)
    colors = [SIGN] + exponent_bits * [EXPONENT] + mantissa_bits * [MANTISSA]
    for row, (title, bits, value) in enumerate(rows):
        for place, color in enumerate(colors):
            digit = bits >> (width - 1 - place) & 1
            box(axes, place, -row, 0.94, 0.8, color, str(digit), edgecolor=color, weight="bold")
        axes.text(-0.4, 0.4 - row, title, ha="right", va="center", fontsize=FONT)
        said = explain(bits, value, exponent_bits, mantissa_bits)
        axes.text(width + 0.3, 0.4 - row, said, va="center", fontsize=FONT)
    middles = {"sign": 0.5, "exponent": 1 + exponent_bits / 2, "mantissa": 1 + exponent_bits + mantissa_bits / 2}
    for name, middle in middles.items():
        axes.text(middle, 1.05, name, ha="center", fontsize=FONT)
    axes.set(xlim=(-5, width + 13), ylim=(0.9 - len(rows), 1.7))
    axes.axis("off")
    return axes


def draw_formats(formats: Mapping[str, tuple[int, int]]) -> Axes:
    """A row of boxes, one for each bit, for each name: (exponent bits, mantissa bits). At the right, how many."""
    axes = new_axes(15, 0.62 * len(formats) + 0.7)
    longest = 1 + max(map(sum, formats.values()))
    for row, (name, (exponent_bits, mantissa_bits)) in enumerate(formats.items()):
        colors = [SIGN] + exponent_bits * [EXPONENT] + mantissa_bits * [MANTISSA]
        for place, color in enumerate(colors):
            box(axes, place, -row, 1, 0.8, color, edgecolor="white", linewidth=2)
        axes.text(-0.4, 0.4 - row, name, ha="right", va="center", fontsize=FONT)
        counts = f"1 + {exponent_bits} + {mantissa_bits} = {len(colors)}"
        axes.text(longest + 0.5, 0.4 - row, counts, va="center", fontsize=FONT)
    for x, name, color in ((0, "sign", SIGN), (4, "exponent", EXPONENT), (10, "mantissa", MANTISSA)):
        box(axes, x, 1.2, 1, 0.5, color, edgecolor="none")
        axes.text(x + 1.3, 1.45, name, va="center", fontsize=FONT)
    axes.set(xlim=(-5.5, longest + 7), ylim=(0.9 - len(formats), 1.9))
    axes.axis("off")
    return axes


def draw_ranges(ranges: Mapping[str, tuple[float, float, float]]) -> Axes:
    """A bar for each name: (smallest number above zero, smallest normal number, largest number), by exponents of 2."""
    axes = new_axes(15, 0.55 * len(ranges) + 1.6)
    for row, numbers in enumerate(ranges.values()):
        low, normal, high = map(math.log2, numbers)
        axes.barh(-row, high - normal, 0.7, normal, color="#C4C4C4", label="" if row else "normal numbers")
        axes.barh(-row, normal - low, 0.7, low, color=SUBNORMAL, label="" if row else "subnormal numbers")
        axes.text(low - 3, -row, f"smallest {power(round(low))}", ha="right", va="center", fontsize=FONT)
        axes.text(high + 3, -row, f"largest {written(numbers[-1])}", va="center", fontsize=FONT)
    axes.set_yticks([-row for row in range(len(ranges))], list(ranges))
    at = {exponent: power(exponent) for exponent in (-126, -64, 0, 64, 128)}
    legend = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2}
    label_axes(axes, "value", "", at=at, legend=legend, xlim=(-200, 190), ylim=(0.5 - len(ranges), 0.5))
    return axes


def addition_table(rows: Iterable[tuple[str, int, int]], point: int = 13, extra: int = 3) -> str:
    """The steps of an addition as text, a line for each (step, significand, exponent), digits of one worth in a column.

    significand: a whole number with `point` binary digits behind its point. The last `extra` ones stand apart: g, r and
    s, for guard, round and sticky.
    """
    lines = [f"{'':15}{'mantissa':{point - extra}} {'grs'[:extra]}"]
    for step, significand, exponent in rows:
        digits = f"{significand:0{point + 1}b}"
        whole, mantissa, rest = digits[:-point], digits[-point:-extra], digits[-extra:]
        lines.append(f"{step:12}{whole:>2}.{mantissa} {rest}  × {power(exponent)}")
    return "\n".join(lines)
