"""python -m precision 0.1: a number taken apart; python -m precision 2048 + 1: a sum that is not there.

Every number that is written is rounded to the format. Every operation is exact on such numbers, and its result is
rounded once: this is how IEEE 754 defines arithmetic.
"""

import argparse
import ast
import math
import operator
import re
import sys
from collections.abc import Callable, Set
from fractions import Fraction
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precision.formats import FORMATS, FloatFormat
from precision.one_number import ROUNDINGS, decode_one, encode_one, split

OPERATORS: dict[type, tuple[str, Callable]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.Pow: ("**", operator.pow),
}
STYLES = ("bold red", "bold green", "bold blue")  # sign, exponent, mantissa
Number = Fraction | float  # a float where a fraction cannot be: infinity, NaN, and zero, which has a sign


# From the text to a number of the format.


def parse(text: str) -> ast.expr:
    """The expression's tree. `ValueError` for anything but numbers, + - * / ** and parentheses."""
    allowed = (ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, *OPERATORS)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"cannot read {text!r}: write numbers, + - * / ** and parentheses, as in 2048 + 1") from None
    for node in ast.walk(tree):
        if not isinstance(node, allowed) and type(getattr(node, "value", None)) not in (int, float):
            raise ValueError(f"only numbers, + - * / ** and parentheses are understood, not {ast.unparse(node)!r}")
    return tree


def literal(node: ast.Constant, text: str) -> Number:
    """The number that is written, exactly: 0.1 is a tenth, which no binary format has."""
    value = node.value
    if isinstance(value, int):
        return Fraction(value) or 0.0
    assert isinstance(value, float)
    written = (ast.get_source_segment(text, node) or "").replace("_", "").lower()
    if math.isinf(value) or (value == 0 and any(digit in "123456789" for digit in written.split("e")[0])):
        raise ValueError(f"{written} is beyond the range of float64, 5e-324 to 1.8e308")
    return Fraction(written) or 0.0


def operate(function: Callable, left: float, right: float, rounding: str) -> Number:
    """The exact result of an operation. Infinities, NaNs and divisions by zero follow IEEE 754, as NumPy does."""
    try:
        exact = function(Fraction(left), Fraction(right))
    except (ValueError, OverflowError, ZeroDivisionError):  # of NaN, of infinity, by zero
        with np.errstate(all="ignore"):
            result = float(function(np.float64(left), np.float64(right)))
        return math.nan if math.isnan(result) else result  # whose sign is the processor's whim
    if exact:
        return exact
    if rounding == "down" and function in (operator.add, operator.sub):
        return -function(-left, -right)  # x - x is -0 then (IEEE 754, section 6.3)
    return function(left, right)  # a float's zero, for its sign


def to_odd(exact: Number) -> float:
    """A float64 that every narrower format rounds as it would round the number itself.

    The bits that float64 has no place for are cut off. If one of them was a 1, the last bit becomes 1. So the float
    is on the same side of every number, and of every middle between two, of a format with at least two bits less.
    Boldo & Melquiond, 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    if isinstance(exact, float):
        return exact
    try:
        nearest = float(exact)
    except OverflowError:
        return sys.float_info.max if exact > 0 else -sys.float_info.max
    if abs(Fraction(nearest)) > abs(exact):
        nearest = math.nextafter(nearest, 0.0)
    cut = Fraction(nearest) != exact
    return math.nextafter(nearest, math.copysign(math.inf, exact)) if cut and split(nearest)[2] % 2 == 0 else nearest


def exponent(node: ast.expr) -> int:
    """The exponent behind **, a Python int: it is not rounded to the format. `ValueError` unless -1000 to 1000."""
    try:
        power = ast.literal_eval(node)
    except ValueError:
        power = None
    if type(power) is not int or abs(power) > 1000:
        raise ValueError(f"behind ** must be a whole number from -1000 to 1000, not {ast.unparse(node)}")
    return power


class Evaluation:
    """An expression in a format. `steps`: (what was done, exact result, bits, flags), the whole expression last."""

    def __init__(self, text: str, fmt: FloatFormat, rounding: str) -> None:
        self.text, self.fmt, self.rounding = text, fmt, rounding
        self.steps: list[tuple[str, Number, int, set[str]]] = []
        self.visit(parse(text))

    def visit(self, node: ast.expr) -> float:
        """The value of a node, rounded. Notes each step on the way."""
        if isinstance(node, ast.Constant):
            return self.round(ast.unparse(node), literal(node, self.text))
        if isinstance(node, ast.UnaryOp):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            if isinstance(node.operand, ast.Constant):  # -0.1 is one number, which matters when it is rounded up
                return self.round(ast.unparse(node), sign * literal(node.operand, self.text))
            return self.round("the other sign" if sign < 0 else "the same", sign * self.visit(node.operand))
        assert isinstance(node, ast.BinOp)
        left = self.visit(node.left)
        right = exponent(node.right) if isinstance(node.op, ast.Pow) else self.visit(node.right)
        symbol, function = OPERATORS[type(node.op)]
        exact, flags = operate(function, left, right, self.rounding), set()
        if isinstance(exact, float) and math.isnan(exact) and not (math.isnan(left) or math.isnan(right)):
            flags = {"invalid"}
        elif isinstance(exact, float) and math.isinf(exact) and math.isfinite(left) and math.isfinite(right):
            flags = {"divide_by_zero"}
        return self.round(f"{left!r} {symbol} {right!r}", exact, flags)

    def round(self, what: str, exact: Number, flags: Set[str] = frozenset()) -> float:
        """Round an exact result to the format, and note it as a step. flags: those that the operation raised."""
        bits, raised = encode_one(to_odd(exact), self.fmt, self.rounding)
        self.steps.append((what, exact, bits, raised | flags))
        return decode_one(bits, self.fmt)


# What is printed.


def colored(bits: int, fmt: FloatFormat) -> Text:
    """Sign, exponent and mantissa in their colours, with spaces between."""
    digits = f"{bits:0{fmt.width}b}"
    end = 1 + fmt.exponent_bits
    return Text(" ").join(
        Text(part, style) for part, style in zip((digits[0], digits[1:end], digits[end:]), STYLES) if part
    )


def neighbour(bits: int, fmt: FloatFormat, step: int) -> float | None:
    """The next number above (step 1) or below (step -1); None beyond the last."""
    sign_bit = 2 ** (fmt.width - 1)
    position = -(bits - sign_bit) if bits >= sign_bit else bits  # codes ascend with the numbers
    position += step
    if abs(position) > fmt.max_bits:
        return None
    return decode_one(-position + sign_bit if position < 0 else position, fmt)


def show(number: Number) -> str:
    """A number in full if 17 digits are enough, else the nearest float64 behind an ≈."""
    nearest = to_odd(number) if isinstance(number, float) or abs(number) > sys.float_info.max else float(number)
    return repr(nearest) if not math.isfinite(nearest) or Fraction(repr(nearest)) == number else f"≈ {nearest!r}"


def as_powers(bits: int, fmt: FloatFormat) -> str:
    """The number as ± 1.mantissa × 2^exponent, the mantissa in binary."""
    code = bits % 2 ** (fmt.width - 1)
    field, mantissa = code >> fmt.mantissa_bits, code % 2**fmt.mantissa_bits
    digits = f"{mantissa:0{fmt.mantissa_bits}b}" if fmt.mantissa_bits else "0"
    sign = "-" if bits != code else "+"
    return f"{sign}{min(field, 1)}.{digits} × 2^{max(field, 1) - fmt.bias}"


def facts(evaluation: Evaluation) -> Table:
    """The result, its neighbours, their distance, and the error."""
    fmt = evaluation.fmt
    _, exact, bits, flags = evaluation.steps[-1]
    value, code = decode_one(bits, fmt), bits % 2 ** (fmt.width - 1)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("bits", colored(bits, fmt) + Text(f"   0x{bits:0{-(-fmt.width // 4)}X}"))
    table.add_row("", Text.assemble(*zip(("sign ", "exponent ", "mantissa"), STYLES)))
    table.add_row("value", repr(value) if code > fmt.max_bits else f"{value!r} = {as_powers(bits, fmt)}")
    if code <= fmt.max_bits:
        below, above = (neighbour(bits, fmt, step) for step in (-1, 1))
        spacing = math.ldexp(1.0, max(code >> fmt.mantissa_bits, 1) - fmt.bias - fmt.mantissa_bits)
        table.add_row("next below", "none" if below is None else repr(below))
        table.add_row("next above", "none" if above is None else repr(above))
        table.add_row("spacing (ulp)", f"{spacing!r} = 2^{int(math.log2(spacing))}")
        if math.isfinite(to_odd(exact)):
            error = Fraction(value) - Fraction(exact)
            table.add_row("exact", show(exact))
            table.add_row("rounding error", f"{to_odd(error):.6g} = {to_odd(error / Fraction(spacing)):.4g} ulp")
    table.add_row("flags", ", ".join(sorted(flags)) or "none")
    return table


def steps(evaluation: Evaluation) -> Table:
    """A row for each operation: its exact result, and that rounded."""
    table = Table("step", "exactly", "rounded", box=None, pad_edge=False)
    for what, exact, bits, flags in evaluation.steps:
        if flags or " " in what:  # not the numbers that came as they were written
            table.add_row(what, show(exact), repr(decode_one(bits, evaluation.fmt)))
    return table


def side_by_side(text: str, rounding: str) -> Table:
    """A row for each format: the expression's result and error in it."""
    table = Table("format", "bits", "value", "error", box=None, pad_edge=False)
    for name, fmt in FORMATS.items():
        _, exact, bits, _ = Evaluation(text, fmt, rounding).steps[-1]
        value = decode_one(bits, fmt)
        finite = math.isfinite(value) and math.isfinite(to_odd(exact))
        error = f"{to_odd(Fraction(value) - Fraction(exact)):.2g}" if finite else ""
        table.add_row(name, colored(bits, fmt), f"{value:.9g}", error)
    return table


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse, too, for options that it does not know."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """The command line: prints the steps of an expression, its result taken apart, and the same in other formats."""
    parser = OneLineParser(prog="python -m precision", description=__doc__)
    parser.add_argument(
        "expression", nargs="+", help="a number, or numbers with + - * / ** and parentheses (quote these for the shell)"
    )
    parser.add_argument("--format", default="FP16", type=str.upper, help=f"{', '.join(FORMATS)}; default: FP16")
    parser.add_argument("--rounding", default="nearest-even", help=f"{', '.join(ROUNDINGS[:5])}; default: nearest-even")
    # -(1 + 2) is no option. A leading space tells argparse so.
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([re.sub(r"^-(?=[\d.(])", " -", argument) for argument in arguments])
    if options.format not in FORMATS:
        parser.error(f"unknown format {options.format!r}: use one of {', '.join(FORMATS)}")
    if options.rounding not in ROUNDINGS[:5]:
        parser.error(f"unknown rounding {options.rounding!r}: use one of {', '.join(ROUNDINGS[:5])}")
    text = " ".join(options.expression).strip()
    try:
        evaluation = Evaluation(text, FORMATS[options.format], options.rounding)
        comparison = side_by_side(text, options.rounding)
    except ValueError as error:
        parser.error(str(error))
    except RecursionError:
        parser.error("the expression is nested too deeply, as a sum of a thousand terms is: use fewer")

    console = Console(highlight=False)
    fmt = evaluation.fmt
    console.print(
        f"{text} in {options.format} ({fmt.exponent_bits} bits of exponent with bias {fmt.bias}, "
        f"{fmt.mantissa_bits} of mantissa), {options.rounding}\n",
        soft_wrap=True,
    )
    if len(evaluation.steps) > 1:
        console.print(steps(evaluation), "")
    console.print(facts(evaluation), "")
    console.print(comparison)


if __name__ == "__main__":
    main()
