"""a · b on bit patterns. Simpler than addition: nothing is aligned. operate_multiply(x, y, fmt) multiplies the
significands, adds the exponents, and combines the signs; then normalise, round and pack, as for a sum.

The product of two significands with p and q places behind the point has p + q: `point` must say so to normalise
and to round. One operand is unpacked with EXTRA places more, the other without, so that the product has EXTRA
more in all.
"""

import numpy as np

from precision import arithmetic
from tests.exercises import number_kit
from tests.exercises.kit import fail, wrong

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
    wrong("point-of-a-sum", ("2 * fmt.mantissa_bits + EXTRA", "fmt.mantissa_bits + EXTRA")),
    wrong("extra-twice", ("unpack(b, fmt)", "unpack(b, fmt, EXTRA)")),
    wrong("forgets-to-normalise", ("normalise(operate_multiply(x, y, fmt), point)", "operate_multiply(x, y, fmt)")),
    wrong("zero-times-infinity", ("(p.infinite & q.zero) | (p.zero & q.infinite)", "p.nan | q.nan")),
    wrong("one-order-only", ("(p.infinite & q.zero) | (p.zero & q.infinite)", "p.infinite & q.zero")),
    wrong("sign-of-the-first", ("sign=product.sign", "sign=x.sign")),
    wrong("truncates", ("round(product, point, fmt, rounding), fmt", 'round(product, point, fmt, "toward-zero"), fmt')),
]


def check() -> None:
    def times(x: float, y: float) -> float:
        a, b = (int(np.float16(v).view(np.uint16)) for v in (x, y))
        return float(np.uint16(arithmetic.multiply(a, b)).view(np.float16))

    inf = float("inf")
    one = times(1, 1)
    if one != 1:
        if one == 8:
            fail(
                "extra-twice", "1 · 1 gives 8: both operands were unpacked with EXTRA places, 3 more than `point` says."
            )
        fail("point-of-a-sum", f"1 · 1 gives {one:g}: a product has the places of both factors behind its point.")
    if times(1.5, 1.5) != 2.25:
        fail(
            "forgets-to-normalise",
            f"1.5 · 1.5 gives {times(1.5, 1.5):g}, not 2.25: it has two digits before the point.",
        )
    if not np.isnan(times(0, inf)) and np.isnan(times(inf, 0)):
        fail("one-order-only", "∞ · 0 is NaN, and 0 · ∞ is not: look at both orders.")
    if not np.isnan(times(inf, 0)):
        fail("zero-times-infinity", f"∞ · 0 has no value, it must be NaN, not {times(inf, 0)}.")
    if times(2, -inf) != -inf:
        fail("sign-of-the-first", f"2 · -∞ gives {times(2, -inf)}: the sign is that of the product.")
    if times(1.001, 1.003) == 1.003:
        fail("truncates", "1.001 · 1.003 was cut off, not rounded to nearest.")
    numbers = np.random.default_rng(0)
    a, b = numbers.integers(0, 2**16, (2, 50_000), dtype=np.uint16)
    with np.errstate(all="ignore"):
        want = a.view(np.float16) * b.view(np.float16)
    got = np.asarray(arithmetic.multiply(a, b)).view(np.float16)
    bad = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if bad.any():
        i = int(bad.argmax())
        below = np.abs(got[bad].astype(np.float64)) <= np.abs(want[bad].astype(np.float64))
        if below.all() and bad.mean() > 0.1:
            fail("truncates", f"{a.view(np.float16)[i]} · {b.view(np.float16)[i]} is {want[i]}: cut off, not rounded.")
        fail("values", f"{a.view(np.float16)[i]} · {b.view(np.float16)[i]} is {want[i]}, not {got[i]}.")


draw = number_kit.operations


def result(case: number_kit.Operation) -> dict[str, str]:
    return number_kit.bits_and_flags(case, arithmetic.multiply, "·")
