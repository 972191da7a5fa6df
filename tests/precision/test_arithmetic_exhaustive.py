"""FP16, on every number and every pair there is, against torch's own float16."""

import shutil

import numpy as np
import pytest
import torch

from precision import arithmetic
from precision.formats import FP16

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


def test_all_float32_to_fp16_as_torch():
    """Bit for bit, the payloads of NaNs too."""
    for start in range(0, 2**32, 2**22):
        x = np.arange(start, start + 2**22, dtype=np.uint32).view(np.float32)
        theirs = torch.from_numpy(x).half().view(torch.int16).numpy()
        assert np.array_equal(FP16.encode(x).view(np.int16), theirs), hex(start)
