"""How long a message takes: t = α + n/β.

α, the latency, is paid for every message, however small. β is the bandwidth: n bytes need n/β seconds more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from minizero.ranks.collectives import all_gather, all_reduce, barrier, reduce_scatter
from minizero.ranks.comm import Comm


def best_seconds(call: Callable[[], object], comm: Comm, rounds: int = 20) -> float:
    """The time of the best of so many rounds; in each of them the slowest rank counts. A collective."""
    seconds = torch.empty(rounds)
    call()  # to warm up
    for place in range(rounds):
        barrier(comm)
        start = time.perf_counter()
        call()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[place] = time.perf_counter() - start
    return all_reduce(seconds.to(comm.device), comm, "max").min().item()


def calls(comm: Comm, nbytes: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Collectives on N tensors of `nbytes` bytes each, by operation and whose: all-gather makes N * nbytes bytes.

    Whose: "our ring"; beside it, if this rank is a process, "PyTorch's own", which calls gloo, or NCCL on GPUs.
    """
    full = torch.zeros(comm.size * nbytes // 4, device=comm.device)
    shard = full.chunk(comm.size)[comm.rank].clone()
    found: dict[str, dict[str, Callable[[], object]]] = {
        "all-gather": {"our ring": partial(all_gather, shard, comm, out=full)},
        "reduce-scatter": {"our ring": partial(reduce_scatter, full, comm, out=shard)},
        "all-reduce": {"our ring": partial(all_reduce, full, comm, out=full)},
    }
    if dist.is_initialized():  # torch 2.13 gave two of them new names; 2.11 has only the old ones
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        theirs = partial(gather, full, shard), partial(scatter, shard, full), partial(dist.all_reduce, full)
        for call, operation in zip(theirs, found):
            found[operation]["PyTorch's own"] = call
    return found


def time_collectives(comm: Comm, operations: Sequence[str]) -> dict[str, dict[str, dict[int, float]]]:
    """Times these of `calls`, in turns: {operation: {whose: {bytes: seconds}}}. A collective."""
    found: dict[str, dict[str, dict[int, float]]] = {operation: {} for operation in operations}
    largest = 26 if comm.device.type == "cuda" else 22  # a GPU's link is fast: only then does the size matter
    # Three times over: sixty rounds of a short message are over in milliseconds, and other work may interrupt them all.
    for nbytes in 3 * [2**k for k in range(10, largest + 1, 2)]:
        all_calls = calls(comm, nbytes)
        for operation in operations:
            for whose, call in all_calls[operation].items():
                seconds = best_seconds(call, comm)
                its = found[operation].setdefault(whose, {})
                its[nbytes] = min(seconds, its.get(nbytes, seconds))
    return found


def time_messages(comm: Comm) -> dict[str, dict[int, float]]:
    """Times an all-gather on two ranks, each of which then sends one message: {whose: {bytes: seconds}}."""
    return time_collectives(comm, ["all-gather"])["all-gather"]


def alpha_and_beta(points: Mapping[int, float]) -> tuple[float, float]:
    """α in seconds and β in bytes a second, fitted to {bytes: seconds}.

    Least squares of relative errors, so that every size counts alike.
    """
    n, t = np.array(list(points.items())).T
    (alpha, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    return float(alpha), float(1 / per_byte)
