"""Which bytes the Triton kernels load and store, and which blocks they mask: counted in Triton's interpreter."""

import contextlib
from unittest import mock

import numpy
import pytest
import torch

from flash import hbm_bytes  # before Triton: it asks for the interpreter
from flash.traffic import Traffic

pytest.importorskip("triton", reason="Triton is not installed here")
from flash import kernel_on_a_page, kernels  # noqa: E402
from tests.support.flash_cases import drawn, options_of  # noqa: E402
from tests.support.kernel_cases import blocks_of, tensors  # noqa: E402

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="looks into Triton's interpreter")


@contextlib.contextmanager
def counted():
    """Bytes that kernels load and store under the interpreter, lanes that a mask turns off left out.

    What one load asks for twice, such as the last row in place of rows behind the end, comes from HBM once.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    loads, stores = [], []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self, pointers, mask, *rest):
        loads.append(len(numpy.unique(pointers.data[mask.data])) * pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        stores.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *rest)

    counting = {"create_masked_load": counting_load, "create_masked_store": counting_store}
    with mock.patch.multiple(InterpreterBuilder, **counting):
        yield loads, stores


# Rows whose window begins exactly where the keys end.
EDGE = dict(n_q=60, n_k=27, head_dim=8, block_q=16, block_k=16, batch=1, heads=1, kv_heads=1, itemsize=4, causal=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.soak) for n in range(6, 20))])
def test_the_kernels_move_exactly_what_the_model_says(number):
    dtype, case = drawn(number, 100, [16, 32, 64, 128], [torch.float16, torch.float32])
    if number == 0:
        dtype, case = torch.float32, EDGE | {"window": (5, None)}
    if number == 1:  # with one key in all, the kernel of dK and dV leaves V alone
        case["n_k"] = 1
    q, dout = tensors(*[(case["batch"], case["heads"], case["n_q"], case["head_dim"])] * 2, dtype=dtype)
    k, v = tensors(*[(case["batch"], case["kv_heads"], case["n_k"], case["head_dim"])] * 2, dtype=dtype)
    options = options_of(q, k, v, causal=case["causal"], window=case["window"])
    with blocks_of(case["block_q"], case["block_k"]):
        with counted() as (loads, stores):
            out, lse = kernels.forward(q, k, v, options)
        assert Traffic(sum(loads), sum(stores)) == hbm_bytes(algorithm="kernels", **case)
        with counted() as (loads, stores):
            kernels.backward(dout, lse, q, k, v, out, lse, options)
        assert Traffic(sum(loads), sum(stores)) == hbm_bytes(algorithm="kernels", backward=True, **case)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_on_a_page_moves_what_the_model_says_but_no_logsumexp(causal):
    q, k, v = tensors(*[(2, 1, 130, 16)] * 3, dtype=torch.float16)
    with counted() as (loads, stores):
        kernel_on_a_page.attention(q, k, v, causal=causal)
    shape = dict(block_q=64, block_k=64, batch=2, heads=1, causal=causal)
    assert sum(loads) == hbm_bytes(130, 16, algorithm="kernels", **shape).loads
    assert sum(stores) == q.nbytes, "the result, once, and no scores"
