"""Numbers in 16 bits and fewer, bit by bit, and how to train with them.

A floating-point number is (-1)^sign × 2^(exponent - bias) × 1.mantissa. With 16 bits there is
little room: FP16 has 5 bits of exponent and 10 of mantissa, so it ends at 65504, small gradients
round to zero, and a small step added to a large weight is lost. Three habits make training work all
the same: sums in FP32, a loss scale that moves the gradients into range, and FP32 master weights.

Reading order: formats, arrays, fast, conversions, operands, arithmetic, exact, accumulate, partial_sums, islands,
emulate, scaling, master, histogram. `emulate` is in the module of its name.

IEEE 754-2019, "Standard for Floating-Point Arithmetic" (formats, rounding, exceptions);
Micikevicius et al., 2018, "Mixed Precision Training" (the three habits).
"""

from precision import accumulate
from precision.arithmetic import add, compare, divide, fma, multiply, sqrt, subtract
from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Flags, FloatFormat
from precision.histogram import Histogram, exponent_histogram
from precision.master import MasterWeights
from precision.scaling import DynamicLossScaler, StaticLossScaler

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP8_E4M3",
    "FP8_E5M2",
    "TF32",
    "DynamicLossScaler",
    "Flags",
    "FloatFormat",
    "Histogram",
    "MasterWeights",
    "StaticLossScaler",
    "accumulate",
    "add",
    "compare",
    "divide",
    "exponent_histogram",
    "fma",
    "multiply",
    "sqrt",
    "subtract",
]
