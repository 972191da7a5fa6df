"""A number becomes one of a format: the nearest.

IEEE 754-2019, section 4.3.1.
"""

import math

from precision.layout import BitLayout


def nearest(x: float, fmt: BitLayout) -> float:
    """The number of the format that is nearest to x; of two that are equally near, the one that ends in 0.

    fmt: a format with infinities, which what is too large becomes. Zeros, infinities and NaN stay what they are.
    """
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    step = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    rounded = round(x / step) * step  # to a whole number of steps, ties to even
    if abs(rounded) > fmt.max:
        rounded = math.inf
    elif not fmt.subnormals and abs(rounded) < fmt.smallest_normal:
        rounded = 0.0
    return math.copysign(rounded, x)
