"""FlashAttention backward: no scores were kept, only q, k, v, out and one number per row, the logsumexp. From
it the weights come back without a maximum and without a sum: P = exp(S - lse). For each block of keys j, over
the blocks of rows i:

    dV_j += Pᵀ dO_i      dP = dO_i V_jᵀ      dS = P (dP - delta_i)      dK_j += scale dSᵀ Q_i      dQ_i += scale dS K_j

with delta_i = rowsum(dO_i O_i), computed before: softmax's derivative needs Σ_j P_ij dP_ij, and that is the
same number.

The helpers are those of the forward pass; part.key_blocks() and part.rows_that_see(keys) go the other way round, and
part.add(DQ, rows, block) loads, adds and stores: dQ is summed up over the blocks of keys, in FP32.
"""

from random import Random
from typing import Any

import torch

from flash import tiled
from flash.traffic import count
from minizero.memory import Ledger
from tests.exercises import e34_tiled_forward as forward
from tests.exercises.kit import AtMost, wrong

PLAN = [
    "dq begins at zero. For each part: views of rows (dout, q, dq, lse, delta) and of keys (k, v, dk, dv), and "
    "two tiles.",
    "For each block of keys: load k_j (times options.scale) and v_j; dk_j and dv_j begin as zeros.",
    "For each block of rows that see them: load q_i, do_i, and the columns l (lse) and d (delta); S, hidden; p = "
    "exp(S - l).",
    "dv_j gets pᵀ do_i (with dropout on p). A row that sees one key has p = 1 and dS = 0, and two rounded sums would "
    "not cancel to 0: so part.zero_rows_with_one_key(do_i, rows), once dv_j has got its own. dP = do_i v_jᵀ (with "
    "dropout, too); dS = p (dP - d); dk_j gets dSᵀ q_i; add dS k_j to dQ.",
    "Store dk_j times options.scale, and dv_j.",
]
HINTS = [
    "scores(do_i, v_j, other_tile) is do_i v_jᵀ: it takes the same form as q_i k_jᵀ.",
    "k_j was multiplied by the scale when it was loaded: so dS k_j brings it for dQ, and dK needs it once, at the end.",
    "dv_j.baddbmm_(p.mT, do_i) adds the product of each head.",
    "Where a row sees one key, P is 1 whatever its score: delta leaves dO O out there, so dO V must go as well.",
]
AFTER = (
    "The loop over keys is the outer one, so dK and dV of a block are complete when they are stored. Only dQ adds up "
    "in HBM, in the dtype of the computation. Keys are scaled when they are loaded, so dQ needs no scale, and dK gets "
    "its own once. If a row sees one key, its weight is 1 whatever the score: for dP the package sets its dO to 0, "
    "because two sums that should cancel are rounded in different orders. Read next: `dq_kernel` in flash/kernels.py."
)
WRONG = [
    wrong("forgets-delta", "dS is P · dP without delta: softmax's derivative also has -Σ_j P_ij dP_ij, which is "
          "delta_i.", ("dp.sub_(d).mul_(p)", "dp.mul_(p)")),
    wrong("forgets-the-scale-in-dk", "dK lacks the scale: S = scale · Q Kᵀ.",
          ("part.store(DK, keys, dk_j.mul_(options.scale))", "part.store(DK, keys, dk_j)")),
    wrong("scales-dq-twice", "dQ has the scale twice: k_j was multiplied by it when it was loaded.",
          ("torch.bmm(ds, k_j, out=q_i)", "torch.bmm(ds, k_j, out=q_i).mul_(options.scale)")),
    wrong("softmax-of-a-block", "A softmax of one block's scores is not the row's: P is exp(S - lse).",
          ("p = exp_(s.sub_(l))", "p = s.softmax(-1)")),
    wrong("overwrites-dq", "dQ has the last block of keys only: each block adds to it.",
          ("part.add(DQ, rows,", "part.store(DQ, rows,")),
    wrong("forgets-the-mask", "Gradients come from keys that are hidden: hide them in S as in forward.",
          ("part.hide(s, rows, keys)", "pass")),
    wrong("dq-not-zeroed", "dQ begins with what was in its memory: set it to zero first.", ("    dq.zero_()\n", "")),
    wrong("dk-from-p", "dK is scale · dSᵀ Q, not Pᵀ Q.", ("dk_j.baddbmm_(ds.mT,", "dk_j.baddbmm_(p.mT,"),
          ("dp.sub_(d).mul_(p)", "dp.sub_(d) * p")),
]  # fmt: skip


def draw(random: Random) -> list[forward.Case]:
    return forward.draw(random)


def result(case: forward.Case) -> dict[str, Any]:
    """Gradients, the bytes that move, neither more nor fewer, and the peak of what is held beside them."""
    q, k, v, options = forward.given(case)
    out, lse = tiled.forward(q, k, v, options, case.blocks)
    generator = torch.Generator().manual_seed(case.seed)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    delta, no = torch.empty_like(lse), torch.zeros_like(lse)
    tiled.delta_tiles(dout, out, no, delta, q, k, options, case.blocks)
    dq, dk, dv = torch.full_like(q, 7.0, dtype=lse.dtype), torch.full_like(k, 7.0), torch.full_like(v, 7.0)
    with forward.tiles_of(case):
        with Ledger() as ledger:
            tiled.backward_tiles(dout, q, k, v, lse, delta, dq, dk, dv, options, case.blocks)
            kept = ledger.current["total"]
        others = (torch.empty_like(gradient) for gradient in (dq, dk, dv))
        moved = count(tiled.backward_tiles, dout, q, k, v, lse, delta, *others, options, case.blocks)
    held = AtMost(ledger.peak["total"], forward.most(case))
    bytes_ = {"loaded": moved.loads, "stored": moved.stores, "at the peak": held, "kept after the call": kept}
    return {"dQ": dq, "dK": dk, "dV": dv, "bytes": bytes_}


tolerance = forward.tolerance
