"""The second kernel of the backward pass: a program for each block of rows sums dQ over the keys that they see.
S is computed once more, and so needs no memory and no atomic additions.

    s = q kᵀ    p = exp(scale s - lse)    dp = do vᵀ    ds = p (dp - delta)    dq += ds k,  in the end · scale
"""

from typing import Any

from tests.exercises import triton_kit
from tests.exercises.kit import wrong

PLAN = [
    "Where am I? As in the forward kernel. Pointers to this head's Q, DO, LSE, DELTA, and to K, V of head // GROUP.",
    "Load q, do, lse, delta once. dq begins as FP32 zeros.",
    "low and high, bounds, and the two loops over blocks of keys as in the forward kernel.",
    "Load k and v; s; p = exp2((s · scale - lse) · LOG2_E), 0 where not visible unless part == 1; dp = do vᵀ times "
    "dropout(…), 0 where sees_one(rows, …) unless part == 1 (delta leaves dO · O out there); ds = p (dp - delta); dq "
    "+= ds k.",
    "Store dq · scale, also of rows that see no key: nobody has set their memory to 0.",
]
HINTS = [
    "lse[:, None] and delta[:, None] stand along the rows.",
    "dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION) adds to what is there.",
    "Where a row sees one key, P is 1 whatever its score: delta leaves dO O out there, so dp must go as well.",
]
AFTER = (
    "Backward computes S in both kernels. In return one program makes each sum, in one order. FlashAttention-2 has "
    "one kernel for both: its programs add to dQ with atomics, so the order, and with it the last bits, may change "
    'from run to run. The scale is applied once, to the stored dQ. Read next: Dao, 2023, "FlashAttention-2", section '
    "3.2."
)
WRONG = [
    wrong("forgets-delta", "dS is P · dP without delta: softmax's derivative also has -Σ P dP.",
          ("ds = p * (dp - delta[:, None])", "ds = p * dp")),
    wrong("forgets-the-scale", "dQ lacks the scale: S = scale · Q Kᵀ.", ("dq * scale", "dq")),
    wrong("forgets-the-mask", "With causal=True keys in the future count: p is 0 where not visible(…).",
          ("if part != 1:\n                p = tl.where", "if part == 7:\n                p = tl.where")),
    wrong("keeps-the-last-block", "dQ has the last block of keys only: add each product to what is there.",
          ("k, dq, input_precision", "k, input_precision")),
    wrong("multiplies-in-tf32", "", ("k, dq, input_precision=PRECISION)", "k, dq)")),
    wrong("does-not-compile", "", ("dq = tl.full([BLOCK_Q, BLOCK_D], 0.0, tl.float32)", "dq = 0.0"),
          ("tl.dot(ds.to(k.dtype), k, dq, input_precision", "dq + tl.dot(ds.to(k.dtype), k, input_precision")),
    wrong("stores-outside", "", ("n_q, dq, HEAD_DIM,", "n_q, dq, BLOCK_D,")),
    wrong("dq-from-p", "dQ is scale · dS K, not P K.", ("dq = tl.dot(ds.to(k.dtype)", "dq = tl.dot(p.to(k.dtype)")),
]  # fmt: skip


draw, tolerance = triton_kit.draw, triton_kit.tolerance


def result(case: triton_kit.Case) -> dict[str, Any]:
    """What the kernel stores, and what it loads: nothing from beside the tensors, and no block twice."""
    return triton_kit.run_backward(case, "dq")


def check() -> None:
    triton_kit.compiles("dq")
