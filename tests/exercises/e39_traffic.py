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

import torch

from flash import tiled, traffic
from flash.checks import check as check_options
from flash.traffic import count
from tests.exercises.draws import deal
from tests.exercises.kit import fail, size, value_or_error, wrong

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
    wrong("keys-only-once", (FORWARD, "loads = q + 2 * k\n")),
    wrong("forgets-the-values", (FORWARD, "loads = q + keys_for_rows * row\n")),
    wrong("forgets-lse", ("stores = q + heads * n_q * number\n", "stores = q\n")),
    wrong("forgets-the-group", ('*= kv_heads if algorithm == "tiled" else heads', "*= heads")),
    wrong("counts-elements", ("row = head_dim * itemsize", "row = head_dim")),
    wrong("forgets-the-batch", ("        return Traffic(batch * loads, batch * stores)\n\n    # delta",
                                "        return Traffic(loads, stores)\n\n    # delta")),
    wrong("forgets-the-sum-of-dq", ("loads += rows_for_keys * head_dim * number", "pass")),
    wrong("writes-the-scores", ("stores = q + heads * n_q * number\n",
                                "stores = q + heads * n_q * number + heads * n_q * n_k * itemsize\n")),
]  # fmt: skip


def measured(case: dict[str, Any], backward: bool) -> tuple[int, int]:
    """What the package's tiles move."""
    rows = (case["batch"], case["heads"], case["n_q"], case["head_dim"])
    keys = (case["batch"], case["kv_heads"], case["n_k"], case["head_dim"])
    q, dout, out, dq = (torch.ones(rows) for _ in range(4))
    k, v, dk, dv = (torch.ones(keys) for _ in range(4))
    lse, dlse, delta = (torch.ones(rows[:3]) for _ in range(3))
    options = check_options("exercise", q, k, v, causal=case["causal"])
    rest = options.with_lengths(case["n_q"], case["n_k"]), (case["block_q"], case["block_k"])
    if not backward:
        moved = count(tiled.forward_tiles, q, k, v, out, lse, *rest)
        return moved.loads, moved.stores
    first = count(tiled.delta_tiles, dout, out, dlse, delta, q, k, *rest)
    second = count(tiled.backward_tiles, dout, q, k, v, lse, delta, dq, dk, dv, *rest)
    return first.loads + second.loads, first.stores + second.stores


def check() -> None:
    case: dict[str, Any] = dict(
        n_q=64, n_k=64, head_dim=8, block_q=16, block_k=16, batch=1, heads=1, kv_heads=1, itemsize=4, causal=False
    )
    loads, stores = traffic.hbm_bytes(**case)
    want_loads, want_stores = measured(case, False)
    tensor, said = 64 * 8 * 4, "64 rows and keys of 32 bytes, blocks of 16: the tiles load"
    if (loads, stores) != (want_loads, want_stores):
        words = f"{said} {size(want_loads)} and store {size(want_stores)}; predicted {size(loads)} and {size(stores)}"
        if abs(loads * 4 - want_loads) < 5:
            fail("counts-elements", f"{words}: a quarter. Multiply by the bytes of an element.")
        if loads == 3 * tensor:
            fail("keys-only-once", f"{words}: K and V are loaded again for every block of rows.")
        if loads == tensor + (want_loads - tensor) // 2:
            fail("forgets-the-values", f"{words}: values are loaded with the keys.")
        if stores == tensor:
            fail("forgets-lse", f"{words}: with the output one number for each row is stored, the logsumexp.")
        if stores == want_stores + 64 * 64 * 4:
            fail("writes-the-scores", f"{words}: the scores stay in SRAM, that is the point.")
        fail("values", f"{words}.")
    loads, stores = traffic.hbm_bytes(**case, backward=True)
    want = measured(case, True)
    if (loads, stores) != want:
        words = f"{case}: backward loads and stores {want} bytes; predicted {loads, stores}"
        if loads == want[0] - 4 * tensor:
            fail(
                "forgets-the-sum-of-dq",
                f"{words}: to add to dQ, it must be loaded first, once for every block of keys.",
            )
        fail("values", f"{words}.")
    changes = [dict(batch=3), dict(heads=4, kv_heads=2), dict(causal=True, n_q=50), dict(block_q=50, n_k=33)]
    for change in changes:
        for backward in (False, True):
            got, want = tuple(traffic.hbm_bytes(**case | change, backward=backward)), measured(case | change, backward)
            if got == want:
                continue
            words = f"With {change}, backward={backward}: measured {want}, predicted {got}"
            if "batch" in change:
                fail("forgets-the-batch", f"{words}: each sequence of the batch moves its own.")
            if "heads" in change and not backward:
                fail("forgets-the-group", f"{words}: the tiled code loads keys once for all heads that share them.")
            fail("values", f"{words}.")
    by_hand()
    naive = [traffic.hbm_bytes(n, 64, algorithm="naive").total for n in (512, 4096)]
    tiles = [traffic.hbm_bytes(n, 64, algorithm="kernels").total for n in (512, 4096)]
    if not (naive[1] > 3 * tiles[1] and naive[0] < naive[1] / 32):
        fail("values", "At 4096 keys of 64 numbers plain attention must move several times what the kernels move.")
    refused: list[dict[str, Any]] = [
        dict(algorithm="magic"),
        dict(block_q=-1),
        dict(block_k=0),
        dict(heads=3, kv_heads=2),
        dict(heads=2, kv_heads=0),
        dict(window=(-1, 0)),
        dict(causal="diagonal"),
    ]
    for bad in refused:
        try:
            traffic.hbm_bytes(8, 8, **bad)
        except ValueError:
            continue
        fail("no-error", f"{bad} must be a ValueError.")


def by_hand() -> None:
    """64 rows and keys of 8 FP16 numbers, 4 heads that share 2 key/value heads, blocks of 16."""
    case: dict[str, Any] = dict(n_q=64, head_dim=8, block_q=16, block_k=16, itemsize=2, heads=4, kv_heads=2)
    q, k, numbers = 4 * 64 * 16, 2 * 64 * 16, 4 * 64 * 4  # bytes of q; of k; of lse or delta
    keys = 4 * 4 * 64 * 2 * 16  # K and V for each of 4 blocks of rows of 4 heads
    rows = 4 * 4 * 64 * (2 * 16 + 2 * 4)  # q, dO, lse, delta for each of 4 blocks of keys, for 4 heads
    scores = 4 * 64 * 64 * 2
    wants = {
        ("kernels", False): (q + keys, q + numbers),
        ("kernels", True): (
            (2 * q + numbers) + (2 * k + rows) + (2 * q + 2 * numbers + keys),
            numbers + 2 * k + q,
        ),
        ("naive", False): (q + 2 * k + scores + scores + 2 * k, 2 * scores + q),
        ("naive", True): (
            (scores + q) + (q + 2 * k) + 2 * scores + (scores + 2 * k) + (scores + q),
            2 * k + 2 * scores + q + 2 * k,
        ),
    }
    for (algorithm, backward), want in wants.items():
        got = tuple(traffic.hbm_bytes(**case, algorithm=algorithm, backward=backward))
        if got != want:
            fail("values", f"{case}, algorithm={algorithm!r}, backward={backward}: expected {want}, got {got}.")


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
    return [Case(*row) for row in deal(random, ways, *lengths, [8, 64, 5], blocks, [1, 2, 5], heads, [2, 4, 8])]


def result(case: Case) -> Any:
    options = dict(zip(("block_q", "block_k", "heads", "kv_heads"), (*case.blocks, *case.heads)))
    moved = value_or_error(
        traffic.hbm_bytes, case.n_q, case.head_dim, algorithm=case.algorithm, backward=case.backward, n_k=case.n_k,
        batch=case.batch, itemsize=case.itemsize, causal=case.causal, window=case.window, **options,
    )  # fmt: skip
    return moved if isinstance(moved, str) else {"loads": moved.loads, "stores": moved.stores}
