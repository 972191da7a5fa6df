"""Textbook attention, every option: the oracle that the other implementations are compared with.

    S = scale * Q K^T     P = softmax(S) over the visible keys     out = dropout(P) V     lse = log sum exp(S)

It holds the whole matrix of scores, N × N for each head, several times: what the rest of this package
avoids. It computes in the inputs' dtype: float64 inputs make it an oracle for the lower ones, and in the
same dtype it is the plain attention that others' errors are measured against.
Vaswani et al., 2017, "Attention Is All You Need", section 3.2.1.
"""

import math
from typing import Any

import torch

from flash.checks import PACKED, Meaning, check, check_cu_seqlens, check_starts
from flash.options import dropout_keep


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
    meaning = check(name, q, k, v, causal, scale, window, dropout_p, dropout_seed)
    out, lse = _attend(q, k, v, meaning, torch.arange(q.shape[0], device=q.device))
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
    meaning = check(name, q, k, v, causal, scale, window, dropout_p, dropout_seed, PACKED)
    check_cu_seqlens(name, cu_seqlens_q, "q", q)
    check_cu_seqlens(name, cu_seqlens_k, "k", k)
    starts_q, starts_k = check_starts(name, cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    outs, lses = [], []
    for number in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[number : number + 2]), slice(*starts_k[number : number + 2])
        q_n, k_n, v_n = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        out, lse = _attend(q_n, k_n, v_n, meaning, torch.tensor([number], device=q.device))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest = q[starts_q[-1] :]  # rows of no sequence
    outs.append(torch.zeros_like(rest))
    lses.append(rest.new_full((q.shape[1], len(rest)), -math.inf, dtype=_lse_dtype(q)))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _attend(q: Any, k: Any, v: Any, meaning: Meaning, batches: torch.Tensor) -> Any:
    """One padded batch, written as the formula; `batches`: the numbers of its sequences."""
    scale, left, right, bottom_right, p, seed = meaning
    heads, n_q, n_k = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // max(1, x.shape[1]), dim=1) for x in (k, v))  # a group shares its keys
    rows, keys = torch.arange(n_q, device=q.device), torch.arange(n_k, device=q.device)
    position = rows[:, None] + (n_k - n_q if bottom_right else 0)
    visible = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        visible &= keys >= position - left
    if right >= 0:
        visible &= keys <= position + right

    scores = (q * scale @ k.transpose(-2, -1)).masked_fill(~visible, -math.inf)
    # A row that sees nothing: its softmax is 0/0, its answer 0. Scores of 0 keep NaN out of its gradients.
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    weights = scores.softmax(-1).masked_fill(nothing, 0)
    lse = scores.to(_lse_dtype(q)).logsumexp(-1).masked_fill(nothing[..., 0], -math.inf)
    if seed is not None:
        keep = dropout_keep(seed, p, batches, torch.arange(heads, device=q.device), rows, keys)
        weights = weights * keep / (1 - p)
    return weights @ v, lse


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
