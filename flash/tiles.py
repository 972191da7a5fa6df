"""How tiled attention cuts its work: parts of the batch, blocks of rows and keys, loads and stores.

A part has as many heads of as many sequences as fill one tile of scores. A tile of TILE scores in float32 is 2 MiB,
which the L2 caches of two cores hold: the CPU's counterpart of a GPU's SRAM. A load copies a block out of a long
tensor, a store copies one back; everything between the two happens in cache.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flash.options import Options, all_visible, dropout_keep, hidden, keys_of_rows, rows_of_keys, sees_one

TILE = 2**19
BLOCK = 256  # keys of a tile of one head
FEW = 32  # rows or keys: with fewer, `scores` sums in float64


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """16-bit tensors are computed with in float32, and rounded once, when they are stored."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Part(NamedTuple):
    """Some sequences of one length, and some of their heads. A block of it is 3-D: (kv heads, rows, head dim).

    A block of rows holds all the query heads that share a key/value head, one below the other, so that keys and
    values are loaded once for all of them.
    """

    options: Options
    batches: range  # numbers of the sequences
    kv_heads: int  # (sequences) · (key/value heads of each)
    q_index: tuple[slice, slice, slice]  # batch, head, row: where it lies in q, out, lse
    k_index: tuple[slice, slice, slice]
    n_q: int
    n_k: int
    block_q: int
    block_k: int

    def of_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This part of q, out, or lse, as a 4-D view."""
        return [(x if x.dim() == 4 else x[..., None])[self.q_index] for x in tensors]

    def of_keys(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This part of k or v, as a view."""
        return [x[self.k_index] for x in tensors]

    def empty_tile(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for the scores of one block. Every block uses it again, so it stays in the cache."""
        group = (self.q_index[1].stop - self.q_index[1].start) // (self.k_index[1].stop - self.k_index[1].start)
        size = self.kv_heads * group * min(self.block_q, self.n_q) * min(self.block_k, self.n_k)
        return x.new_empty(size, dtype=compute_dtype(x))

    def load(self, x: torch.Tensor, span: range) -> torch.Tensor:
        """A block of rows or keys, copied: (kv heads, rows of the whole group, head dim)."""
        block = x[:, :, span.start : span.stop]
        block = block.to(compute_dtype(x), copy=True, memory_format=torch.contiguous_format)
        return block.view(self.kv_heads, -1, x.shape[-1])

    def store(self, x: torch.Tensor, span: range, block: torch.Tensor) -> None:
        """Write a block back, rounded to x's dtype."""
        where = x[:, :, span.start : span.stop]
        where.copy_(block.view(where.shape))

    def add(self, x: torch.Tensor, span: range, block: torch.Tensor) -> None:
        """Add a block to what x holds: a load, a sum and a store."""
        where = x[:, :, span.start : span.stop]
        where.add_(block.view(where.shape))

    def row_blocks(self) -> list[range]:
        """All rows, `block_q` at a time."""
        return [range(start, min(start + self.block_q, self.n_q)) for start in range(0, self.n_q, self.block_q)]

    def key_blocks(self) -> list[range]:
        """All keys, `block_k` at a time."""
        return [range(start, min(start + self.block_k, self.n_k)) for start in range(0, self.n_k, self.block_k)]

    def keys_seen_by(self, rows: range) -> list[range]:
        """The blocks of keys of which at least one of these rows sees at least one key."""
        seen = keys_of_rows(self.options, rows, self.n_q, self.n_k)
        return [keys for keys in self.key_blocks() if keys.start < seen.stop and keys.stop > seen.start]

    def rows_that_see(self, keys: range) -> list[range]:
        """The blocks of rows in which at least one row sees at least one of these keys."""
        seeing = rows_of_keys(self.options, keys, self.n_q, self.n_k)
        return [rows for rows in self.row_blocks() if rows.start < seeing.stop and rows.stop > seeing.start]

    def hide(self, scores: torch.Tensor, rows: range, keys: range) -> None:
        """Set the scores of keys that a row may not see to -inf, in place. Most blocks have no such scores."""
        if not all_visible(self.options, rows, keys, self.n_q, self.n_k):
            mask = hidden(self.options, _numbers(rows, scores), _numbers(keys, scores), self.n_q, self.n_k)
            scores.view(-1, len(rows), len(keys)).masked_fill_(mask, -math.inf)

    def zero_rows_with_one_key(self, block: torch.Tensor, rows: range) -> None:
        """Set the rows of a block of dO that see one key to 0, in place.

        One key has the weight 1 whatever its score, so dS = dlse. In dS = P (dP - dO O + dlse) the sums dP and dO O
        would have to cancel, and each is rounded in its own order. With a dO of 0 both are 0.
        """
        if self.n_k == 1 or self.options.left >= 0 or self.options.right >= 0:
            one = sees_one(self.options, _numbers(rows, block), self.n_q, self.n_k)
            block.view(-1, len(rows), block.shape[-1]).masked_fill_(one[:, None], 0)

    def dropout_mask(self, rows: range, keys: range, scores: torch.Tensor) -> torch.Tensor | None:
        """For a block like `scores`: 1 / (1 - p) if a weight is kept, else 0. None without dropout."""
        if self.options.seed is None:
            return None
        heads = range(self.q_index[1].start, self.q_index[1].stop)
        positions = [_numbers(span, scores) for span in (self.batches, heads, rows, keys)]
        keep = dropout_keep(self.options.seed, self.options.dropout_p, *positions)
        return keep.view(scores.shape).to(scores.dtype).div_(1 - self.options.dropout_p)


def scores(a: torch.Tensor, b: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """a b^T of two blocks, written into `tile`: (kv heads, rows, keys)."""
    shape = a.shape[0], a.shape[1], b.shape[1]
    # The plain attention multiplies one row by dot products, of many partial sums, which round less than the long sums
    # of a matrix product. With few rows or keys float64 adds up, so that they are no less exact here.
    if min(shape[1:]) < FEW:
        a, b = a.double(), b.double()
        return tile[: math.prod(shape)].view(shape).copy_(torch.bmm(a, b.mT))
    return torch.bmm(a, b.mT, out=tile[: math.prod(shape)].view(shape))


def _numbers(span: range, like: torch.Tensor) -> torch.Tensor:
    """The numbers in `span` as a tensor, on the device of `like`."""
    return torch.arange(span.start, span.stop, device=like.device)


def parts(q: torch.Tensor, k: torch.Tensor, options: Options, blocks: tuple[int, int] | None = None) -> Iterator[Part]:
    """Cut the work. blocks: rows (of each head) and keys of a tile; by default BLOCK keys, and 2 BLOCK rows (BLOCK in a
    band) that the heads of one key/value head share.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0:
        return
    group = heads // kv_heads
    # A CPU takes the least time for flat products, of many rows with few keys. But a band is cut finely: if its edge
    # runs through a block, half of the block is computed in vain.
    band = options.left >= 0 or options.right >= 0
    shared_rows = BLOCK if band else 2 * BLOCK
    block_q, block_k = blocks or (max(16, shared_rows // group), BLOCK)
    for batches, rows, keys in _sequences(q, k, options):
        scores = group * max(1, min(len(rows), block_q)) * max(1, min(len(keys), block_k))
        fit = max(1, TILE // scores)  # so many key/value heads share a tile
        some_batches, some_heads = max(1, fit // kv_heads), min(fit, kv_heads)
        for b, h in itertools.product(range(0, len(batches), some_batches), range(0, kv_heads, some_heads)):
            numbers = batches[b : b + some_batches]
            last = min(h + some_heads, kv_heads)
            # Packed sequences lie behind each other in one batch.
            batch = slice(numbers.start, numbers.stop) if options.cu_seqlens_q is None else slice(0, 1)
            q_index = batch, slice(h * group, last * group), slice(rows.start, rows.stop)
            k_index = batch, slice(h, last), slice(keys.start, keys.stop)
            count = len(numbers) * (last - h)
            yield Part(options, numbers, count, q_index, k_index, len(rows), len(keys), block_q, block_k)


def _sequences(q: torch.Tensor, k: torch.Tensor, options: Options) -> list[tuple[range, range, range]]:
    """Numbers of sequences, their rows, their keys: padded sequences all at once, packed ones one by one."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return [(range(q.shape[0]), range(q.shape[2]), range(k.shape[2]))]
    starts = zip(options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist())
    pairs = enumerate(itertools.pairwise(starts))
    return [(range(n, n + 1), range(a, b), range(c, d)) for n, ((a, c), (b, d)) in pairs]
