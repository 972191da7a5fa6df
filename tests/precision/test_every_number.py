"""Conversion of every number there is, and of millions in each rounding: python -m pytest -m exhaustive."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from precision.formats import BF16, FP16
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


def test_berkeley_softfloat():
    """A million conversions by SoftFloat, which counts in whole numbers too but is someone else's."""
    softfloat = pytest.importorskip("softfloatpy")
    modes = {
        "nearest-even": softfloat.RoundingMode.NEAR_EVEN,
        "nearest-away": softfloat.RoundingMode.NEAR_MAX_MAG,
        "toward-zero": softfloat.RoundingMode.MIN_MAG,
        "up": softfloat.RoundingMode.MAX,
        "down": softfloat.RoundingMode.MIN,
    }
    conversions = [
        (FP16, np.float32, softfloat.Float32, softfloat.f32_to_f16),
        (FP16, np.float64, softfloat.Float64, softfloat.f64_to_f16),
        (BF16, np.float32, softfloat.Float32, softfloat.f32_to_bf16),
    ]
    names = {flag.name.lower(): int(flag) for flag in softfloat.ExceptionFlag}
    softfloat.set_tininess_mode(softfloat.TininessMode.AFTER_ROUNDING)
    generator = np.random.default_rng(0)
    for rounding, mode in modes.items():
        softfloat.set_rounding_mode(mode)
        for fmt, dtype, number_type, convert in conversions:
            size = dtype().itemsize
            words = generator.integers(0, 2 ** (8 * size), 20_000, dtype=f"u{size}").view(dtype)
            exponents = generator.integers(fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 2, 30_000)
            spread = np.ldexp(generator.uniform(-1, 1, 30_000), exponents).astype(dtype)
            boundaries = generator.permutation(ORACLES[fmt].boundaries(dtype))[:20_000]
            x = np.concatenate([words, spread, boundaries])
            bits, flags = fmt.encode(x, rounding, return_flags=True)
            encoded = x.astype(f">f{size}").tobytes() if size == 8 else x.view("u4").astype(">u4").tobytes()
            for i in range(len(x)):
                softfloat.set_exception_flags(0)
                theirs = convert(number_type.from_bytes(encoded[i * size : (i + 1) * size]))
                raised = softfloat.get_exception_flags()
                if x[i] == x[i]:  # its NaN is always the same one
                    assert int(bits[i]) == int.from_bytes(theirs.to_bytes(), "big"), (fmt, rounding, x[i])
                for name in ("inexact", "underflow", "overflow", "invalid"):
                    assert bool(getattr(flags, name)[i]) == bool(raised & names[name]), (fmt, rounding, name, x[i])
