"""Why are tiles faster, if they compute the same? Because what takes the time is moving bytes between HBM, the
GPU's large memory, and SRAM, the small one on the chip. So count the bytes.

    naive       Q, K, V read, out written, and the N × N matrices written and read       Θ(N d + N²)
    tiled       Q read once; K and V once for every block of rows; out and lse written   2 N d · N / B_q + …

Helpers: _naive_bytes(q, k, scores, backward) from bytes of Q, of K repeated for every head, and of the scores;
_band(n_q, n_k, causal, window) is the mask; _visited(n_q, n_k, block_q, block_k, band) is how many keys are
loaded, summed over the blocks of rows (the other way round: _visited(n_k, n_q, block_k, block_q, (band[1],
band[0]))).

Backward: delta = rowsum(dO O) - dlse is computed first. Then for each block of keys k, v are loaded and dk, dv
stored once, and q, dO, lse, delta for the rows that see it. "tiled" adds to dQ for each of them: a load and a
store of 4 bytes a number, 8 where q has 8; dQ is set to zero before, a store. "kernels" has a kernel for dQ of
its own, which reads q, dO, lse, delta once and K, V as forward does.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

from flash import traffic
from tests.exercises.draws import deal
from tests.exercises.kit import value_or_error, wrong

PLAN = [
    'Refuse an unknown algorithm ("naive", "tiled", "kernels"), blocks below 1, heads that kv_heads do not divide.',
    "row: bytes of a row of q, k, v or out. q and k: bytes of the whole of q (heads) and of k (kv_heads), for "
    "one batch.",
    "naive: _naive_bytes, times the batch.",
    "number = max(4, itemsize): bytes of a number of lse, delta or the sum of dQ. keys_for_rows: visited keys, times "
    'kv_heads for "tiled" (the group shares a load), times heads for "kernels".',
    "Forward: loads q and, for keys_for_rows keys, a row of K and one of V. Stores out and lse.",
    "Backward: delta loads dO, O and dlse, and stores delta. The rest as in the text. All for one batch; times `batch` "
    "at the end: Traffic(loads, stores).",
]
HINTS = [
    "Forward, tiled: loads = q + 2 · keys_for_rows · row; stores = q + heads · n_q · number.",
    "delta: loads 2q + heads·n_q·number, stores heads·n_q·number.",
    "rows_for_keys rows of a head are loaded for dK and dV: each brings q, dO (2 rows) and lse, delta (2 numbers).",
]
AFTER = (
    "The package takes the visited keys from the mask, so causal attention and windows pay only for the blocks that "
    'they see. "tiled" loads keys once for all heads that share them, "kernels" once for each head, as their code '
    "does. lse, delta and the sum of dQ have at least 4 bytes a number, whatever q has. A model may be wrong, so the "
    "tiled code is also measured: tests hold that both numbers are equal. Read next: `count` in flash/traffic.py."
)
FORWARD = "loads = q + 2 * keys_for_rows * row\n"
WRONG = [
    wrong("keys-only-once", "K and V are loaded again for every block of rows.", (FORWARD, "loads = q + 2 * k\n")),
    wrong("forgets-the-values", "Values are loaded with the keys.", (FORWARD, "loads = q + keys_for_rows * row\n")),
    wrong("forgets-lse", "With the output one number for each row is stored, the logsumexp.",
          ("stores = q + heads * n_q * number\n", "stores = q\n")),
    wrong("forgets-the-group", "The tiled code loads keys once for all heads that share them.",
          ('*= kv_heads if algorithm == "tiled" else heads', "*= heads")),
    wrong("counts-elements", "A quarter. Multiply by the bytes of an element.",
          ("row = head_dim * itemsize", "row = head_dim")),
    wrong("forgets-the-batch", "Each sequence of the batch moves its own.",
          ("        return Traffic(batch * loads, batch * stores)\n\n    # delta",
           "        return Traffic(loads, stores)\n\n    # delta")),
    wrong("forgets-the-sum-of-dq", "To add to dQ, it must be loaded first, once for every block of keys.",
          ("loads += rows_for_keys * head_dim * number", "pass")),
    wrong("writes-the-scores", "The scores stay in SRAM, that is the point.",
          ("stores = q + heads * n_q * number\n",
           "stores = q + heads * n_q * number + heads * n_q * n_k * itemsize\n")),
]  # fmt: skip


class Case(NamedTuple):
    algorithm: str
    backward: bool
    causal: bool | str
    window: tuple[int | None, int | None] | None
    n_q: int
    n_k: int
    head_dim: int
    blocks: tuple[int, int]
    batch: int
    heads: tuple[int, int]
    itemsize: int
    seed: int


def draw(random: Random) -> list[Case]:
    """heads: those of q, and those of k and v."""
    windows = (None, (5, None), (None, 3), (20, 0), (2, 7))
    ways = itertools.product(("naive", "tiled", "kernels"), (False, True), (False, True, "bottom-right"), windows)
    lengths = [[0, *(random.randint(1, 90) for _ in range(30))] for _ in "qk"]
    blocks = [(0, 8), (8, -1), *((random.randint(1, 40), random.randint(1, 40)) for _ in range(20))]
    heads = [(1, 1), (4, 2), (6, 3), (8, 1), (3, 2)]
    same = 64, 64, 64, (16, 16), 1, (1, 1), 2, 1
    plain = [Case(name, back, False, None, *same) for name in ("naive", "tiled", "kernels") for back in (False, True)]
    plain += [case._replace(blocks=blocks) for case in plain for blocks in ((0, 8), (8, 0))]  # errors
    return plain + [Case(*row) for row in deal(random, ways, *lengths, [8, 64, 5], blocks, [1, 2, 5], heads, [2, 4, 8])]


def result(case: Case) -> Any:
    options = dict(zip(("block_q", "block_k", "heads", "kv_heads"), (*case.blocks, *case.heads)))
    moved = value_or_error(
        traffic.hbm_bytes, case.n_q, case.head_dim, algorithm=case.algorithm, backward=case.backward, n_k=case.n_k,
        batch=case.batch, itemsize=case.itemsize, causal=case.causal, window=case.window, **options,
    )  # fmt: skip
    return moved if isinstance(moved, str) else {"loads": moved.loads, "stores": moved.stores}
