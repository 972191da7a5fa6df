"""What options add to the kernels: the band, packed sequences, dropout, head dims that are no power of 2.

Triton compiles a kernel for the options it is called with. An argument that is None is known then, so that
`if left is not None` is decided once, by the compiler, and an option that is off leaves nothing behind.
What the options mean: `flash.options`.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Triton chose at its first import: under its interpreter these kernels run on a CPU, operation by operation.
INTERPRETED = not isinstance(tl.cdiv, triton.JITFunction)

LOG2_E = tl.constexpr(1.4426950408889634)


def helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call. The interpreter, which would patch `tl` anew for each call, takes plain Python."""
    return function if INTERPRETED else triton.jit(function)


# Where a program's work lies.


@helper
def place(n, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Of this program: the first row of its block, its head, its batch.

    LAST_FIRST: under a causal mask the last rows see the most keys, and what takes longest must not start last.
    """
    program, blocks = tl.program_id(0), (n + BLOCK - 1) // BLOCK
    block = program % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block * BLOCK, program // blocks % heads, program // blocks // heads


@helper
def length(cu_seqlens, batch, n):
    """Rows of this sequence: of a packed one, or n."""
    if cu_seqlens is None:
        return n
    else:
        return tl.load(cu_seqlens + batch + 1) - tl.load(cu_seqlens + batch)


@helper
def head_of(pointer, strides, batch, head, cu_seqlens):
    """Pointer to the first row of one head of one sequence. 64 bits: a tensor may have more than 2^31 elements."""
    pointer += head.to(tl.int64) * strides[1]
    if cu_seqlens is None:
        return pointer + batch.to(tl.int64) * strides[0]
    else:
        return pointer + tl.load(cu_seqlens + batch).to(tl.int64) * strides[2]


# Loads and stores of a block: rows × head dim, padded with zeros to a power of 2.


@helper
def load_block(pointer, strides, rows, n, CHECK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) of one head. CHECK: rows from n on do not exist, and are zeros."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + rows[:, None].to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[3]
    if CHECK:
        return tl.load(pointers, mask=(rows[:, None] < n) & (columns < HEAD_DIM), other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=columns < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@helper
def store_block(pointer, strides, rows, n, block, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rounds to the dtype of the tensor."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + rows[:, None].to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[3]
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=(rows[:, None] < n) & (columns < HEAD_DIM))


@helper
def load_numbers(pointer, strides, rows, n):
    """One number for each row, such as delta; 0 from row n on."""
    return tl.load(pointer + rows.to(tl.int64) * strides[2], mask=rows < n, other=0.0)


@helper
def load_lse(pointer, strides, rows, n):
    """The logsumexp. Rows that see nothing, or do not exist, get +inf: exp2(S - inf) = 0."""
    lse = tl.load(pointer + rows.to(tl.int64) * strides[2], mask=rows < n, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@helper
def store_numbers(pointer, strides, rows, n, numbers):
    """One number for each row that exists, such as the logsumexp."""
    tl.store(pointer + rows.to(tl.int64) * strides[2], numbers, mask=rows < n)


# Products over the head dim: scores, whose rounding errors the exponentials make large.


@helper
def over_columns(a, b, PRECISION: tl.constexpr):
    """a b^T. In float32 a long head dim is summed in parts of 32, and then the parts: a sum of 256 terms in a row has
    three times the rounding error. The matrix units, which 16-bit numbers go through, have an order of their own."""
    PARTS: tl.constexpr = a.shape[1] // 32 if a.dtype == tl.float32 and PRECISION == "ieee" else 1
    if PARTS > 1:
        a = tl.permute(tl.reshape(a, [a.shape[0], PARTS, 32]), [1, 0, 2])
        b = tl.permute(tl.reshape(b, [b.shape[0], PARTS, 32]), [1, 2, 0])
        return tl.sum(tl.dot(a, b, input_precision=PRECISION), 0)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


# The band: position i sees i + o - before to i + o + after.


@helper
def diagonal(n_q, n_k, BOTTOM_RIGHT: tl.constexpr):
    """o: query i sits at key i + o."""
    if BOTTOM_RIGHT:
        return n_k - n_q
    else:
        return 0


@helper
def spans(first, last, n, o, before, after, BLOCK: tl.constexpr, MASK_END: tl.constexpr):
    """Which blocks, of the n positions over there, the positions first to last need: four bounds a, b, c, d.

    Blocks from a to b need a mask, from b to c none, from c to d a mask again; a, b, c are multiples of BLOCK.
    A side without a bound is None. MASK_END: the block that n cuts off needs a mask.
    For keys that rows see call with o, left, right; for rows that see keys with -o, right, left.
    """
    a, b, c, d = 0, 0, n if MASK_END else n + BLOCK - 1, n
    if before is not None:
        a = tl.maximum(first + o - before, 0)
        b = tl.maximum(last + o - before, 0)
    if after is not None:
        c = tl.minimum(c, first + o + after)  # not + 1: the last that sees `first` may see nothing else (`sees_one`)
        d = tl.minimum(d, last + o + after + 1)
    d = tl.where(a < d, d, 0)  # nothing is visible: four bounds that hold no block
    end = (d + BLOCK - 1) // BLOCK * BLOCK
    b = tl.minimum((b + BLOCK - 1) // BLOCK * BLOCK, end)
    c = tl.maximum(tl.minimum(c // BLOCK * BLOCK, end), b)
    return a // BLOCK * BLOCK, b, c, d


@helper
def visible(rows, keys, n_k, o, left, right):
    """True where a row may see a key: rows and keys as a column and a row, or the other way round."""
    seen = keys < n_k
    if left is not None:
        seen = seen & (keys >= rows + o - left)
    if right is not None:
        seen = seen & (keys <= rows + o + right)
    return seen


@helper
def sees_one(rows, n_k, o, left, right):
    """True where a row sees one key.

    One key has the weight 1 whatever its score, so its dS is dlse. In dP - dO O two sums would have to cancel, each
    rounded in an order of its own: from a dO of 0 both are 0.
    """
    first, last = rows * 0, rows * 0 + n_k - 1
    if left is not None:
        first = tl.maximum(first, rows + o - left)
    if right is not None:
        last = tl.minimum(last, rows + o + right)
    return first == last


# Dropout: MurmurHash3 of (seed, batch, head, i, j), in unsigned 32-bit arithmetic.


@helper
def absorb(state, word):
    """The state of the hash after one more word."""
    word = word.to(tl.uint32) * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@helper
def start_hash(seed, batch, head):
    """What all weights of a head have in common; 0 without dropout."""
    if seed is None:
        return 0
    else:
        word = tl.load(seed)
        state = absorb(word.to(tl.uint32) * 0, word)
        return absorb(absorb(absorb(state, word >> 32), batch), head)


@helper
def dropout(seed, state, rows, keys, threshold, factor):
    """What a weight is multiplied by: factor = 1 / (1 - p) where it is kept, else 0; 1 without dropout."""
    if seed is None:
        return 1.0
    else:
        h = absorb(absorb(state, rows), keys) ^ 24  # the length of six words
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        return tl.where((h ^ (h >> 16)) >= threshold.to(tl.uint32), factor, 0.0)
