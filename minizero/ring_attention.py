"""Ring attention: a text too long for one card, cut across N ranks ("context parallel").

Keys and values go round the ring: at hop h rank r has those of rank r - h. It computes the attention of its own n/N
queries to them, and merges. `ring_attention_on_a_page.py` is this without gradients. Backward goes round once more:

    out = Σ_h w_h out_h     lse = log Σ_h exp lse_h           w_h = exp(lse_h - lse)
    d out_h = w_h dO        d lse_h = w_h dO · (out_h - out)     dO: the gradient of out

A hop's attention runs again, and is differentiated by these two. The gradients of keys and values travel with them, and
one hop more brings them home. In causal attention the rank with the end of the text would compute most. So the text is
cut into 2N parts, and rank r has two, r and 2N - 1 - r, an early and a late one ("zigzag"): now all have equal work.

Liu, Zaharia & Abbeel, 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Zhu, 2024,
"ring-flash-attention" (the zigzag); Llama Team, 2024, "The Llama 3 Herd of Models", section 3.3.2 (context parallel).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flash import flash_attention, merge
from minizero.memory import tag
from minizero.ranks.agreement import agreement
from minizero.ranks.collectives import all_gather
from minizero.ranks.comm import Comm


def sequence_part(x: Tensor, comm: Comm, *, causal: bool = False) -> Tensor:
    """This rank's part, (…, n/N, d), of x, (…, n, d), a copy. `ValueError` if N does not divide n (causal: 2N)."""
    count = 2 * comm.size if causal else comm.size
    if x.dim() < 2 or x.shape[-2] % count:
        raise ValueError(f"sequence_part: x must be (…, n, d), n a multiple of {count}, not {tuple(x.shape)}: pad it")
    parts = x.chunk(count, -2)
    return torch.cat([parts[comm.rank], parts[-1 - comm.rank]], -2) if causal else parts[comm.rank].clone()


def gather_sequence(part: Tensor, comm: Comm, *, causal: bool = False) -> Tensor:
    """The whole text on every rank, from what `sequence_part` cut. A collective, without gradients."""
    early, late = all_gather(part[None], comm).tensor_split([part.shape[-2] // (2 if causal else 1)], -2)
    return torch.cat([*early, *late.flip(0)], -2)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, comm: Comm, *, causal: bool = False) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks: out, like q. A collective, and so is its backward.

    q, k, v: this rank's `sequence_part`, (batch, heads, n/N, head dim), cut with the same `causal`; k and v may have
    fewer heads. A rank sends k and v N - 1 times; in backward once more as often, and N times their gradients, in
    float32 (float64 for float64). `ValueError` for lengths that no cut gives; else as `flash_attention`.
    """
    if q.shape[2:3] != k.shape[2:3] or (causal and q.shape[2] % 2):
        raise ValueError(
            f"ring_attention: q {[*q.shape]}, k {[*k.shape]}: cut q, k, v by sequence_part, with the same causal"
        )
    return RingAttention.apply(q, k, v, comm, causal)


def pass_on(tensors: list[Tensor], comm: Comm) -> None:
    """One after the other goes to the right, and what comes from the left takes its place."""
    for i, outgoing in enumerate(tensors):
        tag(incoming := torch.empty_like(outgoing), "communication")
        comm.send_recv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        tensors[i] = incoming


def hops(visiting: list[Tensor], comm: Comm, n: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """At each hop: which of my n queries see which of the n visiting keys, and whether under a causal mask."""
    every, early, late = slice(n), slice(n // 2), slice(n // 2, n)
    for hop in range(comm.size):
        if hop:
            pass_on(visiting, comm)
        owner = (comm.rank - hop) % comm.size
        if causal and owner != comm.rank:
            yield (every, early, False) if owner < comm.rank else (late, every, False)
        else:
            yield every, every, causal


def add_gradients(mine: Sequence[Tensor], visiting: Sequence[Tensor], masked: bool) -> None:
    """What one hop adds to dq, dk and dv, in place: of the rows and the keys that meet in it."""
    (q, dq, dout, out, lse), (k, v, dk, dv) = mine, visiting
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out_h, lse_h = flash_attention(*inputs, causal=masked, return_lse=True)
    dout_h = (lse_h.detach() - lse).exp()[..., None] * dout
    dlse_h = (dout_h * (out_h.detach() - out)).sum(-1)
    for total, part in zip((dq, dk, dv), torch.autograd.grad((out_h, lse_h), inputs, (dout_h.to(q.dtype), dlse_h))):
        total += part


class RingAttention(torch.autograd.Function):
    """One node of the graph. Of all hops it keeps this rank's q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, causal: bool) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        # A mean of nothing, whose weight is exp(-inf) = 0.
        out, lse = torch.zeros_like(q, dtype=wide), torch.full_like(q[..., 0], -torch.inf, dtype=wide)
        with agreement(comm, "ring_attention", k, causal=causal):
            for rows, keys, masked in hops(visiting := [k, v], comm, q.shape[2], causal):
                seen = (x[:, :, keys] for x in visiting)
                here = flash_attention(q[:, :, rows], *seen, causal=masked, return_lse=True)
                out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *here)
        ctx.save_for_backward(q, k, v, out := out.to(q.dtype), lse)
        ctx.comm, ctx.causal = comm, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (q, k, v, out, lse), comm = ctx.saved_tensors, ctx.comm
        dq = torch.zeros_like(q, dtype=lse.dtype)
        visiting = [k, v, *(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))]
        with agreement(comm, "ring_attention's backward", k, causal=ctx.causal):
            for rows, keys, masked in hops(visiting, comm, q.shape[2], ctx.causal):
                mine = [x[:, :, rows] for x in (q, dq, dout, out, lse)]
                add_gradients(mine, [x[:, :, keys] for x in visiting], masked)
            del visiting[:2]
            pass_on(visiting, comm)  # home
        return *(x.to(q.dtype) for x in (dq, *visiting)), None, None
