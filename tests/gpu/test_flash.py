"""Attention on a real GPU: python -m pytest -m gpu."""

import functools

import pytest
import torch
from hypothesis import given, seed, settings

from flash import attention_reference, flash_attention, flash_attention_varlen
from tests.gpu.device import CUDA, DEVICE, marks, needs_gpu, size
from tests.support.flash_cases import HEAD_DIMS, LENGTHS, cases, check_accuracy

pytest.importorskip("triton", reason="Triton is not installed here")
from flash import kernels  # noqa: E402
from notebooks.tools.card import most_bytes  # noqa: E402

if CUDA:  # what holds under the interpreter holds here as well
    from tests.flash.test_kernel_on_a_page import test_it_is_attention  # noqa: F401
    from tests.flash.test_kernels import (  # noqa: F401
        test_a_key_of_minus_infinity_is_no_key,
        test_a_window_may_lie_bottom_right_whatever_causal_is,
        test_any_length_and_dtype,
        test_bands_of_nan_around_every_buffer_stay_outside,
        test_nan_and_infinity_reach_the_rows_that_see_them_and_no_others,
        test_offsets_past_two_to_the_31,
        test_results_have_the_strides_that_the_operator_promises,
        test_the_dropout_mask_is_everybodys,
        test_what_comes_in_for_rows_that_see_nothing_has_no_effect,
    )

pytestmark = marks
# Where they are only tried, under the interpreter.
flash_attention = functools.partial(flash_attention, backend="triton")
flash_attention_varlen = functools.partial(flash_attention_varlen, backend="triton")


def tensors(*shapes, dtype=torch.float16, seed=1):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype) for shape in shapes]


@needs_gpu("else they are interpreted")
def test_the_kernels_are_compiled():
    assert not kernels.INTERPRETED


@pytest.mark.parametrize("part", range(size(12, 1)))
def test_as_accurate_as_plain_attention(part):
    """In parts, since each case compiles kernels of its own: pytest -n 8 does so on eight cores."""

    @seed(part)
    @settings(max_examples=size(5, 1), deadline=None, database=None)
    @given(cases(lengths=size((*LENGTHS, 511, 1025), (17,))))
    def check(case):
        check_accuracy(case, flash_attention, flash_attention_varlen, DEVICE)

    check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", size(HEAD_DIMS, (40,)))
def test_every_head_dim_fits_this_gpu(head_dim, dtype):
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, size(300, 20), head_dim)] * 3, dtype=dtype))
    exact = attention_reference(*(x.double() for x in (q, k, v)), causal=True)
    out = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), exact, atol=max(1e-5, 4 * torch.finfo(dtype).eps), rtol=0.01)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("head_dim", size([64, 128], [64]))
def test_fifty_backward_runs_give_the_same_bits(head_dim):
    q, k, v, dout = (x.requires_grad_() for x in tensors(*[(*size((2, 8, 1000), (1, 1, 70)), head_dim)] * 4))
    out = flash_attention(q, k, v, causal=True)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(size(49, 1)):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again))


@pytest.mark.alone
def test_tensors_of_more_than_two_to_the_31_elements():
    """40 heads of a million rows, each of which sees 65 keys: the last head is what it is alone."""
    n, heads = size((2**20, 40), (80, 2))
    if CUDA and torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GiB")
    q, k, v, dout = tensors(*[(1, heads, n, 64)] * 4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    assert q.numel() > 2**31 or not CUDA
    out = flash_attention(q, k, v, window=(64, 0))
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    last = [x[:, -1:].detach().requires_grad_() for x in (q, k, v)]
    alone = flash_attention(*last, window=(64, 0))
    assert torch.equal(out[:, -1:], alone)
    for one, other in zip(gradients, torch.autograd.grad(alone, last, dout[:, -1:])):
        assert torch.equal(one[:, -1:], other)


def test_memory_grows_linearly():
    """Bytes of forward and backward, for n and 2n rows: no term in n²."""

    def peak(n):
        q, k, v = (x.requires_grad_() for x in tensors(*[(1, 4, n, 64)] * 3))
        return most_bytes(lambda: flash_attention(q, k, v).sum().backward())[1]

    peak(size(256, 16))
    small, large = peak(size(8192, 64)), peak(size(16384, 128))
    assert large <= 2.1 * small


def test_under_compile():
    q, k, v = (x.requires_grad_() for x in tensors(*[(2, 4, size(200, 20), 64)] * 3))
    backend = size("inductor", "aot_eager")
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, causal=True) * 2, fullgraph=True, backend=backend)
    out, expected = compiled(q, k, v), flash_attention(q, k, v, causal=True) * 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)))
