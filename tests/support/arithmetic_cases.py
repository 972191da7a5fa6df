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


def half_way(fmt):
    """For every number a: half of its last place, the last place and a quarter of it, and the neighbours of each."""
    a = np.arange(2**fmt.width)
    exponent = ((a >> fmt.mantissa_bits) % 2**fmt.exponent_bits).clip(1) - fmt.bias
    pairs = []
    for octaves in (fmt.mantissa_bits, fmt.mantissa_bits + 1, fmt.mantissa_bits + 2):
        half = fmt.encode(np.ldexp(1.0, exponent - octaves)).astype(int)
        for step in (-1, 0, 1):
            for sign in (0, 1):
                pairs.append((a, np.clip(half + step, 0, None) | sign << (fmt.width - 1)))
    return [np.concatenate(side).astype(np.uint16) for side in zip(*pairs)]
