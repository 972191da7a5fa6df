"""The collectives, written by hand: ring all-gather, ring reduce-scatter, and what follows from them.

Ranks stand in a ring and each of N-1 steps passes one chunk to the right, so a
rank sends (N-1)/N of the tensor for each half, the least that any algorithm can:

    reduce-scatter   every rank ends with one chunk, summed over all ranks
    all-gather       every rank ends with all chunks
    all-reduce       = reduce-scatter, then all-gather: 2 (N-1)/N of the tensor

Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
Data of ranks that are about to do different things never meet (`comm.agreement`).
"""

from collections.abc import Callable

import torch

from minizero.memory import tag
from minizero.ranks.comm import Comm, agreement

COMBINE: dict[str, Callable] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def ring_all_gather(chunks: list[torch.Tensor], comm: Comm) -> None:
    """Fill all of `chunks` (N equal tensors, not empty) on every rank; chunk r comes from rank r."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.expect([chunks[(comm.rank - step - 1) % comm.size] for step in range(comm.size - 1)], left)
    for step in range(comm.size - 1):
        # First my own chunk goes out, then always what came in one step before.
        outgoing = chunks[(comm.rank - step) % comm.size]
        incoming = chunks[(comm.rank - step - 1) % comm.size]
        comm.send_recv(outgoing, right, incoming, left)


def ring_reduce_scatter(
    chunks: list[torch.Tensor], comm: Comm, combine: Callable = torch.add, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Chunk `comm.rank`, combined over all ranks, in `out` where given, which may be that chunk itself."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    # Chunk r starts at rank r+1, so that after N-1 hops it arrives at rank r, complete.
    partial = chunks[(comm.rank - 1) % comm.size]
    buffers = [torch.empty_like(partial) for _ in range(min(comm.ahead(partial), comm.size - 1))]
    for buffer in buffers:
        tag(buffer, "communication")
    comm.expect(buffers, left)
    for step in range(comm.size - 1):
        incoming = buffers[step % len(buffers)]  # they take turns
        comm.send_recv(partial, right, incoming, left)
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        last = step == comm.size - 2
        partial = combine(incoming, mine, out=out if last and out is not None else incoming)
    return partial


def all_gather(shard: torch.Tensor, comm: Comm, *, out: torch.Tensor | None = None, label: str = "") -> torch.Tensor:
    """Every rank's `shard`, one after the other along dimension 0, on every rank.

    shard: (n, …), the same shape on all ranks; returns (N·n, …). `out` is filled instead of a
    new tensor where given; the shard may be this rank's chunk of it.
    """
    _needs_dimension("all_gather", shard)
    shape = (comm.size * shard.shape[0], *shard.shape[1:])
    if out is not None and (out.shape != shape or out.dtype != shard.dtype):
        raise ValueError(f"all_gather: out must be {shape} of {shard.dtype}, not {tuple(out.shape)} of {out.dtype}")
    with agreement(comm, "all_gather", shard, label=label):
        if out is None:
            out = shard.new_empty(shape)
        if shard.numel():
            chunks = list(out.detach().chunk(comm.size))
            if chunks[comm.rank].data_ptr() != shard.data_ptr():
                chunks[comm.rank].copy_(shard.detach())
            ring_all_gather(chunks, comm)
    return out


@torch.no_grad()
def reduce_scatter(
    tensor: torch.Tensor, comm: Comm, op: str = "sum", *, out: torch.Tensor | None = None, label: str = ""
) -> torch.Tensor:
    """This rank's chunk of the N ranks' tensors, combined: chunk r along dimension 0 on rank r.

    tensor: (N·n, …), the same shape on all ranks; returns (n, …). `out` is filled instead of a new tensor
    where given; it may be this rank's chunk of `tensor`. op: "sum", "mean", "max" or "min".
    `ValueError` where N does not divide dimension 0.
    """
    _needs_dimension("reduce_scatter", tensor)
    _check_op("reduce_scatter", op, tensor)
    if tensor.shape[0] % comm.size:
        raise ValueError(
            f"reduce_scatter: {comm.size} ranks do not divide dimension 0 of shape {tuple(tensor.shape)}: "
            f"pad it with minizero.engines.layout.pad(tensor, {comm.size})"
        )
    shape = (tensor.shape[0] // comm.size, *tensor.shape[1:])
    if out is not None and (out.shape != shape or out.dtype != tensor.dtype):
        raise ValueError(
            f"reduce_scatter: out must be {shape} of {tensor.dtype}, not {tuple(out.shape)} of {out.dtype}"
        )
    with agreement(comm, "reduce_scatter", tensor, op=op, label=label):
        chunks = list(tensor.contiguous().chunk(comm.size))
        if not tensor.numel() or comm.size == 1:
            return chunks[comm.rank].clone() if out is None else out.copy_(chunks[comm.rank])
        result = ring_reduce_scatter(chunks, comm, COMBINE[op], out)
    return result.div_(comm.size) if op == "mean" else result


@torch.no_grad()
def all_reduce(
    tensor: torch.Tensor, comm: Comm, op: str = "sum", *, out: torch.Tensor | None = None, label: str = ""
) -> torch.Tensor:
    """The N ranks' tensors combined, on every rank. Any shape, the same on all ranks; op as in `reduce_scatter`.

    `out` is filled instead of a new tensor where given; it may be `tensor` itself, contiguous and of a size
    that N divides.
    """
    _check_op("all_reduce", op, tensor)
    with agreement(comm, "all_reduce", tensor, op=op, label=label):
        if out is None:  # the padding travels too, but meets only other ranks' padding
            flat = tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)
            flat[: tensor.numel()].copy_(tensor.reshape(-1))
        else:
            flat = out.copy_(tensor).view(-1)
        if tensor.numel() and comm.size > 1:
            chunks = list(flat.chunk(comm.size))
            ring_reduce_scatter(chunks, comm, COMBINE[op], out=chunks[comm.rank])
            if op == "mean":
                chunks[comm.rank].div_(comm.size)
            ring_all_gather(chunks, comm)
    return flat[: tensor.numel()].view(tensor.shape)


@torch.no_grad()
def broadcast(tensor: torch.Tensor, comm: Comm, root: int = 0, *, label: str = "") -> torch.Tensor:
    """Rank `root`'s tensor, on every rank; the others' give shape and dtype.

    A binomial tree: in step k the 2^k ranks that have the tensor each pass it to one that
    has not, so log2 N steps are enough.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"broadcast: root {root} does not exist: ranks are 0 to {comm.size - 1}")
    with agreement(comm, "broadcast", tensor, root=root, label=label):
        result = tensor.contiguous().clone()
        position = (comm.rank - root) % comm.size  # the root stands at 0
        reach = 1
        while reach < comm.size and tensor.numel():
            if position < reach and position + reach < comm.size:
                comm.send(result, (comm.rank + reach) % comm.size)
            elif reach <= position < 2 * reach:
                comm.recv(result, (comm.rank - reach) % comm.size)
            reach *= 2
    return result


def barrier(comm: Comm) -> None:
    """Returns when all ranks have come here: the agreement is all there is to it."""
    with agreement(comm, "barrier"):
        pass


def _check_op(name: str, op: str, tensor: torch.Tensor) -> None:
    if op not in COMBINE:
        raise ValueError(f"{name}: unknown op {op!r}: use one of {', '.join(COMBINE)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{name}: the mean of {tensor.dtype} is not one: use op='sum', or a floating dtype")


def _needs_dimension(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{name}: needs a tensor with a dimension 0 to cut along: use tensor.reshape(1)")
