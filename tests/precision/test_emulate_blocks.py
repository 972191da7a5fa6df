"""The innermost block of emulation counts, in its own thread only, and an error ends it."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from precision.emulate import emulate
from precision.formats import BF16, FP8_E4M3, FP16, FP32, FloatFormat
from precision.histogram import exponent_histogram
from tests.support.emulated import FORMATS_OF_16_BITS, kept_bytes


def third():
    """1/3, computed: 0.33325195 in FP16, 0.333984375 in BF16, 0.34375 in E4M3."""
    return (torch.ones(1) / 3).item()


def test_the_innermost_block_counts():
    plain = third()
    with emulate(FP16):
        assert third() == 0.333251953125
        with emulate(FP8_E4M3):
            assert third() == 0.34375
        with emulate(FP32):
            assert third() == plain
            with emulate(BF16):
                assert third() == 0.333984375
            assert third() == plain
        assert third() == 0.333251953125
    assert third() == plain
    with emulate(FP8_E4M3), emulate(FloatFormat(4, 11)):  # whose 12 bits the block around it must not cut to 4
        assert third() == 0.3333740234375


@pytest.mark.parametrize("fmt", FORMATS_OF_16_BITS[:4], ids=lambda fmt: f"{fmt.exponent_bits}-{fmt.mantissa_bits}")
def test_conversions_and_histograms_are_exact_inside_of_a_block(fmt):
    torch.manual_seed(0)
    x = torch.randn(2000) * torch.randn(2000).mul(8).exp2()
    outside = fmt.quantize(x), fmt.encode(x).to(torch.int32), fmt.decode(fmt.encode(x)), exponent_histogram(x)
    with emulate(FP16):
        inside = fmt.quantize(x), fmt.encode(x).to(torch.int32), fmt.decode(fmt.encode(x)), exponent_histogram(x)
    for one, other in zip(inside[:3], outside[:3]):
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    assert inside[3] == outside[3]


def test_what_an_inner_block_writes_is_rounded_again():
    with emulate(FP16):
        for n, rounded_times_5 in ((3, 1.666015625), (7, 0.7138671875)):  # else 1.6669921875, 0.71435546875
            layer = nn.Linear(1, 1, bias=False)
            with torch.no_grad(), emulate(FP32):
                layer.weight.fill_(1 / n)
            assert layer.weight.item() == torch.tensor(1 / n).item()
            assert (layer.weight * 5).item() == rounded_times_5


def test_saved_tensors_follow_the_innermost_block():
    x = torch.full((1,), 1 / 3, requires_grad=True)
    with emulate(FP32):
        with emulate(FP8_E4M3):
            y = x * x
        y.backward()
    assert x.grad.item() == 2 * 0.34375  # saved in 8 bits; backward then was in FP32


def test_an_error_leaves_everything_as_it_was():
    with pytest.raises(ZeroDivisionError):
        with emulate(FP16):
            with emulate(BF16):
                1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with emulate(FP16):
            try:
                torch.ones(2, 3) @ torch.ones(2, 3)
            finally:
                assert third() == 0.333251953125
    assert third() == torch.tensor(1 / 3).item()
    x = torch.full((5,), 0.3, requires_grad=True)
    assert kept_bytes(lambda: x.exp().sum(), contextlib.nullcontext()) == 20


def test_each_thread_has_its_own():
    barrier, formats = threading.Barrier(3, timeout=60), (FP16, FP8_E4M3, None)

    def work(fmt):
        with emulate(fmt) if fmt else contextlib.nullcontext():
            barrier.wait()
            for _ in range(50):
                x = torch.full((1,), 1 / 3, requires_grad=True)
                (x * x).backward()
            found = third(), x.grad.item()
            barrier.wait()
        return found

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, formats))
    assert results == [(n, 2 * n) for n in (0.333251953125, 0.34375, torch.tensor(1 / 3).item())]
