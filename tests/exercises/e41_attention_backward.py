"""Backward of attention, by hand. A FlashAttention kernel computes these formulas in tiles. Here they stand in plain
PyTorch, and the N × N scores may exist:

    S = Q Kᵀ / √d        P = softmax(S), row by row        O = P V

dout is the gradient of the loss with respect to O. Of the three steps two are products of matrices, and each goes back
by two products. The one between them is softmax, whose Jacobian of one row p is diag(p) - p pᵀ. A row of the gradient
of P times this matrix is a vector. You can write that vector down without the matrix, and you should: for N keys the
matrix has N² numbers, and each row has a matrix of its own.

FlashAttention takes one step more: the sum over keys that this vector needs is also a sum over the columns of O. That
is D = rowsum(dO · O). It needs neither P nor the gradient of P.

No autograd here. It would keep S and P for each head, and FlashAttention exists in order not to.
"""

import itertools
from random import Random
from typing import Any, NamedTuple, NoReturn

import torch

from tests.exercises.draws import deal
from tests.exercises.kit import fail, observed, wrong
from tests.exercises.tasks import attention

PLAN = [
    "Forward again: the scores with their scale, -∞ at the keys of the future if causal, the weights P.",
    "The gradient of V comes from O = P V alone, and so does the gradient of P.",
    "The gradient of S: the product of each row with softmax's Jacobian, which nowhere exists as a matrix.",
    "The gradients of Q and of K come from S, with its scale. Return the three, of the shapes and dtypes of q, k, v.",
    "Autograd is switched off while you are called. What you hold is a few N × N matrices, whatever N is.",
]
HINTS = [
    "Write one element first: with O_id = Σ_j P_ij V_jd, what is the derivative of Σ_id dO_id O_id by V_jd, and by "
    "P_ij? Then read the sum as a product of matrices.",
    "For one row: dS_j = P_j (dP_j - D), with D = Σ_j P_j dP_j. Put dP_j = Σ_d dO_d V_jd in, and exchange the sums.",
    "delta = (dout * out).sum(-1, keepdim=True) has one number for each row of each head; x.mT is the transpose.",
]
AFTER = (
    "PyTorch's own softmax keeps its output P for backward, N × N numbers for each head. FlashAttention keeps one "
    "number for each row, the logsumexp, and computes P again tile by tile: your formulas in another order. It "
    "computes D = rowsum(dO · O) in a small kernel of its own, before the tiles begin, since each tile needs the D "
    "of whole rows. In 16 bits the products go through tensor cores, while P, dP and dS are computed in FP32, and "
    "rounded before the next product. Read next: exercise 35, the same five lines over blocks, and `backward_tiles`"
    " in flash/tiled.py."
)
WRONG = [
    wrong("forgets-delta", "dS is P · dP here. That is the diagonal of softmax's Jacobian alone: -p pᵀ is missing.",
          ("p * (dp - delta)", "p * dp")),
    wrong("delta-of-a-column", "What is subtracted from dP is summed over the rows. Softmax is one row's, so its sum "
          "goes over the keys.", ("(dout * out).sum(-1, keepdim=True)", "(p * (dout @ v.mT)).sum(-2, keepdim=True)")),
    wrong("delta-is-a-mean", "What is subtracted from dP is a mean over the head dimension: D is a sum.",
          (".sum(-1, keepdim=True)", ".mean(-1, keepdim=True)")),
    wrong("forgets-the-scale", "It is √d times too large: S has the scale 1/√d, and so has its gradient.",
          ("dk = scale * (ds.mT @ q)", "dk = ds.mT @ q"), ("dq = scale * (ds @ k)", "dq = ds @ k")),
    wrong("dk-not-transposed", "dK is dSᵀ Q: key j takes part in column j of S, not in row j.",
          ("ds.mT @ q", "ds @ q")),
    wrong("forgets-the-mask", "With causal=True a key gets a gradient from rows before it.",
          ("if causal:", "if False:")),
    wrong("builds-the-jacobian", "There is a matrix for each row. Its product with dP can be written without it.",
          ("ds = p * (dp - delta)", "jacobian = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]\n"
           "    ds = (dp[..., None, :] @ jacobian)[..., 0, :]")),
    wrong("lets-autograd-do-it", "Autograd kept a tensor for a backward of its own: compute the gradients by products, "
          "sums and exp.",
          ("    scale = ", "    given, grad = (q, k, v), torch.enable_grad()\n    grad.__enter__()\n"
           "    q, k, v = (x.detach().requires_grad_() for x in given)\n    scale = "),
          ("    return dq, dk, dv", "    return torch.autograd.grad(out, (q, k, v), dout)")),
]  # fmt: skip


def refuse(_: torch.Tensor) -> NoReturn:
    fail(
        "lets-autograd-do-it",
        "Autograd kept a tensor for a backward of its own: compute the gradients by products, sums and exp.",
    )


def by_hand(*given: Any) -> Any:
    """The answer's gradients, if autograd records nothing."""
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        return attention.attention_backward(*given)


class Case(NamedTuple):
    n_q: int
    n_k: int
    causal: bool
    dtype: torch.dtype
    spread: float
    batch: int
    heads: int
    d: int
    transposed: bool
    nan_in_q: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """Rows and keys need not be as many as each other. Row 0 sees key 0 in any case. transposed: in memory the heads
    of a row lie side by side.
    """
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ways = itertools.product((1, 3, 8, 17), (1, 2, 9, 20), (False, True), dtypes)
    columns = [1.0, 1.0, 3e4], [1, 2, 3], [1, 2, 5], [1, 4, 7], [False, True], [False, False, True]
    plain = [Case(n, n, causal, dtypes[0], 1.0, 1, 1, 8, False, False, 1) for n in (4, 64) for causal in (False, True)]
    plain.append(plain[1]._replace(spread=1e12, batch=3, heads=5))  # only -∞ hides a key from such scores
    return plain + [Case(*row) for row in deal(random, ways, *columns)]


HEAVY = Case(300, 300, True, torch.float32, 1.0, 1, 1, 8, False, False, 1)


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.batch, case.heads, n, case.d) for n in (case.n_q, case.n_k, case.n_k, case.n_q)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]
    # Scores far above those whose exp is finite; not so far that their own rounding is seen in the weights.
    given[0] *= min(case.spread, {torch.float64: 1e12, torch.float32: 30}.get(case.dtype, 1))
    if case.nan_in_q:
        given[0][:, :, 0, 0] = torch.nan
    if case.transposed:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    got = by_hand(*given, case.causal)
    if not isinstance(got, tuple | list) or len(got) != 3:
        fail("not-three", f"Expected dq, dk and dv, got {type(got).__name__}: is there a return?")
    seen = observed(by_hand, *given, case.causal, most=2.5, slack=2000, meta=case.seed > 1)
    made = seen.pop("the result")
    row = torch.cat([x.reshape(-1) for x in (made[2:] if case.spread > 1e6 else made)])  # dQ, dK: rounding times 1e12
    return {
        "the shapes": [tuple(x.shape) for x in got],
        "the dtypes": [x.dtype for x in got],
        "dQ, dK, dV in a row, or where they are NaN": row.isnan() if case.nan_in_q else row,
        **seen,
    }


def tolerance(case: Case) -> float:
    """In 16 bits dP - D cancels, and right answers may differ by a tenth: FP64 and FP32 tell whether one is right."""
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}[case.dtype]
