"""FlashAttention forward: for each block of rows i, over the blocks of keys j that it sees, the online softmax
of many rows at once. The N × N scores never exist; one tile of them does, in memory that is used again for
every block.

    S = Q_i K_jᵀ · scale    m' = max(m, rowmax S)    P = exp(S - m')
    l = exp(m - m') l + rowsum P      O = exp(m - m') O + P V_j       at the end O_i = O / l,  lse_i = m + log l

A `part` (flash/tiles.py) is as many heads as fill a tile; parts(q, k, options, blocks) gives them one after the other:

    part.of_rows(q, out, lse)  part.of_keys(k, v)    views of its long tensors
    part.row_blocks()  part.keys_seen_by(rows)       ranges of rows, of keys
    part.load(X, span)  part.store(X, span, block)   copy a block in, and out; (heads, rows, head dim)
    scores(q_i, k_j, tile)                           q_i k_jᵀ, written into `tile` = part.empty_tile(q)
    part.hide(s, rows, keys)                         sets what a row may not see to -∞
    part.dropout_mask(rows, keys, p)                 for weights p; None without dropout; times(p, mask) applies it
    exp_(x)                                          the exponential, written over x

Memory is why there are tiles. So the tile is written over again and again, and so is o: `mul_`, `baddbmm_`.
"""

import contextlib
import itertools
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch

from flash import tiled
from flash.checks import check as check_options
from flash.traffic import count
from minizero.memory import Ledger
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, Tolerance, wrong

PLAN = [
    "For each part: its views, and one tile. For each block of rows: load q_i; o zeros like it; l zeros and m, "
    "one column each. m begins at the lowest finite number: where a row has seen nothing, -∞ - -∞ would be NaN.",
    "For each block of keys that these rows see: load k_j and v_j; multiply k_j by options.scale; the scores; hide.",
    "The new maximum; p = exp(s - new), written over s; rescale = exp(old - new); update l, then o, with "
    "dropout on p for o only.",
    "Store lse = m + log l, and o / l. Where l is 0 a row has seen nothing: its lse is -∞, its output 0, so "
    "divide by 1.",
]
HINTS = [
    "s.amax(-1, keepdim=True) is the maximum of each row of a block, as a column.",
    "exp_(x) overwrites x; o.mul_(rescale).baddbmm_(p, v_j) rescales and adds the product.",
    "l.masked_fill_(l == 0, 1) keeps 0/0 away.",
]
AFTER = (
    "The package scales the block of keys, and not the scores, which are more numbers if a block has more rows than "
    "the head dimension. exp works in the tile's own memory. It is made of exp2, because a CPU's exp is very slow if "
    "the result underflows, as for every hidden score. The sum l is taken before dropout, because softmax knows "
    'nothing of it. The output is divided once, at the end. Read next: Dao, 2023, "FlashAttention-2", section 3.1.'
)
O_LINE = "o.mul_(rescale).baddbmm_("
WRONG = [
    wrong("rescales-the-sum-only", "lse is right and the output is not: when the maximum rises, what is in the output "
          "so far must be rescaled as the sum is.", (O_LINE, "o.baddbmm_(")),
    wrong("rescales-the-output-only", "Each row is a multiple of the right one, and lse is off: when the maximum rises "
          "the sum must be rescaled as well.", ("l.mul_(rescale).add_(", "l.add_(")),
    wrong("forgets-the-mask", "A row sees keys that are hidden from it: hide them before the maximum.",
          ("part.hide(s, rows, keys)", "pass")),
    wrong("forgets-to-divide", "Each row is a multiple of the right one: divide by the sum l at the end.",
          ("o.div_(l.masked_fill_(l == 0, 1))", "o")),
    wrong("lse-without-the-maximum", "lse is m + log l.", ("m + l.log()", "l.log()")),
    wrong("forgets-the-scale", "The scores are not scaled: multiply them (or the keys) by options.scale.",
          (".mul_(options.scale)", "")),
    wrong("full-scores", "The scores of all rows and keys are there at once. Only a tile may exist at a time.",
          ("for rows in part.row_blocks():", "for rows in [range(part.n_q)]:"),
          ("for keys in part.keys_seen_by(rows):", "for keys in [range(part.n_k)]:"),
          ("scores(q_i, k_j, tile)", "q_i @ k_j.mT")),
    wrong("nan-in-empty-rows", "A row that sees nothing gives NaN: begin with the lowest finite number as maximum, and "
          "divide by 1 where the sum is 0.", ("torch.finfo(l.dtype).min", 'float("-inf")')),
]  # fmt: skip


LARGE = (64, 64)  # rows and keys of a block, of which a tile is most of what is held


class Case(NamedTuple):
    causal: bool | str
    window: tuple[int | None, int | None] | None
    dropout: float
    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int
    scale: float | None
    blocks: tuple[int, int]
    first_row: str
    small_tiles: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """heads: those of q, and those of k and v. lengths: rows, and keys. first_row: of q.
    small_tiles: heads do not share one.
    """
    ways = itertools.product((False, True, "bottom-right"), (None, (20, None), (None, 3), (9, 0)), (0.0, 0.3))
    dtypes = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
    lengths = [(50, 50), (20, 60), (60, 20), (80, 17), (1, 70), (16, 200)]
    columns = (
        [1, 2],
        [(1, 1), (2, 2), (4, 2), (3, 1)],
        lengths,
        [8, 5, 16],
        [None, 0.7, -0.3],
        [(16, 16), (8, 32), (24, 8)],
        ["as drawn", "as drawn", "NaN", "far from 0"],
        [False, True],
    )
    cases = [Case(*row) for row in deal(random, ways, dtypes, *columns)]
    large = cases[0]._replace(causal=False, window=None, dropout=0.0, heads=(1, 1), lengths=(130, 150), blocks=LARGE)
    far = cases[1]._replace(causal=False, window=None, dtype=torch.float16, scale=0.7, first_row="far from 0")
    many = large._replace(dtype=torch.bfloat16, batch=1, lengths=(8, 400), blocks=(16, 4), first_row="all alike")
    plain = Case(False, None, 0.0, torch.float32, 1, (1, 1), (50, 50), 8, None, (16, 16), "as drawn", False, 1)
    return [
        plain,
        plain._replace(causal=True),
        *cases,
        large._replace(dtype=torch.float32, head_dim=8, small_tiles=True),
        far,
        far._replace(dtype=torch.float32),
        many,
    ]


HEAVY = Case(False, None, 0.0, torch.float32, 1, (1, 1), (400, 400), 8, None, (64, 64), "as drawn", False, 1)


def given(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """q, k, v and the options. k and v have gaps between their rows in memory."""
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [(heads, n) for heads, n in zip((*case.heads, case.heads[1]), (*case.lengths, case.lengths[1]))]
    q, k, v = (torch.randn(case.batch, *size, 2 * case.head_dim, generator=generator) * 2 for size in sizes)
    q, k, v = (x[..., : case.head_dim].to(case.dtype) for x in (q, k, v))
    if case.first_row == "NaN":
        q[..., 0, 0] = torch.nan
    if case.first_row == "far from 0":  # all its scores are one number, beyond what FP16 holds, or anyone expects
        q[..., 0, :], k[..., 0] = 0, 4
        q[..., 0, 0] = -60_000 if case.dtype == torch.float16 else -1e10
    if case.first_row == "all alike":  # each key counts as much: a sum of 400, of which 16 bits would lose some
        q, v = 0 * q, v.abs() + 2
    seed = case.seed if case.dropout else None
    options = check_options(
        "exercise", q, k, v, causal=case.causal, scale=case.scale, window=case.window, dropout_p=case.dropout,
        dropout_seed=seed,
    )  # fmt: skip
    return q, k, v, options.with_lengths(*case.lengths)


def result(case: Case) -> dict[str, Any]:
    """Values, the bytes that move, neither more nor fewer, and the peak of what is held beside them."""
    q, k, v, options = given(case)
    with tiles_of(case):
        with Ledger() as ledger:
            out, lse = tiled.forward(q, k, v, options, case.blocks)
            kept = ledger.current["total"]
        others = torch.empty_like(out), torch.empty_like(lse)
        moved = count(tiled.forward_tiles, q, k, v, *others, options, case.blocks)
    held, kept = (number - out.nbytes - lse.nbytes for number in (ledger.peak["total"], kept))
    peak = AtMost(held, most(case))
    bytes_ = {"loaded": moved.loads, "stored": moved.stores, "at the peak": peak, "kept after the call": kept}
    return {"the output": out, "lse": lse, "bytes": bytes_}


def most(case: Case) -> float:
    """How many times the package's peak may be needed. With large blocks a tile more is seen."""
    return 1.3 if case.blocks == LARGE else 1.5


def tiles_of(case: Case) -> contextlib.AbstractContextManager[Any]:
    return mock.patch("flash.tiles.TILE", 1) if case.small_tiles else contextlib.nullcontext()


def tolerance(case: Case) -> Tolerance:
    """In 16 bits a right answer may be off by one step of the largest value: it rounds once, at the end."""
    return {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1.2e-3, torch.bfloat16: 9e-3}
