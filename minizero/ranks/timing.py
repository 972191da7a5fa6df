"""How long a message takes: t = α + n/β.

α, the latency, is paid for every message, however small. β is the bandwidth: n bytes need n/β seconds more.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from minizero.ranks.collectives import all_gather, all_reduce, barrier
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


def time_messages(comm: Comm) -> dict[str, dict[int, float]]:
    """Times an all-gather on two ranks, each of which then sends one message: {whose: {bytes: seconds}}.

    Whose: "our ring"; beside it, if this rank is a process, "PyTorch's own", which calls gloo, or NCCL on GPUs.
    """
    # torch 2.13 gave the call a new name; 2.11 has only the old one.
    their_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: dict[str, dict[int, float]] = {}
    largest = 26 if comm.device.type == "cuda" else 22  # a GPU's link is fast: only then does the size matter
    # Three times over: sixty rounds of a short message are over in milliseconds, and other work may interrupt them all.
    for nbytes in 3 * [2**k for k in range(10, largest + 1, 2)]:
        out = torch.randn(comm.size * nbytes // 4, device=comm.device)
        shard = out.chunk(comm.size)[comm.rank]
        calls: dict[str, Callable[[], object]] = {"our ring": partial(all_gather, shard, comm, out=out)}
        if dist.is_initialized():
            calls["PyTorch's own"] = partial(their_gather, out, shard)
        for name, call in calls.items():
            seconds = best_seconds(call, comm)
            its = found.setdefault(name, {})
            its[nbytes] = min(seconds, its.get(nbytes, seconds))
    return found


def fit(points: Mapping[int, float]) -> tuple[float, float]:
    """α in seconds and β in bytes a second, fitted to {bytes: seconds}.

    Least squares of relative errors, so that every size counts alike.
    """
    n, t = np.array(list(points.items())).T
    (alpha, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    return float(alpha), float(1 / per_byte)
