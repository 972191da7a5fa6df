"""What options add to the kernels: the band, packed sequences, dropout, head dims that are no power of 2.

Triton compiles a kernel for the options that it is called with. It knows then which arguments are None: the compiler
decides `if left is not None` once, and an option that is off leaves nothing behind.
What the options mean: `flash.options`.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Triton chose when it was first imported: under its interpreter kernels run on a CPU, operation by operation.
INTERPRETED = not isinstance(tl.cdiv, triton.JITFunction)

LOG2_E = tl.constexpr(1.4426950408889634)


def helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call. For the interpreter it stays plain Python, or each call would patch `tl` anew."""
    return function if INTERPRETED else triton.jit(function)


# Where a program's work lies.


@helper
def place(n, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(first row of this program's block, its head, its batch).

    LAST_FIRST: under a causal mask the last rows see the most keys, and what takes longest should not start last.
    """
    program, blocks = tl.program_id(0), (n + BLOCK - 1) // BLOCK
    block = program % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block * BLOCK, program // blocks % heads, program // blocks // heads


@helper
def length(cu_seqlens, batch, n):
    """Rows of this program's sequence: n, unless sequences are packed."""
    if cu_seqlens is None:
        return n
    else:
        return tl.load(cu_seqlens + batch + 1) - tl.load(cu_seqlens + batch)


@helper
def head_of(pointer, strides, batch, head, cu_seqlens):
    """Pointer to the first row of one head of one sequence. int64, since a tensor may have more than 2^31 elements."""
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
    """Store (rows, BLOCK_D), rounded to the tensor's dtype; rows from n on and the padding are left out."""
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
    """a b^T. In float32 the head dim is summed in parts of 32, and then the parts: one sum of 256 terms in a row has
    three times the rounding error. The matrix units, for 16-bit numbers, choose their own order."""
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
    """Which blocks of the n positions on the other side the positions first to last need: four bounds a, b, c, d.

    Blocks from a to b need a mask, from b to c none, from c to d a mask again; a, b, c are multiples of BLOCK.
    before, after: None for a side without a bound. MASK_END: a block that n cuts off needs a mask.
    For the keys that rows see call with o, left, right; for the rows that see keys with -o, right, left.
    """
    # From a to d: what at least one of these positions needs. From b to c: what all of them see.
    a, b, c, d = 0, 0, n if MASK_END else n + BLOCK - 1, n
    if before is not None:
        a = tl.maximum(first + o - before, 0)
        b = tl.maximum(last + o - before, 0)
    if after is not None:
        c = tl.minimum(c, first + o + after)  # not + 1: the last that sees `first` may see nothing else (`sees_one`)
        d = tl.minimum(d, last + o + after + 1)
    d = tl.where(a < d, d, 0)  # if nothing is visible: four bounds without a block between them
    # To the borders of blocks: a and c go down, b goes up.
    end = (d + BLOCK - 1) // BLOCK * BLOCK
    b = tl.minimum((b + BLOCK - 1) // BLOCK * BLOCK, end)
    c = tl.maximum(tl.minimum(c // BLOCK * BLOCK, end), b)
    return a // BLOCK * BLOCK, b, c, d


@helper
def visible(rows, keys, n_k, o, left, right):
    """True where a row may see a key. rows, keys: a column and a row of numbers, or a row and a column."""
    seen = keys < n_k
    if left is not None:
        seen = seen & (keys >= rows + o - left)
    if right is not None:
        seen = seen & (keys <= rows + o + right)
    return seen


@helper
def sees_one(rows, n_k, o, left, right):
    """True where a row sees exactly one key.

    One key has the weight 1 whatever its score, so dS = dlse. In dS = P (dP - dO O + dlse) the sums dP and dO O would
    have to cancel, and each is rounded in its own order. With a dO of 0 both are 0.
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
    """The hash of the words that all weights of a head share: seed, batch, head. 0 without dropout."""
    if seed is None:
        return 0
    else:
        word = tl.load(seed)
        state = absorb(word.to(tl.uint32) * 0, word)
        return absorb(absorb(absorb(state, word >> 32), batch), head)


@helper
def dropout(seed, state, rows, keys, threshold, factor):
    """What each weight is multiplied by: factor = 1 / (1 - p) if it is kept, else 0; 1 without dropout."""
    if seed is None:
        return 1.0
    else:
        h = absorb(absorb(state, rows), keys) ^ 24  # the length of six words
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        return tl.where((h ^ (h >> 16)) >= threshold.to(tl.uint32), factor, 0.0)
