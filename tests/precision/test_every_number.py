"""Conversion of every number there is, and of millions in each rounding: python -m pytest -m exhaustive."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from precision.formats import FP16
from precision.one_number import ROUNDINGS
from tests.support.table_oracle import ORACLES

pytestmark = pytest.mark.exhaustive


def in_threads(check, arguments):
    """All results; NumPy and torch compute outside of Python's lock."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(check, arguments))


def test_all_float32_to_fp16_as_torch():
    """Bit for bit, the payloads of NaNs too."""

    def count_wrong(start):
        x = np.arange(start, start + 2**22, dtype=np.uint32).view(np.float32)
        theirs = torch.from_numpy(x).half().view(torch.int16).numpy()
        return int((FP16.encode(x).view(np.int16) != theirs).sum())

    assert sum(in_threads(count_wrong, range(0, 2**32, 2**22))) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", ROUNDINGS[:5])
def test_ten_million_in_each_rounding(rounding, dtype):
    """FP16's bits and flags against the table: random patterns, numbers all over its range, and every boundary."""
    oracle = ORACLES[FP16]

    def count_wrong(seed):
        generator = np.random.default_rng(seed)
        words = generator.integers(0, 2 ** (8 * dtype().itemsize), 2**17, dtype=f"u{dtype().itemsize}")
        spread = np.ldexp(generator.uniform(-2, 2, 2**18), generator.integers(-28, 18, 2**18))
        x = np.concatenate([words.view(dtype), spread.astype(dtype), oracle.boundaries(dtype)[seed % 4 :: 4]])
        x = x[~np.isnan(x)]
        bits, flags = FP16.encode(x, rounding, return_flags=True)
        ours = (bits, flags.inexact, flags.underflow, flags.overflow)
        theirs = oracle.encode(x.astype(np.float64), rounding)
        return len(x), sum(int((a != b).sum()) for a, b in zip((*ours, FP16.encode(x, rounding)), (*theirs, bits)))

    results = in_threads(count_wrong, range(24))
    assert sum(count for count, _ in results) > 10_000_000
    assert sum(wrong for _, wrong in results) == 0
