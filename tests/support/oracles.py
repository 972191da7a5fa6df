"""Two other ways to the same results, to compare `precision.arithmetic` with: bits and flags, in all five roundings.

softfloat    Berkeley SoftFloat, in the wheel of softfloatpy: FP16
by_float64   one operation in float64, then `encode`: any format of at most 16 bits
"""

import numpy as np

ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "up", "down")
FLAGS = ("inexact", "underflow", "overflow", "divide_by_zero", "invalid")  # SoftFloat's bits 0 to 4


SOFTFLOAT = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "sqrt": "sqrt", "fma": "mul_add"}


def softfloat(operation, rounding, *operands):
    """(bits, flags by name) of contiguous uint16 arrays of one length; tininess is judged after rounding."""
    import softfloatpy

    modes = ("NEAR_EVEN", "NEAR_MAX_MAG", "MIN_MAG", "MAX", "MIN")
    softfloatpy.set_tininess_mode(softfloatpy.TininessMode.AFTER_ROUNDING)
    softfloatpy.set_rounding_mode(softfloatpy.RoundingMode[modes[ROUNDINGS.index(rounding)]])
    function = getattr(softfloatpy, f"f16_{SOFTFLOAT[operation]}")
    result, flags = np.empty_like(operands[0]), np.empty(operands[0].shape, np.uint8)
    for i, numbers in enumerate(zip(*operands)):
        softfloatpy.set_exception_flags(0)
        number = function(*(softfloatpy.Float16.from_bytes(int(x).to_bytes(2, "big")) for x in numbers))
        result[i], flags[i] = int.from_bytes(number.to_bytes(), "big"), softfloatpy.get_exception_flags()
    return result, {name: (flags >> i & 1).astype(bool) for i, name in enumerate(FLAGS)}


# float64.


def by_float64(operation, fmt, rounding, *operands):
    """(bits, flags by name); in a format without NaNs the bits of an invalid operation mean nothing.

    Products of two numbers of at most 16 bits are exact in float64. A sum may not be: it is rounded to odd, whose last
    1 says that something was left out, so that the rounding that follows is right. Quotients and roots of p bits
    are too far from what lies half-way between two numbers for the 53 bits of float64 to hide it (53 ≥ 2p + 2).
    """
    numbers = [np.asarray(fmt.decode(bits), np.float64) for bits in operands]
    with np.errstate(all="ignore"):
        if operation == "subtract":
            numbers[1] = -numbers[1]
        if operation in ("add", "subtract"):
            exact = add_to_odd(*numbers, rounding)
        elif operation == "multiply":
            exact = numbers[0] * numbers[1]
        elif operation == "fma":
            exact = add_to_odd(numbers[0] * numbers[1], numbers[2], rounding)
        elif operation == "divide":
            exact = numbers[0] / numbers[1]
        else:
            exact = np.sqrt(numbers[0])
    encodable = exact if fmt.nans else np.nan_to_num(exact, nan=0.0, posinf=np.inf, neginf=-np.inf)
    bits, flags = fmt.encode(encodable, rounding, return_flags=True)
    flags = {name: np.array(getattr(flags, name)) for name in FLAGS}

    came_in = np.logical_or.reduce([np.isnan(x) for x in numbers])
    flags["invalid"] = np.isnan(exact) & ~came_in
    for pattern in operands:
        code = pattern & (2 ** (fmt.width - 1) - 1)
        if fmt.infinities and fmt.nans:  # else NaN has one code, a quiet one
            flags["invalid"] |= (code > fmt.infinity_bits) & (code < fmt.nan_bits)
    if operation == "fma":  # by SoftFloat's choice, and ours, invalid whatever is added
        a, b = numbers[:2]
        flags["invalid"] |= (np.isinf(a) & (b == 0)) | ((a == 0) & np.isinf(b))
    if operation == "divide":
        flags["divide_by_zero"] = (numbers[1] == 0) & np.isfinite(numbers[0]) & (numbers[0] != 0)
        for name in ("inexact", "overflow"):  # that of the infinity that was encoded
            flags[name] &= ~flags["divide_by_zero"]
    return bits, flags


def add_to_odd(a, b, rounding):
    """a + b in float64, away from zero or towards it to the neighbour whose last bit is 1, if it is inexact."""
    total = a + b
    # Knuth's two-sum: what the addition lost, exactly.
    other = total - a
    lost = (a - (total - other)) + (b - other)
    is_even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
    total = np.where(is_even & np.isfinite(lost) & (lost != 0), np.nextafter(total, np.copysign(np.inf, lost)), total)
    cancelled = (total == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(cancelled, -0.0 if rounding == "down" else 0.0, total)


# Operands.


def boundaries(fmt):
    """Patterns at every kind of boundary: each exponent field with mantissas at both ends and in the middle."""
    half = 2**fmt.mantissa_bits // 2
    ends = *range(4), *range(half - 2, half + 3), *range(2 * half - 3, 2 * half), 2 * half // 3
    mantissas = np.array(sorted({m for m in ends if 0 <= m < 2**fmt.mantissa_bits}))
    fields = np.arange(2 ** (fmt.exponent_bits + 1))  # with the sign
    return ((fields[:, None] << fmt.mantissa_bits) | mantissas).ravel()
