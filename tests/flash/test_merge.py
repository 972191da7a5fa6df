"""merge: attention over two sets of keys, joined to attention over both."""

import math

import pytest
import torch

from flash import attention_reference, flash_attention, flash_attention_varlen, merge
from tests.support.flash_cases import cu, tensors

INF = math.inf


@pytest.mark.parametrize("cut", [0, 3, 10])
def test_merge_joins_two_sets_of_keys(cut):
    q, k, v, dout = tensors((2, 4, 6, 8), (2, 2, 10, 8), (2, 2, 10, 8), (2, 4, 6, 8), dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    whole = flash_attention(q, k, v, return_lse=True)
    sides = slice(cut), slice(cut, None)
    parts = [flash_attention(q, k[:, :, side], v[:, :, side], return_lse=True) for side in sides]
    joined = merge(*parts[0], *parts[1])
    torch.testing.assert_close(joined, whole)
    grad_outputs = dout, torch.ones_like(whole[1])
    torch.testing.assert_close(*(torch.autograd.grad(result, (q, k, v), grad_outputs) for result in (joined, whole)))


def test_merge_of_rows_that_see_nothing_in_one_part_or_in_both():
    """A causal ring: the later keys are invisible to the first queries; and two parts of nothing are nothing."""
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 1, 8, 4)] * 3, dtype=torch.float64))
    first = flash_attention(q, k[:, :, :4], v[:, :, :4], window=(None, 0), return_lse=True)
    second = flash_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], causal=True, return_lse=True)
    nothing = flash_attention(q[:, :, :4], k[:, :, :0], v[:, :, :0], return_lse=True)
    second = [torch.cat(pair, dim=2) for pair in zip(nothing, second)]
    out, lse = merge(*first, *second)
    expected = attention_reference(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    sums = (x[0].sum() + x[1].sum() for x in ((out, lse), expected))
    torch.testing.assert_close(*(torch.autograd.grad(total, (q, k, v), retain_graph=True) for total in sums))
    out, lse = merge(*nothing, *nothing)
    assert (out == 0).all() and (lse == -INF).all()
    assert (torch.autograd.grad(out.sum() + lse.masked_fill(lse == -INF, 0).sum(), q)[0] == 0).all()


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_merge_of_logsumexps_too_large_to_exponentiate(large):
    out_a, out_b, lse_a, lse_b = tensors(*[(1, 3, 4, 2)] * 2, *[(1, 3, 4)] * 2, dtype=torch.float64)
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(merge(out_a, lse_a + large, out_b, lse_b + large), (out, lse + large))


def test_merge_of_packed_sequences_and_of_16_bits():
    q, k, v = tensors(*[(9, 2, 4)] * 3, dtype=torch.bfloat16)
    whole = flash_attention_varlen(q, k, v, cu(4, 9), cu(4, 9), return_lse=True)
    none = flash_attention_varlen(q, k, v, cu(4, 9), cu(0, 0), return_lse=True)
    for parts in ((*whole, *none), (*none, *whole)):
        for one, other in zip(merge(*parts), whole):
            assert one.dtype == other.dtype and torch.equal(one, other)
    with pytest.raises(ValueError, match="merge: .*must have the same shapes"):
        merge(*whole, whole[0][:3], whole[1])
    for out, lse, rows in ((q, whole[1].mT, r"\(2, 9\)"), (q[None], whole[1][:, :1], r"\(1, 9, 2\)")):
        with pytest.raises(ValueError, match=f"merge: out is .*; expected lse {rows}"):
            merge(out, lse, out, lse)
