"""Attention on a real GPU: python -m pytest -m gpu."""

import pytest
import torch
from flash_cases import HEAD_DIMS, LENGTHS, cases, check_accuracy
from hypothesis import given, seed, settings

from flash import attention_reference, flash_attention, flash_attention_varlen

pytest.importorskip("triton", reason="Triton is not installed here")
# What holds under the interpreter holds here as well.
from test_flash_kernels import (  # noqa: E402, F401
    test_any_length_and_dtype,
    test_bands_of_nan_around_every_buffer_stay_outside,
    test_nan_and_infinity_reach_the_rows_that_see_them_and_no_others,
    test_offsets_past_two_to_the_31,
    test_results_have_the_strides_that_the_operator_promises,
    test_rows_that_see_nothing,
    test_scores_of_minus_infinity_are_no_scores,
    test_the_dropout_mask_is_everybodys,
)

from flash import kernels  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available() or kernels.INTERPRETED, reason="needs a CUDA GPU"),
]


def tensors(*shapes, dtype=torch.float16, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("part", range(12))
def test_as_accurate_as_plain_attention(part):
    """In parts, since each case compiles kernels of its own: pytest -n 8 does so on eight cores."""

    @seed(part)
    @settings(max_examples=5, deadline=None, database=None)
    @given(cases(lengths=(*LENGTHS, 511, 1025)))
    def check(case):
        check_accuracy(case, flash_attention, flash_attention_varlen, "cuda")

    check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_fits_this_gpu(head_dim, dtype):
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, 300, head_dim)] * 3, dtype=dtype))
    exact = attention_reference(*(x.double() for x in (q, k, v)), causal=True)
    out = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), exact, atol=max(1e-5, 4 * torch.finfo(dtype).eps), rtol=0.01)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fifty_backward_runs_give_the_same_bits(head_dim):
    q, k, v, dout = (x.requires_grad_() for x in tensors(*[(2, 8, 1000, head_dim)] * 4))
    out = flash_attention(q, k, v, causal=True)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(49):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again))


def test_tensors_of_more_than_two_to_the_31_elements():
    """40 heads of a million rows, each of which sees 65 keys: the last head is what it is alone."""
    n, heads = 2**20, 40
    if torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GiB")
    q, k, v, dout = tensors(*[(1, heads, n, 64)] * 4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    assert q.numel() > 2**31
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
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(256)
    small, large = peak(8192), peak(16384)
    assert large <= 2.1 * small


def test_under_compile():
    q, k, v = (x.requires_grad_() for x in tensors(*[(2, 4, 200, 64)] * 3))
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, causal=True) * 2, fullgraph=True)
    out, expected = compiled(q, k, v), flash_attention(q, k, v, causal=True) * 2
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))):
        torch.testing.assert_close(one, other)
