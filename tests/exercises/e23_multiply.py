"""a · b on bit patterns. Simpler than addition: nothing is aligned. operate_multiply(x, y, fmt) multiplies the
significands, adds the exponents, and combines the signs; then normalise, round and pack, as for a sum.

The product of two significands with p and q places behind the point has p + q: `point` must say so to normalise
and to round. One operand is unpacked with EXTRA places more, the other without, so that the product has EXTRA
more in all.
"""

from precision import arithmetic
from tests.exercises import number_kit
from tests.exercises.kit import wrong

PLAN = [
    "Unpack both, the first with EXTRA places more. How many places does the product have behind the point?",
    "operate_multiply, normalise(…, point), and pack(*round(…, point, fmt, rounding), fmt, rounding).",
    "Classify both. Invalid: 0 · ∞, in either order. Infinite: where one is.",
    "Return what settle makes of it: settle(result, fmt, p, q, sign=…, infinite=…, invalid=…), with the sign of "
    "the product.",
]
HINTS = [
    "Each significand has fmt.mantissa_bits places, and the first EXTRA more: point = 2 · mantissa_bits + EXTRA.",
    "The product has its sign in product.sign, also where it is infinite.",
    "(p.infinite & q.zero) | (p.zero & q.infinite)",
]
AFTER = (
    "The product of two significands is exact as a whole number, so only one rounding happens. The places behind the "
    "two points add up, and `point` tells that to `normalise` and `round`. One operand brings the extra places; the "
    "other needs none. The whole numbers know nothing of infinity and NaN: `settle` replaces what they gave. Read "
    "next: `divide` in precision/arithmetic.py, where a remainder makes the last bit sticky."
)
WRONG = [
    wrong("point-of-a-sum", "A product has the places of both factors behind its point.",
          ("2 * fmt.mantissa_bits + EXTRA", "fmt.mantissa_bits + EXTRA")),
    wrong("extra-twice", "1 · 1 gives 8: both operands were unpacked with EXTRA places, 3 more than `point` says.",
          ("unpack(b, fmt)", "unpack(b, fmt, EXTRA)")),
    wrong("forgets-to-normalise", "It has two digits before the point.",
          ("normalise(operate_multiply(x, y, fmt), point)", "operate_multiply(x, y, fmt)")),
    wrong("zero-times-infinity", "∞ · 0 has no value: it must be NaN.",
          ("(p.infinite & q.zero) | (p.zero & q.infinite)", "p.nan | q.nan")),
    wrong("one-order-only", "∞ · 0 is NaN, and 0 · ∞ is not: look at both orders.",
          ("(p.infinite & q.zero) | (p.zero & q.infinite)", "p.infinite & q.zero")),
    wrong("sign-of-the-first", "The sign is that of the product.", ("sign=product.sign", "sign=x.sign")),
    wrong("truncates", "1.001 · 1.003 was cut off, not rounded to nearest.",
          ("round(product, point, fmt, rounding), fmt", 'round(product, point, fmt, "toward-zero"), fmt')),
]  # fmt: skip


draw = number_kit.operations


def result(case: number_kit.Operation) -> dict[str, str]:
    return number_kit.bits_and_flags(case, arithmetic.multiply, "·")
