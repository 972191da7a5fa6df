"""FP16 on every number and every pair there is, and on tens of millions of operands in every rounding.

encode           all 2^32 numbers of float32, against torch
add, multiply    all 2^32 pairs, to the nearest even, against torch's own float16
all but sqrt     2^23 random operands and 2 million at boundaries, each in five roundings, with flags, against float64
"""

import shutil

import numpy as np
import pytest
import torch

from precision import arithmetic
from precision.formats import FP16
from tests.support.arithmetic_cases import OPERANDS, apply, assert_same
from tests.support.oracles import ROUNDINGS, boundaries, by_float64

pytestmark = pytest.mark.exhaustive

NAN = 0x7E00


def compiled(operation):
    """The steps of `operation` as one loop of machine code, bits to bits; as they are without a C++ compiler."""

    def steps(a, b):
        return operation.__wrapped__(a, b)[0]

    return torch.compile(steps) if shutil.which("g++") or shutil.which("clang++") else steps


@pytest.mark.parametrize("operation, own", [("add", torch.add), ("multiply", torch.mul)], ids=["add", "multiply"])
def test_every_pair(operation, own):
    """torch computes in float32 and rounds that: products are exact there, and sums have 24 ≥ 2 · 11 + 2 bits."""
    steps, rows = compiled(getattr(arithmetic, operation)), 16
    patterns = torch.arange(2**16, dtype=torch.int32)
    numbers = patterns.to(torch.uint16).view(torch.float16)
    pairs = 0
    for start in range(0, 2**16, rows):
        block = slice(start, start + rows)
        expected = own(numbers[block, None], numbers)
        expected = expected.view(torch.int16).masked_fill_(expected.isnan(), NAN)
        bits = steps(patterns[block, None], patterns).to(torch.int16)
        if not torch.equal(bits, expected):
            row, column = (bits != expected).nonzero()[0].tolist()
            raise AssertionError(
                f"{operation}({start + row:#06x}, {column:#06x}) = {int(bits[row, column]) & 0xFFFF:#06x}, "
                f"torch has {int(expected[row, column]) & 0xFFFF:#06x}"
            )
        pairs += bits.numel()
    assert pairs == 2**32


def structured():
    """Two families: pairs of patterns at boundaries, and all pairs of significands."""
    generator = np.random.default_rng(0)
    first = [x.ravel() for x in np.meshgrid(*[boundaries(FP16)] * 2, indexing="ij")]
    second = [x.ravel() for x in np.meshgrid(*[np.arange(2**10)] * 2, indexing="ij")]
    for i in range(2):  # any sign; exponents at most 15 apart, so that sums overlap and quotients are normal
        exponent, sign = generator.integers(8, 24, second[i].size), generator.integers(2, size=second[i].size)
        second[i] = second[i] | exponent << 10 | sign << 15
    return [np.concatenate(parts).astype(np.uint16) for parts in zip(first, second)]


def addend(a, b):
    """What is added to a · b: something near -a · b, something of which it is about half a last place, or anything."""
    generator = np.random.default_rng(1)
    product = FP16.encode(FP16.decode(a).astype(np.float64) * FP16.decode(b)).astype(np.int64)
    near = (product ^ 0x8000) + generator.integers(-2, 3, a.size)
    above = (product & 0xFC00) + (generator.integers(10, 13, a.size) << 10) + generator.integers(2**10, size=a.size)
    anything = generator.integers(2**16, size=a.size)
    return np.choose(generator.integers(3, size=a.size), [near, above, anything]).astype(np.uint16)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("operation", [name for name, count in OPERANDS.items() if count > 1])
def test_over_ten_million_operands(operation, rounding):
    generator = np.random.default_rng(ROUNDINGS.index(rounding))
    anything = [generator.integers(2**16, size=2**23).astype(np.uint16) for _ in range(2)]
    operands = [np.concatenate(parts) for parts in zip(structured(), anything)]
    operands += [addend(*operands)] if operation == "fma" else []
    assert operands[0].size > 10_000_000
    theirs = by_float64(operation, FP16, rounding, *operands)
    assert_same(apply(operation, FP16, rounding, *operands), theirs, FP16, operands)


def test_all_float32_to_fp16_as_torch():
    """Bit for bit, the payloads of NaNs too."""
    for start in range(0, 2**32, 2**22):
        x = np.arange(start, start + 2**22, dtype=np.uint32).view(np.float32)
        theirs = torch.from_numpy(x).half().view(torch.int16).numpy()
        assert np.array_equal(FP16.encode(x).view(np.int16), theirs), hex(start)
