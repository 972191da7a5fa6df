"""How small an update of a weight is lost, because the sum is rounded back to the weight.

Micikevicius et al., 2018, "Mixed Precision Training", section 3.1.
"""

import math

from precision.layout import BitLayout


def border(weight: float, up: bool, fmt: BitLayout) -> tuple[float, bool]:
    """The border between updates that are lost and those that are not; and whether one of just this size is lost.

    weight: a number of the format, smaller than its largest. up: the update is added to it; otherwise it is subtracted.
    The sum is rounded once, to nearest, ties to even.
    """
    fraction, exponent = math.frexp(abs(weight))  # 0.5 <= fraction < 1
    exponent = max(exponent - 1, fmt.min_exponent) if weight else fmt.min_exponent
    step = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    is_even = abs(weight) / step % 2 == 0
    towards_zero = up == (weight < 0)
    if towards_zero and fraction == 0.5 and exponent > fmt.min_exponent:
        step /= 2  # below a power of two numbers lie twice as close
    return step / 2, is_even
