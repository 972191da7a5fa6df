"""Arithmetic on bit patterns, its operands, and whether two results are the same."""

import numpy as np

from precision import arithmetic
from tests.support.oracles import FLAGS

OPERANDS = {"add": 2, "subtract": 2, "multiply": 2, "divide": 2, "fma": 3, "sqrt": 1}


def apply(operation, fmt, rounding, *operands):
    bits, flags = getattr(arithmetic, operation)(*operands, fmt, rounding, return_flags=True)
    return bits, {name: getattr(flags, name) for name in FLAGS}


def is_nan(bits, fmt):
    return (bits & (2 ** (fmt.width - 1) - 1)) > (fmt.infinity_bits or fmt.max_bits)


def assert_same(ours, theirs, fmt, operands):
    """Equal bits and flags; any quiet NaN is as good as another."""
    (bits, flags), (expected, expected_flags) = ours, theirs
    nan = is_nan(expected, fmt)
    same = np.where(nan, is_nan(bits, fmt) & (bits & (fmt.nan_bits or 0) == (fmt.nan_bits or 0)), bits == expected)
    different = {"bits": ~same} | {name: flags[name] != expected_flags[name] for name in FLAGS}
    for what, wrong in different.items():
        if wrong.any():
            i = int(np.argmax(wrong))
            raise AssertionError(
                f"{what} differ for {int(wrong.sum())} of {wrong.size}, first for {[hex(x[i]) for x in operands]}: "
                f"{bits[i]:#x} {[n for n in FLAGS if flags[n][i]]}, expected {expected[i]:#x} "
                f"{[n for n in FLAGS if expected_flags[n][i]]}"
            )
