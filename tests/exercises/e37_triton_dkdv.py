"""The backward pass has two kernels. This one: a program for each block of keys of each key/value head, which
sums dK and dV over all rows that see them, and over all query heads that share them. No two programs add to the
same number, so the sums have one order, and the same bits in every run.

What is (rows, keys) in the formulas is (keys, rows) here, transposed:

    s = k qᵀ     p = exp(scale s - lse)     dv += p do
    dp = v doᵀ   ds = p (dp - delta)        dk += ds q, and in the end times scale
"""

from typing import Any

from tests.exercises import triton_kit
from tests.exercises.kit import wrong

PLAN = [
    "Where am I? place(n_k, heads // GROUP, BLOCK_K, False) gives a block of keys and a key/value head. Lengths, "
    "return if start >= n_k; keys; load k and v once; dk and dv begin as FP32 zeros. If n_k is 1, every row sees one "
    "key, in part 1, too: load v with the length 0 then, so that dp is 0.",
    "low, high = band(…); bounds = spans(start, last key, n_q, -high, -low, BLOCK_Q): the view from the keys. The last "
    "block of rows may be cut off. It is masked, and the last row stands there again: tl.minimum(…, n_q - 1 - "
    "start_q).",
    "For each of the GROUP query heads: pointers to its Q, DO, LSE, DELTA, at the first block; state = "
    "start_hash(seed, batch, head).",
    "For part in tl.static_range(0 if right is not None or CAUSAL_TOP_LEFT else 1, 3), for start_q from bounds[part] "
    "to bounds[part + 1] by BLOCK_Q: load q and lse; s; p = exp2((s · scale - lse) · LOG2_E); 0 where not visible, "
    "unless part == 1. At the end the four pointers move on by a block.",
    "kept = dropout(…); do; dv += (p · kept) do; dp = v doᵀ · kept, 0 where sees_one(…) unless part == 1 (delta "
    "leaves dO · O out there); ds = p (dp - delta); dk += ds q.",
    "Store dk · scale, and dv.",
]
HINTS = [
    "In a (keys, rows) tile a number for each row stands along the second axis: lse[None, :].",
    "tl.dot(a, b, c, input_precision=PRECISION) is a b + c: dv = tl.dot((p * kept).to(do.dtype), do, dv, …).",
    "visible(keys[:, None], rows[None, :], n_q, -high, -low) is the mask in this orientation.",
    "Where a row sees one key, P is 1 whatever its score: delta leaves dO O out there, so dp must go as well.",
]
AFTER = (
    "A program owns its keys. It sums over all rows, and over all query heads that share the keys, on the chip, and "
    "stores once. So it needs no atomic additions, and the gradients are the same bits in every run. S is made as "
    "(keys, rows), so the products with dO and Q take P and dS as they are. It subtracts lse before it multiplies by "
    "LOG2_E: the difference of two large numbers, each rounded after a product, would be off. Read next: `sees_one` "
    "in flash/device_functions.py."
)
STORE = "store_block(DV, dv_strides, keys, n_k, dv, HEAD_DIM, BLOCK_D)"
NO_MASK = """columns = tl.arange(0, BLOCK_D)[None, :]
    tl.store(DV + keys[:, None] * dv_strides[2] + columns * dv_strides[3], dv.to(DV.dtype.element_ty))"""
WRONG = [
    wrong("forgets-delta", "dS is P · dP without delta: softmax's derivative also has -Σ P dP, which is delta.",
          ("p * (dp - delta[None, :])", "p * dp")),
    wrong("forgets-the-scale", "dK lacks the scale: S = scale · Q Kᵀ.", ("dk * scale", "dk")),
    wrong("forgets-the-mask", "A row counts that should not: one after the last, or with causal=True one before the "
          "key. p is 0 there.",
          ("if part != 1:\n                    p = tl.where", "if part == 7:\n                    p = tl.where")),
    wrong("keeps-the-last-block", "dV has the last block of rows only: add each product to what is there.",
          ("do, dv, input_precision", "do, input_precision")),
    wrong("multiplies-in-tf32", "", ("do, dv, input_precision=PRECISION)", "do, dv)")),
    wrong("stores-outside", "", (STORE, NO_MASK)),
    wrong("first-head-only", "Two query heads share these keys, and only the first one's rows were summed: go over the "
          "GROUP.", ("for member in range(GROUP):", "for member in range(1):")),
    wrong("dk-from-p", "dK is scale · dSᵀ Q, not Pᵀ Q.",
          ("tl.dot(ds.to(q.dtype), q, dk", "tl.dot(p.to(q.dtype), q, dk")),
]  # fmt: skip


draw, tolerance = triton_kit.draw, triton_kit.tolerance


def result(case: triton_kit.Case) -> dict[str, Any]:
    """What the kernel stores, and what it loads: nothing from beside the tensors, and no block twice."""
    return triton_kit.run_backward(case, "dkdv")


def check() -> None:
    triton_kit.compiles("dkdv")
