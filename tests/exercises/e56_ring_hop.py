"""A text is cut across ranks, and keys and values go round the ring. At each hop h a rank computes the attention of its
own queries to the visiting keys: out_h and lse_h, the logsumexp of their scores. Merged over all hops they are

    out = Σ_h w_h out_h      lse = log Σ_h exp(lse_h)      w_h = exp(lse_h - lse)

Backward runs the attention of each hop again, and differentiates it. With dO, the gradient of out:

    the gradient of out_h:   w_h dO
    the gradient of lse_h:   w_h dO · (out_h - out)        summed over the head dimension

mine: q, dq, dout (that is dO), out and lse of this rank's rows. visiting: k, v, dk and dv of the keys that are here.
masked: whether attention is causal at this hop. What the hop adds to dq, dk and dv is added in place. The three have at
least 32 bits, whatever q has.

flash_attention(q, k, v, causal=masked, return_lse=True) gives out_h and lse_h, and autograd knows both.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from flash import flash_attention, merge
from minizero import ring_attention as module
from minizero.memory import Ledger
from tests.exercises.draws import deal
from tests.exercises.kit import OF_A_THREAD, AtMost, unchanged, wrong

PLAN = [
    "q, k and v without their history, but so that a gradient is asked for: detach, requires_grad_.",
    "The hop's attention once more, with autograd switched on: a backward runs without it.",
    "The two gradients, of out_h in q's dtype and of lse_h, without history. Then torch.autograd.grad of both at once.",
]
HINTS = [
    "A row's weight is one number for all of its head dimension, and out_h has one dimension more than lse_h.",
    "torch.autograd.grad(outputs, inputs, grad_outputs) takes tuples: each output has its own gradient.",
    "dq = dq + … makes a new tensor, which nobody looks at. dq += … writes where it was.",
]
AFTER = (
    "The package's function is this. The hop's graph ends with the call, so nothing of a hop is held when the next one "
    "comes. Libraries call the kernel of FlashAttention's backward with the whole lse and out instead: then P is "
    "exp(S - lse) at once, and no forward runs again. The one of this course takes a row that sees one key apart, and "
    "would be wrong there. Read next: `hops` in minizero/ring_attention.py."
)
WEIGHT = "(lse_h.detach() - lse).exp()[..., None] * dout"
BOTH = "(out_h, lse_h), inputs, (dout_h.to(q.dtype), dlse_h)"
WRONG = [
    wrong("forgets-lse", "The gradients are those of out_h alone: a larger lse_h gives this hop more weight in out.",
          (BOTH, "out_h, inputs, dout_h.to(q.dtype)")),
    wrong("forgets-out", "More weight for this hop is less for the others: lse_h gets w_h dO · (out_h - out).",
          ("(out_h.detach() - out)", "out_h.detach()")),
    wrong("no-weight", "out_h has the weight w_h = exp(lse_h - lse) in out, and so has its gradient.",
          (WEIGHT, "1.0 * dout")),
    wrong("lse-without-weight", "The gradient of lse_h has the weight w_h, too.",
          ("(dout_h * (out_h", "(dout * (out_h")),
    wrong("wrong-sign", "The gradient of lse_h has the wrong sign: it is w_h dO · (out_h - out).",
          ("(out_h.detach() - out)", "(out - out_h.detach())")),
    wrong("overwrites", "What earlier hops have added to dq, dk or dv is gone: add to it.",
          ("total += part", "total.copy_(part)")),
    wrong("adds-elsewhere", "dq, dk and dv are as they were before: add in place.",
          ("total += part", "total = total + part")),
    wrong("forgets-the-mask", "Keys that are hidden at this hop have got gradients: pass `masked` on.",
          ("causal=masked", "causal=False")),
]  # fmt: skip


class Case(NamedTuple):
    rows: int
    keys: int
    masked: bool
    heads: int
    kv_heads: int
    dtype: torch.dtype
    largest: float
    seed: int


def draw(random: Random) -> list[Case]:
    """masked: as many keys as rows. largest: how large scores are."""
    sizes = [(4, 4, False), (4, 4, True), (1, 1, True), (4, 2, False), (2, 4, False), (3, 1, False), (7, 7, True)]
    kinds = itertools.product(sizes, ((1, 1), (4, 2)), (torch.float64, torch.float32, torch.bfloat16))
    ways = [(*size, *heads, dtype) for size, heads, dtype in kinds]
    plain = Case(4, 4, False, 1, 1, torch.float64, 1.0, 1)
    return [plain, plain._replace(masked=True), *(Case(*row) for row in deal(random, ways, [1.0, 1.0, 30.0]))]


def result(case: Case) -> Any:
    """What a hop adds to three tensors that hold something already; other keys have been merged before."""
    generator = torch.Generator().manual_seed(case.seed)

    def drawn(heads: int, n: int) -> torch.Tensor:
        return torch.randn(2, heads, n, 4, generator=generator, dtype=torch.float64).to(case.dtype)

    q = drawn(case.heads, case.rows) * case.largest
    k, v, other_k, other_v = (drawn(case.kv_heads, case.keys) for _ in range(4))
    here = flash_attention(q, k, v, causal=case.masked, return_lse=True)
    out, lse = merge(*here, *flash_attention(q, other_k, other_v, return_lse=True))
    dq, dk, dv = (torch.randn_like(x, dtype=lse.dtype) for x in (q, k, v))
    given = [q, dq, drawn(case.heads, case.rows), out, lse], [k, v, dk, dv]
    with torch.no_grad(), unchanged(OF_A_THREAD), Ledger() as ledger:
        module.add_gradients(*given, case.masked)
        kept = ledger.current["total"]
    read = [x.clone() for x in (*given[0][:1], *given[0][2:], k, v)]
    held = {"at the peak": AtMost(ledger.peak["total"] + 1000, 1.5), "kept after the call": kept}
    return {"dQ": dq, "dK": dk, "dV": dv, "what is read": read, "bytes": held}


def tolerance(case: Case) -> dict[torch.dtype, float]:
    """A gradient of scores is rounded to q's dtype."""
    return {torch.float64: 1e-9, torch.float32: 0.1 if case.dtype.itemsize == 2 else 1e-4, torch.bfloat16: 0.0}
