"""a + b on bit patterns, with whole numbers only, as a processor does it:

    unpack      unpack(a, fmt, EXTRA): a number with .sign, .exponent, .significand, which has EXTRA = 3 places more:
                guard, round, sticky
    align       x, y = align(x, y): both to the larger exponent
    operate     operate_add(x, y, rounding): the signed sum of the significands; of x - x, `rounding` decides the sign
    normalise   until one 1 is before the point: normalise(x, point)
    round       round(x, point, fmt, rounding) gives three things, which pack takes: pack(*round(…), fmt, rounding)

`point` says how many places of a significand are behind the point: here fmt.mantissa_bits + EXTRA. What is not
a finite number is settled last: classify(bits, fmt) has .zero .infinite .nan, and settle(result, fmt, p, q,
sign=…, infinite=…, invalid=…) puts infinity, of that sign, or NaN where it belongs.
"""

from precision import arithmetic
from tests.exercises import number_kit
from tests.exercises.kit import wrong

PLAN = [
    "Unpack both with EXTRA more places, and align them.",
    "Operate, normalise, round, pack.",
    "Classify both operands. Invalid: infinity and infinity of different signs. Infinite: where one of them is; "
    "its sign is that of the one that is infinite.",
    "Return what settle makes of it.",
]
HINTS = [
    "settle puts NaN where `invalid` is true, and where an operand is NaN, by itself.",
    "x, y = align(unpack(a, fmt, EXTRA), unpack(b, fmt, EXTRA)) keeps the signs in x.sign and y.sign.",
    "torch.where(condition, this, that) is imported as `where`: sign = where(p.infinite, x.sign, y.sign).",
]
AFTER = (
    "The package has no branch on the data. All numbers go through all steps, and `settle` puts infinity and NaN in "
    "their places afterwards. Subtraction is no case of its own, because `operate_add` adds signed whole numbers. "
    "Three more places are enough for every rounding, since the lowest is sticky. There is one rounding, at the end, "
    "so the result is the exact sum, rounded once. Read next: `fma` in precision/arithmetic.py, which adds a product "
    "that was never rounded."
)
ALIGN = "align(unpack(a, fmt, EXTRA), unpack(b, fmt, EXTRA))"
WRONG = [
    wrong("forgets-to-align", "1024 + 1 gives 2048: the two have different exponents. Align them first.",
          (ALIGN, "unpack(a, fmt, EXTRA), unpack(b, fmt, EXTRA)")),
    wrong("loses-guard-bits", "2048 + 3 is half-way between 2050 and 2052 and goes to the even one, 2052; the bits "
          "that moved out at the right were lost before rounding. Unpack with EXTRA places.",
          (ALIGN, f"(n._replace(significand=n.significand >> EXTRA << EXTRA) for n in {ALIGN})")),
    wrong("forgets-to-normalise", "The leading 1 has moved. Normalise the sum.",
          ("normalise(operate_add(x, y, rounding), point)", "operate_add(x, y, rounding)")),
    wrong("infinity-minus-infinity", "∞ - ∞ has no value: it must be NaN.",
          ("p.infinite & q.infinite & (x.sign != y.sign)", "p.nan | q.nan")),
    wrong("all-infinities-invalid", "∞ + ∞ is ∞; only of different signs they have no sum.",
          ("& (x.sign != y.sign)", "")),
    wrong("sign-of-the-first", "1 + -∞ gives ∞: the sign is that of the operand that is infinite.",
          ("sign = where(p.infinite, x.sign, y.sign)", "sign = x.sign")),
    wrong("second-infinity-forgotten", "1 + ∞, rounded toward zero, is ∞, and gave a number: either of the two may be "
          "∞.", ("infinite=p.infinite | q.infinite", "infinite=p.infinite")),
    wrong("truncates", "2048 - 0.25 is nearest to 2048, and gives 2047: it was cut off, not rounded as was asked for.",
          ("round(total, point, fmt, rounding), fmt", 'round(total, point, fmt, "toward-zero"), fmt')),
]  # fmt: skip


draw = number_kit.operations


def result(case: number_kit.Operation) -> dict[str, str]:
    return number_kit.bits_and_flags(case, arithmetic.add, "+")
