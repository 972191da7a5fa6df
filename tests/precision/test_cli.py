"""python -m precision: what is printed, and what is refused in one line."""

import re
import runpy
import sys

import pytest

from precision.__main__ import Evaluation, as_powers, main, neighbour, to_odd
from precision.formats import FP16, FP32
from precision.one_number import ROUNDINGS, decode_one, encode_one

OPTION = re.compile(r" (?=--)|(?<=--rounding) |(?<=--format) |(?<=--colour) ")  # what stands before and behind its name


def run(capsys, *arguments):
    main(list(arguments))
    return capsys.readouterr().out


def fact(output, name):
    return re.search(rf"^{re.escape(name)} +(.*?) *$", output, re.MULTILINE).group(1)


def test_a_tenth(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["precision", "0.1"])
    runpy.run_path(Evaluation.__init__.__code__.co_filename, run_name="__main__")
    output = capsys.readouterr().out
    assert fact(output, "bits") == "0 01011 1001100110   0x2E66"
    assert fact(output, "value") == "0.0999755859375 = +1.1001100110 × 2^-4"
    assert fact(output, "next below") == "0.09991455078125"
    assert fact(output, "next above") == "0.10003662109375"
    assert fact(output, "spacing (ulp)") == "6.103515625e-05 = 2^-14"
    assert fact(output, "exact") == "0.1"
    assert fact(output, "rounding error") == "-2.44141e-05 = -0.4 ulp"
    assert fact(output, "flags") == "inexact"
    assert fact(output, "FP8_E4M3") == "0 0011 101                          0.1015625     0.0016"


def test_a_sum_that_is_not_there(capsys):
    output = run(capsys, "2048", "+", "1")
    assert fact(output, "2048.0 + 1.0") == "2049.0   2048.0"
    assert fact(run(capsys, "1 + 0.1"), "0.1").split() == ["0.1", "0.0999755859375"], "what came in is rounded, too"
    assert fact(output, "rounding error") == "-1 = -0.5 ulp"
    assert fact(output, "next below") == "2047.0" and fact(output, "next above") == "2050.0"


@pytest.mark.parametrize(
    ("expression", "value", "flags"),
    [
        ("1 / 3 * 3", "1.0", "inexact"),
        ("2 ** -24", "5.960464477539063e-08", "none"),
        ("2 ** -25", "0.0", "inexact, underflow"),
        ("-2 ** 2", "-4.0", "none"),
        ("-(1 + 2)", "-3.0", "none"),
        ("-1.5", "-1.5", "none"),
        ("65504 + 15.9", "65504.0", "inexact"),
        ("65504 + 16", "inf", "inexact, overflow"),
        ("1 / 0", "inf", "divide_by_zero"),
        ("-1 / 0", "-inf", "divide_by_zero"),
        ("0 / 0", "nan", "invalid"),
        ("1e9 - 1e9", "nan", "invalid"),
        ("0 ** -1", "inf", "divide_by_zero"),
        ("-0", "-0.0", "none"),
        ("(-0.0) ** -2", "inf", "divide_by_zero"),
        ("(-0.0) ** -3", "-inf", "divide_by_zero"),
        ("0x10 + 1_000", "1016.0", "none"),
        ("2048 + 1 --rounding up", "2050.0", "inexact"),
        ("2048 + 1 --format FP32", "2049.0", "none"),
        ("2048 + 1 + 1", "2048.0", "inexact"),
        ("2048 + (1 + 1)", "2050.0", "none"),
        ("-0.1 --rounding up", "-0.0999755859375", "inexact"),
        ("-0.1 --rounding down", "-0.10003662109375", "inexact"),
        ("1 - 1 --rounding down", "-0.0", "none"),
        ("0 + 0 --rounding down", "0.0", "none"),
        ("1 - 1", "0.0", "none"),
        ("0 * 1 --rounding down", "0.0", "none"),
        ("1 + 1e9", "inf", "none"),
        ("1000 ** 1000 --format FP32", "inf", "inexact, overflow"),
    ],
)
def test_expressions(capsys, expression, value, flags):
    output = run(capsys, *OPTION.split(expression))
    assert fact(output, "value").split(" = ")[0] == value and fact(output, "flags") == flags
    assert value != "nan" or fact(output, "bits").startswith("0 ")


def test_a_decimal_is_rounded_once():
    """The nearest float64 of this is a tie; the number itself lies above it."""
    text = "1." + "00048828125" + "0" * 20 + "1"
    assert float(text) == 1 + 2.0**-11
    assert Evaluation(text, FP16, "nearest-even").steps[-1][2] == 0x3C01
    # Cut to float64 this ends in a 1 already: to the next one up it would be a tie, which goes the other way.
    text = "1.0014648437499999999"
    assert float(text) == 1 + 3 * 2.0**-11
    assert Evaluation(text, FP16, "nearest-even").steps[-1][2] == 0x3C01
    for rounding in ROUNDINGS[:5]:
        (_, exact, bits, _), *_ = Evaluation("1e-50", FP32, rounding).steps
        assert bits == (rounding == "up") and to_odd(exact) != 0


def test_the_ends_have_no_neighbour(capsys):
    assert fact(run(capsys, "65504"), "next above") == "none"
    assert fact(run(capsys, "-448", "--format", "fp8_e4m3"), "next below") == "none"
    assert fact(run(capsys, "0"), "next below") == "-5.960464477539063e-08"
    assert fact(run(capsys, "-0"), "next above") == "5.960464477539063e-08"
    assert "next" not in run(capsys, "1e9")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 +", "cannot read '1 +'"),
        ("", "cannot read ''"),
        ("abs(1)", "only numbers, + - * / ** and parentheses are understood, not 'abs(1)'"),
        ("__import__('os')", "only numbers"),
        ("x", "only numbers, + - * / ** and parentheses are understood, not 'x'"),
        ("True", "only numbers"),
        ("3j", "only numbers"),
        ("1 // 2", "only numbers"),
        ("9 ** 9 ** 9", "behind ** must be a whole number from -1000 to 1000, not 9 ** 9"),
        ("2 ** 100000", "behind ** must be a whole number from -1000 to 1000, not 100000"),
        ("2 ** 0.5", "behind ** must be a whole number"),
        ("1e999", "beyond the range of float64"),
        ("1e-999", "beyond the range of float64"),
        ("(" * 300 + "1" + ")" * 300, "cannot read"),
        ("1" + "+1" * 100_000, "cannot read"),
        ("abs(1" + "+1" * 1500 + ")", "nested too deeply"),
        ("1" + "-" * 1200 + "1", "nested too deeply"),
        ("1" + "+1*1" * 999, "nested too deeply"),
        ("1 --format fp4", "unknown format 'FP4': use one of FP16, BF16, "),
        ("1 --rounding even", "unknown rounding 'even': use one of nearest-even, "),
        ("1 --rounding stochastic", "unknown rounding 'stochastic'"),
        ("1 --colour red", "unrecognized arguments"),
        (None, "arguments are required: expression"),
    ],
)
def test_what_is_refused(capsys, expression, message):
    with pytest.raises(SystemExit) as stopped:
        main([] if expression is None else OPTION.split(expression))
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and not captured.out and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m precision: ") and message in captured.err


def test_colours(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    bits = re.search("^bits.*$", run(capsys, "0.1"), re.MULTILINE).group()
    colours = re.findall(r"\x1b\[([\d;]+)m(\d+)\x1b", bits)
    assert [digits for _, digits in colours] == ["0", "01011", "1001100110"]
    assert len({colour for colour, _ in colours}) == 3


def test_neighbours_and_values_of_every_fp16_number():
    """`as_powers` says the same as `decode_one`, and what is written is read back."""
    for bits in range(0, 0x7C00, 7):
        for pattern in (bits, bits | 0x8000):
            value = decode_one(pattern, FP16)
            significand, exponent = as_powers(pattern, FP16).split(" × 2^")
            assert int(significand.replace(".", ""), 2) * 2.0 ** (int(exponent) - 10) == value
            above = neighbour(pattern, FP16, 1)
            if above is not None:
                assert above > value and encode_one((above + value) / 2, FP16, "up")[0] == encode_one(above, FP16)[0]
