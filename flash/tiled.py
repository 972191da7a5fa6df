"""FlashAttention in plain PyTorch: online softmax block by block, and a backward pass that stores no scores.

For a block of rows i, over the blocks of keys j, with m the running maximum and l the running sum:

    S = scale Q_i K_j^T         m' = max(m, rowmax S)      P = exp(S - m')
    l = exp(m - m') l + rowsum P     O = exp(m - m') O + P V_j         at the end O_i = O / l, lse_i = m + log l

Backward computes P = exp(S - lse) once more. For a block of keys j, over the blocks of rows i:

    dV_j += P^T dO_i      dS = P (dO_i V_j^T - delta_i)      dK_j += scale dS^T Q_i      dQ_i += scale dS K_j

with delta_i = rowsum(dO_i O_i) - dlse_i. What is kept between the two passes is q, k, v, out and lse.
Dao et al., 2022, "FlashAttention", algorithms 1, 2 and 4; Dao, 2023, "FlashAttention-2" (one lse instead of m and l).
"""

import math
from typing import Any, NamedTuple

import torch

from flash.checks import check
from flash.options import Options
from flash.tiles import compute_dtype, parts, scores

Blocks = tuple[int, int] | None


class Step(NamedTuple):
    """One step of a row's online softmax, after a block of keys."""

    keys: range
    maximum: float  # the largest score so far
    rescale: float  # what the sum and the output so far were multiplied by: exp(old maximum - new maximum)
    total: float  # sum of exp(score - maximum) so far
    output: torch.Tensor  # (head dim,): softmax of the scores so far, times their values


def online_softmax(scores: torch.Tensor, values: torch.Tensor, block: int = 1) -> list[Step]:
    """One row of attention, step by step: scores (Nk,), values (Nk, head dim), `block` keys at a time.

    The last step's output is softmax(scores) @ values; maximum + log(total) is the logsumexp.
    """
    maximum, total, output = -math.inf, 0.0, torch.zeros_like(values[0])
    steps = []
    for start in range(0, len(scores), block):
        s, v = scores[start : start + block], values[start : start + block]
        larger = max(maximum, s.max().item())
        rescale = math.exp(maximum - larger)  # 0 at first
        p = (s - larger).exp()
        total = rescale * total + p.sum().item()
        output = rescale * output + p @ v
        maximum = larger
        steps.append(Step(range(start, start + len(s)), maximum, rescale, total, output / total))
    return steps


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, blocks: Blocks = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse (batch, heads, Nq). Shapes and packed sequences: `flash.attention`."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    forward_tiles(q, k, v, out, lse, options, blocks)
    return out, lse


def forward_tiles(q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, blocks: Blocks = None) -> None:
    """Fills out and lse. All long tensors are arguments, so that `flash.traffic.count` sees every byte that moves."""
    # Names as in the formulas above. A part of a long tensor has a capital letter, a block of it the index i (rows) or
    # j (keys). Blocks are (kv heads, rows or keys, head dim), scores (kv heads, rows, keys): see `tiles.Part`.
    for part in parts(q, k, options, blocks):
        Q, O, L = part.of_rows(q, out, lse)
        K, V = part.of_keys(k, v)
        tile = part.empty_tile(q)
        for rows in part.row_blocks():
            q_i = part.load(Q, rows)
            o = torch.zeros_like(q_i)  # exp(S - m) V so far: like q_i
            l = torch.zeros_like(q_i[..., :1])  # sum of exp(S - m) so far: (kv heads, rows, 1)
            # m is not -inf at first: for a row that has seen nothing yet, -inf - -inf would be NaN.
            m = torch.full_like(l, torch.finfo(l.dtype).min)
            for keys in part.keys_seen_by(rows):
                k_j, v_j = part.load(K, keys).mul_(options.scale), part.load(V, keys)
                s = scores(q_i, k_j, tile)  # S = scale Q_i K_j^T: (kv heads, rows, keys)
                part.hide(s, rows, keys)
                larger = torch.maximum(m, s.amax(-1, keepdim=True))  # m' = max(m, rowmax S)
                p = exp_(s.sub_(larger))  # P = exp(S - m'), in S's memory
                rescale = exp_(m - larger)  # exp(m - m')
                l.mul_(rescale).add_(p.sum(-1, keepdim=True))  # before dropout: softmax knows nothing of it
                o.mul_(rescale).baddbmm_(times(p, part.dropout_mask(rows, keys, p)), v_j)  # exp(m - m') O + P V_j
                m = larger
            part.store(L, rows, m + l.log())  # -inf if a row sees nothing: l is 0
            part.store(O, rows, o.div_(l.masked_fill_(l == 0, 1)))


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, blocks: Blocks = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv like q, k, v."""
    dq, dk, dv = torch.empty_like(q, dtype=compute_dtype(q)), torch.empty_like(k), torch.empty_like(v)
    # A row that sees nothing has lse = -inf; exp(S - inf) = 0 keeps it out of every sum.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    delta = torch.empty_like(lse)
    delta_tiles(dout, out, dlse, delta, q, k, options, blocks)
    backward_tiles(dout, q, k, v, lse, delta, dq, dk, dv, options, blocks)
    return dq.to(q.dtype), dk, dv


def delta_tiles(
    dout: Any, out: Any, dlse: Any, delta: Any, q: Any, k: Any, options: Options, blocks: Blocks = None
) -> None:
    """Fills delta, (batch, heads, Nq): rowsum(dO O) - dlse, and -dlse where a row sees one key."""
    for part in parts(q, k, options, blocks):
        DO, O, DL, D = part.of_rows(dout, out, dlse, delta)
        for rows in part.row_blocks():
            do_i = part.load(DO, rows)
            part.zero_rows_with_one_key(do_i, rows)
            product = do_i.double().mul_(part.load(O, rows))  # float64, as `tiles.scores` takes for few rows
            part.store(D, rows, product.sum(-1, keepdim=True).to(D.dtype) - part.load(DL, rows))


def backward_tiles(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    delta: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    options: Options,
    blocks: Blocks = None,
) -> None:
    """Fills dq, dk, dv. dq adds up over the blocks of keys, in HBM: so it has the dtype of the computation."""
    dq.zero_()
    for part in parts(q, k, options, blocks):
        DO, Q, DQ, L, D = part.of_rows(dout, q, dq, lse, delta)
        K, V, DK, DV = part.of_keys(k, v, dk, dv)
        tile, other_tile = part.empty_tile(q), part.empty_tile(q)
        for keys in part.key_blocks():
            k_j, v_j = part.load(K, keys).mul_(options.scale), part.load(V, keys)
            dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
            for rows in part.rows_that_see(keys):
                q_i, do_i = part.load(Q, rows), part.load(DO, rows)
                l, d = part.load(L, rows), part.load(D, rows)
                s = scores(q_i, k_j, tile)  # S once more: (kv heads, rows, keys)
                part.hide(s, rows, keys)
                p = exp_(s.sub_(l))  # P = exp(S - lse), in S's memory
                mask = part.dropout_mask(rows, keys, p)
                dv_j.baddbmm_(times(p, mask).mT, do_i)  # dV_j += P^T dO_i
                part.zero_rows_with_one_key(do_i, rows)
                dp = times(scores(do_i, v_j, other_tile), mask)  # dP = dO_i V_j^T
                ds = dp.sub_(d).mul_(p)  # dS = P (dP - delta_i), in dP's memory
                dk_j.baddbmm_(ds.mT, q_i)  # dK_j += dS^T Q_i; the scale comes at the end
                # dQ_i += scale dS K_j: k_j is scaled already. Reuse q_i's memory, which nothing needs any more; `out=`
                # also keeps autocast from casting.
                part.add(DQ, rows, torch.bmm(ds, k_j, out=q_i))
            part.store(DK, keys, dk_j.mul_(options.scale))
            part.store(DV, keys, dv_j)
            del k_j, v_j, dk_j, dv_j  # else they would live on while the next block is loaded


def exp_(x: torch.Tensor) -> torch.Tensor:
    """exp, in place, by exp2: a CPU's exp takes up to seventy times as long if the result underflows, as it does for
    every hidden score."""
    return x.mul_(math.log2(math.e)).exp2_()


def times(weights: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The weights after dropout; the weights themselves if there is none."""
    return weights if mask is None else weights * mask


class _Tiled(torch.autograd.Function):
    """Forward keeps q, k, v, out and lse; backward makes everything else once more."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, options: Options) -> Any:  # type: ignore[override]
        out, lse = forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(dout, dlse, q, k, v, out, lse, ctx.options), None


def attention_tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
) -> Any:
    """q: (batch, heads, Nq, head dim), k and v: (batch, kv heads, Nk, head dim) -> out like q, and lse if asked.

    Options as `flash.flash_attention`.
    """
    options = check("attention_tiled", q, k, v, causal, scale, window, dropout_p, dropout_seed)
    out, lse = _Tiled.apply(q, k, v, options.with_lengths(q.shape[2], k.shape[2]))
    return (out, lse) if return_lse else out
