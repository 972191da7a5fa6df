"""Attention's backward, from the chain rule: what a kernel for it computes, before there are tiles."""

import torch


def attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of softmax(q kᵀ / √d) v, for dout, the gradient of that output.

    q, dout: (batch, heads, n_q, d). k, v: (batch, heads, n_k, d). causal: row i sees the keys 0, 1, …, i.
    """
    scale = q.shape[-1] ** -0.5
    s = scale * (q @ k.mT)
    if causal:
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(future, -torch.inf)
    p = s.softmax(-1)
    out = p @ v
    delta = (dout * out).sum(-1, keepdim=True)
    dv = p.mT @ dout
    dp = dout @ v.mT
    ds = p * (dp - delta)
    dq = scale * (ds @ k)
    dk = scale * (ds.mT @ q)
    return dq, dk, dv
