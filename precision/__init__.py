"""Numbers in 16 bits and fewer, bit by bit, and how to train with them.

A floating-point number is (-1)^sign × 2^(exponent - bias) × 1.mantissa. With 16 bits there is
little room: FP16 has 5 bits of exponent and 10 of mantissa, so it ends at 65504, small gradients
round to zero, and a small step added to a large weight is lost. Three habits make training work all
the same: sums in FP32, a loss scale that moves the gradients into range, and FP32 master weights.

Reading order:

    layout         what a format is: its fields, its special codes
    one_number     one number into the bits of a format, and out again: split, align, round off, pack
    arrays         NumPy arrays and torch tensors on one path, in pieces
    fast           the four steps on arrays of integers
    exact          what an emulation must leave alone
    formats        encode, decode and quantize: the class FloatFormat, and FP16, BF16, TF32, FP32, FP8_E4M3, FP8_E5M2
    blocks         one scale for 32 numbers: FP8, FP6 and FP4 as OCP's Microscaling has them
    operands       the patterns that arithmetic takes: checks and pieces
    arithmetic     add, multiply, divide, fma, square root, compare on bits
    accumulate     sums, products and softmax with an FP16 and with an FP32 accumulator
    partial_sums   the same sums inside of matrix products and convolutions
    islands        which operators stay in FP32 under emulation
    emulate        train as if every operation were in 16 bits: `from precision.emulate import emulate`
    scaling        static and dynamic loss scaling
    master         FP32 master weights
    histogram      where gradients lie on the exponent axis
    __main__       python -m precision 0.1: a number taken apart

IEEE 754-2019, "Standard for Floating-Point Arithmetic" (formats, rounding, exceptions);
Micikevicius et al., 2018, "Mixed Precision Training" (the three habits).
"""

from precision import accumulate
from precision.arithmetic import add, compare, divide, fma, multiply, sqrt, subtract
from precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Flags, FloatFormat
from precision.histogram import Histogram, exponent_histogram
from precision.master import MasterWeights
from precision.scaling import DynamicLossScaler, StaticLossScaler

__all__ = ["FloatFormat", "FP16", "BF16", "TF32", "FP32", "FP8_E4M3", "FP8_E5M2", "Flags"]
__all__ += ["add", "subtract", "multiply", "divide", "fma", "sqrt", "compare", "accumulate"]
__all__ += ["StaticLossScaler", "DynamicLossScaler", "MasterWeights", "Histogram", "exponent_histogram"]
