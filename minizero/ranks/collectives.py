"""The collectives, written by hand: two rings, and what follows from them.

The ranks stand in a ring, and the tensor is cut into N chunks. In each of N-1 steps every rank passes one
chunk to the right. So it sends (N-1)/N of the tensor, the least that any algorithm can:

    reduce-scatter   every rank ends with one chunk, summed over all ranks
    all-gather       every rank ends with all chunks
    all-reduce       = reduce-scatter, then all-gather: 2 (N-1)/N of the tensor

Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
`agreement`: all ranks say the same, or all raise (agreement.py). `soon` names the tensors to be received next, so that
a transport can begin to receive them; the rings are correct without it. `tag` tells a memory ledger what a tensor is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minizero import torch_private
from minizero.memory import tag
from minizero.ranks.agreement import agreement
from minizero.ranks.arguments import as_summand, check_dimension, check_op, check_out
from minizero.ranks.combining import COMBINE, combining
from minizero.ranks.comm import Comm
from minizero.ranks.tree import broadcast as broadcast


def ring_all_gather(chunks: list[Tensor], comm: Comm) -> None:
    """Fill `chunks` on every rank: N equal tensors, not empty. Chunk r comes from rank r."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.transport.soon([chunks[(comm.rank - step - 1) % comm.size] for step in range(comm.size - 1)], left)
    for step in range(comm.size - 1):
        # First my own chunk goes out, then always the one that came in one step before.
        outgoing = chunks[(comm.rank - step) % comm.size]
        incoming = chunks[(comm.rank - step - 1) % comm.size]
        comm.send_recv(outgoing, right, incoming, left)


def ring_reduce_scatter(
    chunks: list[Tensor], comm: Comm, combine: Callable = torch.add, out: Tensor | None = None
) -> Tensor:
    """Chunk `comm.rank`, combined over N > 1 ranks. If `out` is given, the result is there; it may be that chunk."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    # Chunk r starts at rank r+1, so that after N-1 hops it arrives at rank r, complete.
    partial = chunks[(comm.rank - 1) % comm.size]
    # Two are enough: one goes out while the other is filled. A transport that receives ahead may want more, up to N-1.
    count = min(comm.transport.ring_buffers(partial), comm.size - 1)
    buffers = [torch.empty_like(partial) for _ in range(count)]
    for buffer in buffers:
        tag(buffer, "communication")
    comm.transport.soon(buffers, left)
    for step in range(comm.size - 1):
        incoming = buffers[step % len(buffers)]
        comm.send_recv(partial, right, incoming, left)
        mine = chunks[(comm.rank - 2 - step) % comm.size]  # of the chunk that comes in at this step
        last = step == comm.size - 2
        partial = combine(incoming, mine, out=out if last and out is not None else incoming)
    return partial


def all_gather(shard: Tensor, comm: Comm, *, out: Tensor | None = None, label: str = "") -> Tensor:
    """Every rank's `shard`, one after the other along dimension 0, on every rank.

    shard: (n, …), the same shape on all ranks; returns (N·n, …). `out`, if given, is filled; the shard may lie in it.
    """
    check_dimension("all_gather", shard)
    shape = (comm.size * shard.shape[0], *shard.shape[1:])
    check_out("all_gather", out, shape, shard.dtype)
    with agreement(comm, "all_gather", shard, label=label):
        out = shard.new_empty(shape) if out is None else out
        if shard.numel():
            chunks = list(out.detach().chunk(comm.size))
            if torch_private.place(chunks[comm.rank]) != torch_private.place(shard):
                chunks[comm.rank].copy_(shard.detach())
            ring_all_gather(chunks, comm)
    return out


@torch.no_grad()
def reduce_scatter(
    tensor: Tensor, comm: Comm, op: str = "sum", *, out: Tensor | None = None, label: str = ""
) -> Tensor:
    """The N ranks' tensors, combined; rank r gets chunk r along dimension 0.

    tensor: (N·n, …), the same shape on all ranks; returns (n, …). op: "sum", "mean", "max" or "min".
    A sum of bool, or of integers of 8 or 16 bits, is int64, as `torch.sum`'s.
    `out`, if given, is filled; it may be this rank's chunk of `tensor`. `ValueError` if N does not divide dimension 0.
    """
    check_op("reduce_scatter", op, COMBINE, tensor)
    tensor = as_summand(op, tensor)
    check_dimension("reduce_scatter", tensor, comm.size)
    shape = (tensor.shape[0] // comm.size, *tensor.shape[1:])
    check_out("reduce_scatter", out, shape, tensor.dtype)
    with agreement(comm, "reduce_scatter", tensor, op=op, label=label):
        chunks = list(tensor.contiguous().chunk(comm.size))
        if not tensor.numel() or comm.size == 1:
            return chunks[comm.rank].clone() if out is None else out.copy_(chunks[comm.rank])
        combine, divisor = combining(op, tensor, comm.size)
        result = ring_reduce_scatter(chunks, comm, combine, out)
    return result.div_(divisor) if op == "mean" else result


@torch.no_grad()
def all_reduce(tensor: Tensor, comm: Comm, op: str = "sum", *, out: Tensor | None = None, label: str = "") -> Tensor:
    """The N ranks' tensors, combined, on every rank. Any shape, the same on all ranks; op as in `reduce_scatter`.

    `out`, if given, is filled; it must be contiguous, of a size that N divides, and may be `tensor` itself.
    """
    check_op("all_reduce", op, COMBINE, tensor)
    tensor = as_summand(op, tensor)
    check_out("all_reduce", out, tensor.shape, tensor.dtype)
    if out is not None and out.numel() % comm.size:
        raise ValueError(f"all_reduce: {comm.size} ranks do not divide the {out.numel()} elements of out: leave it out")
    with agreement(comm, "all_reduce", tensor, op=op, label=label):
        if out is None:  # padding travels too, but it is only combined with other ranks' padding
            flat = tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)
            flat[: tensor.numel()].copy_(tensor.reshape(-1))
        else:
            flat = out.copy_(tensor).view(-1)
        if tensor.numel() and comm.size > 1:
            chunks = list(flat.chunk(comm.size))
            combine, divisor = combining(op, tensor, comm.size)
            ring_reduce_scatter(chunks, comm, combine, out=chunks[comm.rank])
            if op == "mean":
                chunks[comm.rank].div_(divisor)
            ring_all_gather(chunks, comm)
    return flat[: tensor.numel()].view(tensor.shape)


def barrier(comm: Comm) -> None:
    """Return when all ranks have come here: they agree, and that is all."""
    with agreement(comm, "barrier"):
        pass
