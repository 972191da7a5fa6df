"""The forward pass of FlashAttention on a page, as one Triton kernel: read this first.

A block of rows Q_i meets the blocks of keys and values K_j, V_j one after the other. Each row keeps three things: its
largest score so far, m; the sum of the exponentials so far, l; the sum of the values times these exponentials, acc.

    S = scale Q_i K_j^T     m_new = max(m, rowmax S)     P = exp(S - m_new)
    l = exp(m - m_new) l + rowsum P     acc = exp(m - m_new) acc + P V_j     after the last block O_i = acc / l

The maximum is subtracted because exp of a large score overflows. What l and acc have so far was measured against the
old maximum m, and the factor exp(m - m_new) measures it against the new one. So the result is softmax(S) V, exactly.

A GPU runs one program for each block of rows of each head. The program's block of scores stays on the chip, and the
next block takes its place: the N × N scores are never in memory. Without a GPU Triton's interpreter runs the same code.
What this page leaves out is why there are more files:

    kernels.py      the backward pass, and the logsumexp that it needs; grouped heads; more keys than queries; rows that
                    see no key; bfloat16 without a GPU
    masks.py        windows, dropout, packed sequences, any head dim, any strides, more than 2^31 elements; which blocks
                    need no mask; FP32 scores with a smaller rounding error
    launch.py       block shapes for each GPU and head dim
    attention.py    gradients by autograd, empty tensors, several threads at once

Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax" (m and l); Dao et al., 2022, "FlashAttention",
Algorithm 1 (acc, and the blocks); Dao, 2023, "FlashAttention-2" (a program for each block of rows, one division at its
end).
"""

import torch
import triton
import triton.language as tl

import flash.launch  # noqa: F401  mends the interpreter of Triton 3.6


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, n, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    # This program has BLOCK rows of one head. One head lies behind the other in memory, n rows of D numbers each.
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1) * n * D
    rows, columns = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, D)[None, :]
    # These rows of Q, and m, l, acc of each row, stay on the chip until the end.
    q = tl.load(q_ptr + head + rows * D + columns, mask=rows < n, other=0.0)  # Q_i; zeros from row n on
    m = tl.full([BLOCK, 1], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK, 1], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    # Over the blocks of keys. In causal attention a row sees no later key: no block behind these rows is needed.
    end = tl.minimum(first + BLOCK, n) if CAUSAL else n
    for start in range(0, end, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        places = head + keys[:, None] * D + columns
        k = tl.load(k_ptr + places, mask=keys[:, None] < n, other=0.0)  # K_j
        v = tl.load(v_ptr + places, mask=keys[:, None] < n, other=0.0)  # V_j
        s = scale * tl.dot(q, tl.trans(k), input_precision="ieee")  # S = scale Q_i K_j^T: (rows, keys)
        # A hidden key must have weight 0. That is exp(-inf): with a score of 0 it would count.
        visible = (keys < n) & (keys <= rows) if CAUSAL else keys < n
        s = tl.where(visible, s, float("-inf"))
        larger = tl.maximum(m, tl.max(s, 1, keep_dims=True))  # m_new: finite, for each row sees key 0
        p = tl.exp(s - larger)  # P = exp(S - m_new)
        rescale = tl.exp(m - larger)  # exp(m - m_new): 0 at the first block, which has nothing to rescale
        l = rescale * l + tl.sum(p, 1, keep_dims=True)
        acc = rescale * acc + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = larger
    tl.store(out_ptr + head + rows * D + columns, (acc / l).to(q.dtype), mask=rows < n)  # O_i


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """softmax(q k^T / sqrt(head dim)) v. q, k, v and the result: (batch, heads, sequence, head dim).

    FP32 or FP16; the head dim is a power of 2 from 16 to 128. `ValueError` for other dtypes, or more than one shape.
    """
    if not q.shape == k.shape == v.shape or q.dtype not in (torch.float32, torch.float16):
        given = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"attention on a page: q, k, v are {given}, {q.dtype}; expected one shape, FP32 or FP16")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, heads, n, head_dim = q.shape
    out = torch.empty_like(q)
    block = 128 // q.element_size()  # 64 rows in FP16, 32 in FP32: what one program holds must fit on the chip
    programs = triton.cdiv(n, block), batch * heads
    attention_kernel[programs](q, k, v, out, n, head_dim**-0.5, CAUSAL=causal, D=head_dim, BLOCK=block)
    return out
