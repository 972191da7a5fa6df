"""Numbers share a scale: one power of two for 32 of them.

OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
"""

import math

from precision.layout import BitLayout


def encode_block(numbers: list[float], fmt: BitLayout) -> tuple[int, list[int]]:
    """The code of the scale, 0 to 254, and a code of `fmt` for each number. The numbers are finite float32 numbers."""
    largest = max(abs(x) for x in numbers)
    exponent = -127
    if largest > 0:
        exponent = math.frexp(largest)[1] - 1 - fmt.max_exponent
        exponent = min(max(exponent, -127), 127)
    codes = []
    for x in numbers:
        scaled = math.ldexp(abs(x), -exponent)
        octave = max(math.frexp(scaled)[1] - 1, fmt.min_exponent) if scaled else fmt.min_exponent
        steps = round(math.ldexp(scaled, fmt.mantissa_bits - octave))  # whole ones, ties to even
        # A normal number has 2^mantissa_bits steps and more: this leading 1 raises the exponent field by one.
        code = ((octave - fmt.min_exponent) << fmt.mantissa_bits) + steps
        code = min(code, fmt.max_bits)
        if math.copysign(1, x) < 0:
            code += 1 << (fmt.width - 1)
        codes.append(code)
    return exponent + 127, codes
