"""FlashAttention in Triton: a program for each block of rows (forward, dQ) or of keys (dK and dV).

    forward     S = Q K^T      m' = max(m, rowmax S)     P = exp(S - m')
                l = exp(m - m') l + rowsum P             O = exp(m - m') O + P V
    backward    P = exp(S - lse)     dS = P (dO V^T - delta)     dV = P^T dO     dK = scale dS^T Q     dQ = scale dS K

A program loads its own block once, keeps it on the chip, and goes over the blocks that its own sees. Only those
at the edge of the band or of the tensor need a mask: `spans` says which. Backward has one kernel that sums dK and
dV over the rows, and one that sums dQ over the keys. S is computed twice, but one program makes each sum, in one
order and without atomics: the gradients are the same bits in every run.

The GPU has an instruction for 2^x, none for e^x: exp(x) is exp2(x log2 e). Backward subtracts first and multiplies
then: the difference of two large numbers in base 2, each rounded on its own, would be off.
Dao, 2023, "FlashAttention-2"; Tillet, Kung & Cox, 2019, "Triton".

To be read first: `flash.kernel_on_a_page`, the forward pass without options. What they call: `flash.device_functions`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from flash.device_functions import (
    INTERPRETED,
    LOG2_E,
    band,
    dropout,
    head_of,
    length,
    load_block,
    load_numbers,
    move,
    over_columns,
    place,
    sees_one,
    spans,
    start_hash,
    store_block,
    store_numbers,
    visible,
)
from flash.launch import Launch, prepare
from flash.options import Options

__all__ = ["INTERPRETED", "backward", "forward"]

# Arguments beside tensors, strides and sizes: GROUP query heads share a key/value head; a weight is kept if its hash is
# not below `threshold`, and then multiplied by `factor`.

# One compiled kernel serves all values of these. For a stride of 1, or of a multiple of 16, Triton compiles another.
GENERAL = ["heads", "n_q", "n_k", "left", "right", "threshold"]


@triton.jit(do_not_specialize=GENERAL)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    heads, n_q, n_k, cu_seqlens_q, cu_seqlens_k,
    scale, left, right, seed, threshold, factor,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAUSAL_TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out and lse of one block of rows of one head."""
    # Which block this program has, and where its tensors begin. A packed sequence may be shorter than the longest one.
    start, head, batch = place(n_q, heads, BLOCK_Q, right is not None)
    n_q, n_k = length(cu_seqlens_q, batch, n_q), length(cu_seqlens_k, batch, n_k)
    if start >= n_q:
        return
    rows = start + tl.arange(0, BLOCK_Q)
    Q = head_of(q_ptr, q_strides, batch, head, cu_seqlens_q)
    K = head_of(k_ptr, k_strides, batch, head // GROUP, cu_seqlens_k)
    V = head_of(v_ptr, v_strides, batch, head // GROUP, cu_seqlens_k)
    state = start_hash(seed, batch, head)

    # No arithmetic on q: as it comes, the products take it from shared memory, else each time through the registers.
    q = load_block(Q, q_strides, rows, n_q, True, HEAD_DIM, BLOCK_D)  # (rows, head dim)
    # m is not -inf at first: for a row that has seen nothing yet, -inf - -inf would be NaN.
    m = tl.full([BLOCK_Q], -3.4e38, tl.float32)  # largest score so far, not scaled yet
    l = tl.full([BLOCK_Q], 0.0, tl.float32)  # sum of exp(S - m) so far
    o = tl.full([BLOCK_Q, BLOCK_D], 0.0, tl.float32)  # exp(S - m) V so far

    # Over the blocks of keys that these rows see.
    low, high = band(n_q, n_k, left, right, BOTTOM_RIGHT, CAUSAL_TOP_LEFT)
    bounds = spans(start, tl.minimum(start + BLOCK_Q, n_q) - 1, n_k, low, high, BLOCK_K)
    FIRST_PART: tl.constexpr = 0 if left is not None else 1  # of three, as `spans` cuts them
    block = tl.arange(0, BLOCK_K)
    K, V = move(K, k_strides, bounds[FIRST_PART]), move(V, v_strides, bounds[FIRST_PART])
    for part in tl.static_range(FIRST_PART, 3):  # part 1 needs no mask, 0 and 2 do
        for start_k in range(bounds[part], bounds[part + 1], BLOCK_K):
            keys = start_k + block
            k = load_block(K, k_strides, block, n_k - start_k, part != 1, HEAD_DIM, BLOCK_D)
            s = over_columns(q, k, PRECISION)  # S = Q K^T: (rows, keys)
            if part != 1:
                s = tl.where(visible(rows[:, None], keys[None, :], n_k, low, high), s, float("-inf"))
            larger = tl.maximum(m, tl.max(s, 1))  # m' = max(m, rowmax S)
            # P = exp(S - m'), scaled here. Without the bound a scaled m' of -3.4e38 is -inf, and -inf - -inf is NaN.
            p = tl.exp2(s * (scale * LOG2_E) - tl.maximum(larger * (scale * LOG2_E), -3.4e38)[:, None])
            rescale = tl.exp2((m - larger) * (scale * LOG2_E))  # exp(m - m')
            l = l * rescale + tl.sum(p, 1)  # before dropout: softmax knows nothing of it
            p = p * dropout(seed, state, rows[:, None], keys[None, :], threshold, factor)
            v = load_block(V, v_strides, block, n_k - start_k, part != 1, HEAD_DIM, BLOCK_D)
            o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision=PRECISION)  # exp(m - m') O + P V
            m = larger
            K, V = move(K, k_strides, BLOCK_K), move(V, v_strides, BLOCK_K)

    O = head_of(out_ptr, out_strides, batch, head, cu_seqlens_q)
    LSE = head_of(lse_ptr, lse_strides, batch, head, cu_seqlens_q)
    m = tl.where(l == 0, float("-inf"), m)  # a row that has seen nothing: out 0, lse -inf
    l = tl.where(l == 0, 1.0, l)
    store_block(O, out_strides, rows, n_q, o / l[:, None], HEAD_DIM, BLOCK_D)
    store_numbers(LSE, lse_strides, rows, n_q, m * scale + tl.log2(l) / LOG2_E)  # lse = m + log l


@triton.jit(do_not_specialize=GENERAL)
def delta_kernel(
    do_ptr, out_ptr, dlse_ptr, delta_ptr,
    do_strides, out_strides, dlse_strides, delta_strides,
    heads, n_q, n_k, cu_seqlens_q, cu_seqlens_k,
    left, right,
    BOTTOM_RIGHT: tl.constexpr, CAUSAL_TOP_LEFT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O) - dlse, which both backward kernels need; -dlse where a row sees one key (`sees_one`)."""
    start, head, batch = place(n_q, heads, BLOCK_Q, False)
    n_q, n_k = length(cu_seqlens_q, batch, n_q), length(cu_seqlens_k, batch, n_k)
    rows = start + tl.arange(0, BLOCK_Q)
    DO = head_of(do_ptr, do_strides, batch, head, cu_seqlens_q)
    O = head_of(out_ptr, out_strides, batch, head, cu_seqlens_q)
    DLSE = head_of(dlse_ptr, dlse_strides, batch, head, cu_seqlens_q)
    DELTA = head_of(delta_ptr, delta_strides, batch, head, cu_seqlens_q)
    do = load_block(DO, do_strides, rows, n_q, True, HEAD_DIM, BLOCK_D).to(tl.float32)
    o = load_block(O, out_strides, rows, n_q, True, HEAD_DIM, BLOCK_D).to(tl.float32)
    # A row that sees one key goes without dO O here, and without dP in the other kernels: its dS is dlse.
    low, high = band(n_q, n_k, left, right, BOTTOM_RIGHT, CAUSAL_TOP_LEFT)
    do = tl.where(sees_one(rows, n_k, low, high)[:, None], 0.0, do)
    dlse = load_numbers(DLSE, dlse_strides, rows, n_q, True)
    store_numbers(DELTA, delta_strides, rows, n_q, tl.sum(do * o, 1) - dlse)


@triton.jit(do_not_specialize=GENERAL)
def dkdv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    do_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dk_strides, dv_strides,
    heads, n_q, n_k, cu_seqlens_q, cu_seqlens_k,
    scale, left, right, seed, threshold, factor,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAUSAL_TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys. What is (rows, keys) in the formulas is (keys, rows) here: S^T, P^T, dS^T."""
    start, kv_head, batch = place(n_k, heads // GROUP, BLOCK_K, False)
    n_q, n_k = length(cu_seqlens_q, batch, n_q), length(cu_seqlens_k, batch, n_k)
    if start >= n_k:
        return
    keys = start + tl.arange(0, BLOCK_K)
    K = head_of(k_ptr, k_strides, batch, kv_head, cu_seqlens_k)
    V = head_of(v_ptr, v_strides, batch, kv_head, cu_seqlens_k)
    k = load_block(K, k_strides, keys, n_k, True, HEAD_DIM, BLOCK_D)  # (keys, head dim)
    # With one key in all, every row sees one (`sees_one`), and v is 0, so that dP is. Otherwise such rows lie at the
    # edge of the band, and are masked below.
    v = load_block(V, v_strides, keys, tl.where(n_k == 1, 0, n_k), True, HEAD_DIM, BLOCK_D)
    dk = tl.full([BLOCK_K, BLOCK_D], 0.0, tl.float32)
    dv = tl.full([BLOCK_K, BLOCK_D], 0.0, tl.float32)

    # Over the blocks of rows that see these keys: seen from a key, the band lies the other way round.
    low, high = band(n_q, n_k, left, right, BOTTOM_RIGHT, CAUSAL_TOP_LEFT)
    bounds = spans(start, tl.minimum(start + BLOCK_K, n_k) - 1, n_q, -high, -low, BLOCK_Q)
    FIRST_PART: tl.constexpr = 0 if right is not None or CAUSAL_TOP_LEFT else 1
    block = tl.arange(0, BLOCK_Q)
    for member in range(GROUP):  # the query heads that share these keys
        head = kv_head * GROUP + member
        Q = head_of(q_ptr, q_strides, batch, head, cu_seqlens_q)
        DO = head_of(do_ptr, do_strides, batch, head, cu_seqlens_q)
        LSE = head_of(lse_ptr, lse_strides, batch, head, cu_seqlens_q)
        DELTA = head_of(delta_ptr, delta_strides, batch, head, cu_seqlens_q)
        state = start_hash(seed, batch, head)
        Q, DO = move(Q, q_strides, bounds[FIRST_PART]), move(DO, do_strides, bounds[FIRST_PART])
        LSE, DELTA = move(LSE, lse_strides, bounds[FIRST_PART]), move(DELTA, delta_strides, bounds[FIRST_PART])
        for part in tl.static_range(FIRST_PART, 3):  # part 1 needs no mask, 0 and 2 do
            for start_q in range(bounds[part], bounds[part + 1], BLOCK_Q):
                rows = start_q + block
                # Beyond the end stands the last row once more, with a P of 0 (`visible`).
                near = tl.minimum(block, n_q - 1 - start_q) if part != 1 else block
                q = load_block(Q, q_strides, near, n_q, False, HEAD_DIM, BLOCK_D)
                lse = load_numbers(LSE, lse_strides, near, n_q, False)
                s = over_columns(k, q, PRECISION)  # S^T = K Q^T: (keys, rows)
                p = tl.exp2((s * scale - lse[None, :]) * LOG2_E)  # P^T = exp(S^T - lse)
                if part != 1:
                    p = tl.where(visible(keys[:, None], rows[None, :], n_q, -high, -low), p, 0.0)
                kept = dropout(seed, state, rows[None, :], keys[:, None], threshold, factor)
                do = load_block(DO, do_strides, near, n_q, False, HEAD_DIM, BLOCK_D)
                dv = tl.dot((p * kept).to(do.dtype), do, dv, input_precision=PRECISION)  # dV += P^T dO
                dp = over_columns(v, do, PRECISION) * kept  # dP^T = V dO^T
                if part != 1:
                    dp = tl.where(sees_one(rows, n_k, low, high)[None, :], 0.0, dp)
                delta = load_numbers(DELTA, delta_strides, near, n_q, False)
                ds = p * (dp - delta[None, :])  # dS^T = P^T (dP^T - delta)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # dK += dS^T Q
                Q, DO = move(Q, q_strides, BLOCK_Q), move(DO, do_strides, BLOCK_Q)
                LSE, DELTA = move(LSE, lse_strides, BLOCK_Q), move(DELTA, delta_strides, BLOCK_Q)

    DK = head_of(dk_ptr, dk_strides, batch, kv_head, cu_seqlens_k)
    DV = head_of(dv_ptr, dv_strides, batch, kv_head, cu_seqlens_k)
    store_block(DK, dk_strides, keys, n_k, dk * scale, HEAD_DIM, BLOCK_D)
    store_block(DV, dv_strides, keys, n_k, dv, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=GENERAL)
def dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr,
    do_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dq_strides,
    heads, n_q, n_k, cu_seqlens_q, cu_seqlens_k,
    scale, left, right, seed, threshold, factor,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAUSAL_TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ of one block of rows."""
    start, head, batch = place(n_q, heads, BLOCK_Q, right is not None)
    n_q, n_k = length(cu_seqlens_q, batch, n_q), length(cu_seqlens_k, batch, n_k)
    if start >= n_q:
        return
    rows = start + tl.arange(0, BLOCK_Q)
    Q = head_of(q_ptr, q_strides, batch, head, cu_seqlens_q)
    DO = head_of(do_ptr, do_strides, batch, head, cu_seqlens_q)
    LSE = head_of(lse_ptr, lse_strides, batch, head, cu_seqlens_q)
    DELTA = head_of(delta_ptr, delta_strides, batch, head, cu_seqlens_q)
    K = head_of(k_ptr, k_strides, batch, head // GROUP, cu_seqlens_k)
    V = head_of(v_ptr, v_strides, batch, head // GROUP, cu_seqlens_k)
    state = start_hash(seed, batch, head)
    q = load_block(Q, q_strides, rows, n_q, True, HEAD_DIM, BLOCK_D)
    do = load_block(DO, do_strides, rows, n_q, True, HEAD_DIM, BLOCK_D)
    lse = load_numbers(LSE, lse_strides, rows, n_q, True)
    delta = load_numbers(DELTA, delta_strides, rows, n_q, True)
    dq = tl.full([BLOCK_Q, BLOCK_D], 0.0, tl.float32)

    # Over the blocks of keys that these rows see.
    low, high = band(n_q, n_k, left, right, BOTTOM_RIGHT, CAUSAL_TOP_LEFT)
    bounds = spans(start, tl.minimum(start + BLOCK_Q, n_q) - 1, n_k, low, high, BLOCK_K)
    FIRST_PART: tl.constexpr = 0 if left is not None else 1
    block = tl.arange(0, BLOCK_K)
    K, V = move(K, k_strides, bounds[FIRST_PART]), move(V, v_strides, bounds[FIRST_PART])
    for part in tl.static_range(FIRST_PART, 3):  # part 1 needs no mask, 0 and 2 do
        for start_k in range(bounds[part], bounds[part + 1], BLOCK_K):
            keys = start_k + block
            k = load_block(K, k_strides, block, n_k - start_k, part != 1, HEAD_DIM, BLOCK_D)
            v = load_block(V, v_strides, block, n_k - start_k, part != 1, HEAD_DIM, BLOCK_D)
            s = over_columns(q, k, PRECISION)  # S = Q K^T: (rows, keys)
            p = tl.exp2((s * scale - lse[:, None]) * LOG2_E)  # P = exp(S - lse)
            if part != 1:
                p = tl.where(visible(rows[:, None], keys[None, :], n_k, low, high), p, 0.0)
            kept = dropout(seed, state, rows[:, None], keys[None, :], threshold, factor)
            dp = over_columns(do, v, PRECISION) * kept  # dP = dO V^T
            if part != 1:  # a row that sees one key needs no dP
                dp = tl.where(sees_one(rows, n_k, low, high)[:, None], 0.0, dp)
            ds = p * (dp - delta[:, None])  # dS = P (dP - delta)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # dQ += dS K
            K, V = move(K, k_strides, BLOCK_K), move(V, v_strides, BLOCK_K)

    DQ = head_of(dq_ptr, dq_strides, batch, head, cu_seqlens_q)
    dq = tl.where(lse[:, None] == float("inf"), 0.0, dq * scale)  # a row of -inf alone: 0 times a key of -inf is NaN
    store_block(DQ, dq_strides, rows, n_q, dq, HEAD_DIM, BLOCK_D)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse (batch, heads, Nq). Shapes and packed sequences: `flash.attention`."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if INTERPRETED and q.dtype == torch.bfloat16:  # NumPy has no bfloat16, and the interpreter's is wrong
        exact, lse = forward(q.float(), k.float(), v.float(), options)
        return out.copy_(exact), lse
    forward_launch(q, k, v, out, lse, options).run()
    return out, lse


def forward_launch(q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options) -> Launch:
    """The launch that fills out and lse."""
    # The largest score must stay the largest when it is scaled: a sign goes to q. With scale 0 any other scale will do.
    if options.scale <= 0:
        q, options = q * (-1 if options.scale < 0 else 0), options._replace(scale=abs(options.scale) or 1.0)
    return prepare(forward_kernel, (q, k, v, out, lse), q, k, options)


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv like q, k, v."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dout, dlse = options.zero_rows_without_keys(dout, dlse, lse)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row whose scores are all -inf: P = exp(-inf - inf) = 0
    if INTERPRETED and q.dtype == torch.bfloat16:
        exact = backward(dout.float(), dlse, q.float(), k.float(), v.float(), out.float(), lse, options)
        return dq.copy_(exact[0]), dk.copy_(exact[1]), dv.copy_(exact[2])
    for launch in backward_launches(dout, dlse, q, k, v, out, lse, torch.empty_like(lse), dq, dk, dv, options):
        launch.run()
    return dq, dk, dv


def backward_launches(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, delta: Any, dq: Any, dk: Any, dv: Any,
    options: Options,
) -> list[Launch]:  # fmt: skip
    """The launches that fill delta, then dk and dv, then dq; in this order, since the last two read delta."""
    return [
        prepare(delta_kernel, (dout, out, dlse, delta), q, k, options),
        prepare(dkdv_kernel, (dout, q, k, v, lse, delta, dk, dv), q, k, options),
        prepare(dq_kernel, (dout, q, k, v, lse, delta, dq), q, k, options),
    ]
