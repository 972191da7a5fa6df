"""Textbook attention, every option: the oracle that the other implementations are compared with.

    S = scale * Q K^T     P = softmax(S) over the visible keys     out = dropout(P) V     lse = log sum exp(S)

It holds the whole matrix of scores, N × N for each head, several times: the rest of this package avoids that.
It computes in the inputs' dtype. With float64 inputs it is an oracle for the lower dtypes; in the same dtype it is
the plain attention with whose errors those of the others are compared.
Vaswani et al., 2017, "Attention Is All You Need", section 3.2.1.
"""

import math
from typing import Any

import torch

from flash.checks import PACKED, check, check_cu_seqlens, check_starts
from flash.options import Options, dropout_keep


def attention_reference(
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

    Options as `flash.flash_attention`. lse: (batch, heads, Nq), float32, for float64 inputs float64.
    """
    name = "attention_reference"
    options = check(name, q, k, v, causal, scale, window, dropout_p, dropout_seed)
    out, lse = _attend(q, k, v, options, torch.arange(q.shape[0], device=q.device))
    return (out, lse) if return_lse else out


def attention_reference_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
) -> Any:
    """q: (total, heads, head dim): for each packed sequence what `attention_reference` gives; lse: (heads, total)."""
    name = "attention_reference_varlen"
    options = check(name, q, k, v, causal, scale, window, dropout_p, dropout_seed, PACKED)
    check_cu_seqlens(name, cu_seqlens_q, "q", q)
    check_cu_seqlens(name, cu_seqlens_k, "k", k)
    starts_q, starts_k = check_starts(name, cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    outs, lses = [], []
    for number in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[number : number + 2]), slice(*starts_k[number : number + 2])
        q_n, k_n, v_n = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        out, lse = _attend(q_n, k_n, v_n, options, torch.tensor([number], device=q.device))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest = q[starts_q[-1] :]  # rows behind the last sequence
    outs.append(torch.zeros_like(rest))
    lses.append(rest.new_full((q.shape[1], len(rest)), -math.inf, dtype=_lse_dtype(q)))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _attend(q: Any, k: Any, v: Any, options: Options, batches: torch.Tensor) -> Any:
    """One padded batch, written as the formula; `batches`: the numbers of its sequences."""
    heads, n_q, n_k = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // max(1, x.shape[1]), dim=1) for x in (k, v))  # a group shares its keys
    rows, keys = torch.arange(n_q, device=q.device), torch.arange(n_k, device=q.device)
    # A query's key on the diagonal, and the band around it.
    position = rows[:, None] + (n_k - n_q if options.bottom_right else 0)
    visible = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    if options.left >= 0:
        visible &= keys >= position - options.left
    if options.right >= 0:
        visible &= keys <= position + options.right

    # S = scale * Q K^T, -inf where a key is hidden: (batch, heads, Nq, Nk).
    scores = (q * options.scale @ k.transpose(-2, -1)).masked_fill(~visible, -math.inf)
    # The softmax of a row that sees nothing is 0/0. The answer is 0; scores of 0 keep NaN out of the gradients.
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    weights = scores.softmax(-1).masked_fill(nothing, 0)
    lse = scores.to(_lse_dtype(q)).logsumexp(-1).masked_fill(nothing[..., 0], -math.inf)
    if options.seed is not None:
        numbers = batches, torch.arange(heads, device=q.device), rows, keys
        weights = weights * dropout_keep(options.seed, options.dropout_p, *numbers) / (1 - options.dropout_p)
    return weights @ v, lse


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
