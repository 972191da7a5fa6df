"""The kernel on a page is attention of any length, causal or not, and makes its result and nothing else."""

import pytest
import torch

from flash import attention_reference
from minizero.memory import Ledger
from tests.support.helpers import slow

pytest.importorskip("triton", reason="Triton is not installed here")
from flash.kernel_on_a_page import attention  # noqa: E402
from tests.support.kernel_cases import DEVICE, tensors  # noqa: E402

# An output is a sum of weight × value. Its error, as a part of the sum of weight × |value|: in FP16 one rounding of the
# weights and one of the result, 2^-11 each; in FP32 what 32 roundings of 2^-24 are.
BOUND = {torch.float16: 2**-10, torch.float32: 2**-19}


@pytest.mark.parametrize(("n", "head_dim"), [(1, 16), *slow((65, 16), (17, 64), (64, 64), (65, 64))])
@pytest.mark.parametrize("dtype", BOUND)
def test_it_is_attention(dtype, n, head_dim):
    q, k, v = (x.transpose(1, 2) for x in tensors(*[(2, n, 2, head_dim)] * 3, dtype=dtype))
    for causal in (False, True):
        exact = attention_reference(q.double(), k.double(), v.double(), causal=causal)
        allowed = BOUND[dtype] * attention_reference(q.double(), k.double(), v.double().abs(), causal=causal)
        out = attention(q, k, v, causal=causal)
        assert out.dtype == dtype
        assert ((out - exact).abs() <= allowed).all()


@pytest.mark.parametrize("step", [100, -100])
def test_large_scores_that_rise_or_fall_from_block_to_block(step):
    """Scores of 0, ±100, ±200, …: all weight goes to the largest. exp of 89 is infinite already."""
    n = 100
    q, k, v = tensors(*[(1, 1, n, 16)] * 3)
    q[..., :], k[..., :] = 0, 0
    q[..., 0], k[..., 0] = 4, torch.arange(n) * step  # times the scale, 1 / 4
    last = torch.arange(n) if step > 0 else torch.zeros(n, dtype=torch.int64)
    assert torch.equal(attention(q, k, v, causal=True), v[:, :, last])
    assert torch.equal(attention(q, k, v), v[:, :, last[-1:]].expand_as(v))


def test_it_makes_its_result_and_nothing_else():
    with Ledger() as ledger:
        q, k, v = tensors(*[(1, 2, 100, 16)] * 3)
        attention(q, k, v)
    assert ledger.peak["total"] == 4 * q.nbytes == 4 * 2 * 100 * 16 * 4, "q, k, v, out, and no N × N beside them"


def test_it_refuses_what_it_would_get_wrong():
    """Fewer keys would be read beyond their end, and the interpreter multiplies the bits of bfloat16."""
    q = torch.zeros(1, 2, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"\(1, 2, 8, 16\), \(1, 1, 8, 16\), \(1, 1, 8, 16\), .*; expected one shape"):
        attention(q, q[:, :1], q[:, :1])
    with pytest.raises(ValueError, match=r"torch.bfloat16; expected one shape, FP32 or FP16$"):
        attention(q.bfloat16(), q.bfloat16(), q.bfloat16())
