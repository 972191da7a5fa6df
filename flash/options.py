"""What the options of attention mean, for every implementation: the band of visible keys, and the dropout mask.

    visible    i + o - left <= j <= i + o + right      o = 0, or Nk - Nq; causal is right = 0
    dropout    keep <=> hash(seed, batch, head, i, j) >= p * 2^32

The mask is a hash of the position, so nothing stores it: forward and backward, the plain and the tiled code,
PyTorch and Triton all compute the same bits, whatever their block sizes. The hash is MurmurHash3 (x86, 32 bit;
Austin Appleby, 2011) of six words: the seed's two halves, batch, head, i, j.

`flash.checks.check` makes `Options` from the arguments of one call.
"""

from typing import NamedTuple

import torch

WORD = 0xFFFFFFFF  # 32-bit arithmetic in int64: multiply, then keep the low word


class Options(NamedTuple):
    """The options of one call, checked and in normal form. The computing functions need the lengths, too."""

    scale: float
    left: int  # keys before the diagonal that a query sees; -1: all of them
    right: int  # keys after the diagonal; -1: all of them
    bottom_right: bool  # the diagonal is at o = Nk - Nq instead of 0
    dropout_p: float
    seed: torch.Tensor | None  # int64, no dimensions, on q's device; None without dropout
    cu_seqlens_q: torch.Tensor | None = None  # int32: where each packed sequence starts, and the end
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int | None = None  # rows of the longest sequence: None until `with_lengths`
    max_k: int | None = None

    def with_lengths(self, max_q: int, max_k: int) -> "Options":
        """For sequences of at most so many rows and keys. A bound that no pair of positions reaches is none."""
        left, right = (-1 if side >= max_q + max_k else side for side in (self.left, self.right))
        return self._replace(left=left, right=right, max_q=max_q, max_k=max_k)

    def diagonal(self, n_q: int, n_k: int) -> int:
        """o: query i sits at key i + o."""
        return n_k - n_q if self.bottom_right else 0


def keys_of_rows(options: Options, rows: range, n_q: int, n_k: int) -> range:
    """The keys that at least one of these queries may see."""
    o = options.diagonal(n_q, n_k)
    first = max(0, rows.start + o - options.left) if options.left >= 0 else 0
    last = min(n_k, rows.stop - 1 + o + options.right + 1) if options.right >= 0 else n_k
    return range(first, max(first, last))


def rows_of_keys(options: Options, keys: range, n_q: int, n_k: int) -> range:
    """The queries that may see at least one of these keys."""
    o = options.diagonal(n_q, n_k)
    first = max(0, keys.start - o - options.right) if options.right >= 0 else 0
    last = min(n_q, keys.stop - 1 - o + options.left + 1) if options.left >= 0 else n_q
    return range(first, max(first, last))


def all_visible(options: Options, rows: range, keys: range, n_q: int, n_k: int) -> bool:
    """Whether each of these queries sees each of these keys: such a block needs no mask."""
    o = options.diagonal(n_q, n_k)
    left = options.left < 0 or rows.stop - 1 + o - options.left <= keys.start
    return left and (options.right < 0 or keys.stop - 1 <= rows.start + o + options.right)


def hidden(options: Options, rows: torch.Tensor, keys: torch.Tensor, n_q: int, n_k: int) -> torch.Tensor:
    """True where query i may not see key j: (rows, keys). rows, keys: the numbers i and j, int64 tensors."""
    middle = (rows + options.diagonal(n_q, n_k))[:, None]  # each query's key on the diagonal
    mask = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=rows.device)
    if options.left >= 0:
        mask |= keys < middle - options.left
    if options.right >= 0:
        mask |= keys > middle + options.right
    return mask


def sees_one(options: Options, rows: torch.Tensor, n_q: int, n_k: int) -> torch.Tensor:
    """True where a query sees exactly one key: (rows,). rows: their numbers, an int64 tensor."""
    middle = rows + options.diagonal(n_q, n_k)
    first = (middle - options.left).clamp(min=0) if options.left >= 0 else torch.zeros_like(rows)
    last = (middle + options.right).clamp(max=n_k - 1) if options.right >= 0 else torch.full_like(rows, n_k - 1)
    return first == last


def rotate_left(word: torch.Tensor, bits: int) -> torch.Tensor:
    """A 32-bit word, rotated: the bits that leave on the left come in on the right."""
    return ((word << bits) & WORD) | (word >> (32 - bits))


def scramble(word: torch.Tensor) -> torch.Tensor:
    """What MurmurHash3 does to a word before it is absorbed."""
    return rotate_left(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD


def absorb(state: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    """The state after one more word."""
    return (rotate_left(state ^ scrambled, 13) * 5 + 0xE6546B64) & WORD


def finish(state: torch.Tensor, length: int) -> torch.Tensor:
    """The hash of `length` bytes."""
    h = state ^ length
    h = (h ^ (h >> 16)) * 0x85EBCA6B & WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & WORD
    return h ^ (h >> 16)


def dropout_keep(
    seed: torch.Tensor, p: float, batches: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """True where a weight is kept: (batches, heads, rows, keys). Each of the four: a 1-d int64 tensor of numbers.

    seed: int64. A weight is kept with probability 1 - p, to within 2^-32.
    """
    state = torch.zeros_like(seed)
    words = seed & WORD, (seed >> 32) & WORD, batches[:, None, None, None], heads[:, None, None], rows[:, None], keys
    for word in words:
        state = absorb(state, scramble(word))
    return finish(state, 4 * len(words)) >= min(round(p * 2**32), WORD)
