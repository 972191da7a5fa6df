"""What rounding to a format is, by looking it up: all numbers of the format stand in a table, in order.

The nearest ones below and above |x| are found by bisection, and compared in float64, where they and their middle
are exact. The position in the table is the code, since codes ascend as the numbers do. Nothing here knows of bits.
"""

import numpy as np

from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16


class TableOracle:
    """For formats of at most 16 bits (without saturation, with subnormals); x in float64."""

    def __init__(self, exponent_bits, mantissa_bits, infinities=True):
        self.mantissas = 2**mantissa_bits
        bias = 2 ** (exponent_bits - 1) - 1
        fields = 2**exponent_bits - 1 if infinities else 2**exponent_bits
        fraction = np.arange(self.mantissas) / self.mantissas
        rows = [fraction * 2.0 ** (1 - bias)]
        rows += [(1 + fraction) * 2.0 ** (field - bias) for field in range(1, fields)]
        numbers = np.concatenate(rows)
        # One number more stands for everything that is too large; in the E4M3 manner the last code is not a number.
        self.numbers = np.append(numbers, 2.0 ** (fields - bias)) if infinities else numbers
        self.too_large = len(self.numbers) - 1
        self.smallest_normal = 2.0 ** (1 - bias)
        self.step_below = self.smallest_normal / self.mantissas / 2  # with exponents that go on below
        self.infinities = infinities
        self.width = 1 + exponent_bits + mantissa_bits

    def boundaries(self, dtype=np.float64):
        """Every number, every middle of two, both neighbours of each in dtype, and what lies beyond; both signs."""
        exact = np.concatenate([self.numbers, (self.numbers[1:] + self.numbers[:-1]) / 2])
        with np.errstate(over="ignore"):  # of BFloat16, float32 has no number beyond the largest
            exact = exact.astype(dtype)
        infinity = dtype(np.inf)
        x = np.concatenate([exact, np.nextafter(exact, infinity), np.nextafter(exact, -infinity)])
        x = np.concatenate([x, dtype([np.inf, np.finfo(dtype).max, np.finfo(dtype).tiny])])
        return np.unique(np.concatenate([x, -x]).view(f"u{x.itemsize}")).view(dtype)  # -0 and 0 are two

    def encode(self, x, rounding):
        """Bits, and the flags inexact, underflow, overflow; x: no NaNs."""
        magnitude, negative = np.abs(x), np.signbit(x)
        low = np.searchsorted(self.numbers, magnitude, side="right") - 1
        exact = self.numbers[low] == magnitude
        high = np.minimum(low + 1, self.too_large)
        middle = (self.numbers[low] + self.numbers[high]) / 2
        even_is_low = low % self.mantissas % 2 == 0
        away = {"toward-zero": False, "up": ~negative, "down": negative}.get(rounding)
        if away is not None:
            takes_high = away & ~exact
        else:
            ties_high = ~even_is_low if rounding == "nearest-even" else True
            takes_high = (magnitude > middle) | ((magnitude == middle) & ties_high & ~exact)
        code = np.where(takes_high, high, low)

        finite = np.isfinite(x)
        overflow = (code == self.too_large) & (finite | (not self.infinities))
        stays_finite = overflow & finite & (False if away is None else ~(away | np.zeros_like(negative)))
        code = np.where(stays_finite, self.too_large - 1, code)
        # Tiny: below the smallest normal number after rounding to steps of `step_below`.
        if away is None:
            rises = magnitude >= self.smallest_normal - self.step_below / 2
        else:
            rises = away & (magnitude > self.smallest_normal - self.step_below)
        inexact = overflow | (~exact & finite)
        underflow = inexact & (magnitude < self.smallest_normal) & ~rises
        return code | negative.astype(np.int64) << (self.width - 1), inexact, underflow, overflow


ORACLES = {FP16: TableOracle(5, 10), BF16: TableOracle(8, 7), FP8_E5M2: TableOracle(5, 2)}
ORACLES |= {FP8_E4M3: TableOracle(4, 3, infinities=False)}
