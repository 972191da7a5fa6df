"""What a run will need before it starts, and what the machine has.

A job estimates its memory instead of trying: Linux kills a process that takes too much, without an error to catch.
"""

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from minizero.memory.formulas import predict

MIB = 2**20


def estimate(config: Any, world_size: int, stages: Iterable[int], batch_size: int, dtype: torch.dtype) -> float:
    """Roughly the most bytes that a rank holds at once. config: a `GPTConfig`."""
    total, _ = config.count_parameters()
    sequence, tokens = config.sequence_length, batch_size * config.sequence_length
    states = max(predict(total, world_size, stage, dtype=dtype)["total"] for stage in stages)
    # Tiled attention keeps no scores. The naive one keeps them once. The reference keeps them
    # before softmax, after it, and as a mask.
    scores = batch_size * config.heads * sequence**2 * {"naive": 1, "reference": 3}.get(config.attention, 0)
    # A block keeps about 16 vectors for each token, and its scores. Backward makes the scores' size twice more.
    vector = tokens * config.width
    block = 16 * vector + scores
    # With recompute only one block at a time is whole. Every other one keeps its input (full), or the 10 vectors that
    # matrix products take and return (selective).
    kept = {"none": block, "full": vector, "selective": 10 * vector + scores}[config.recompute]
    activations = (config.layers - 1) * kept + block + 2 * scores + (sequence**2 if scores else 0)
    logits = 8 * tokens * config.vocabulary
    # While it is being wrapped, a module exists twice. The last terms: a thread's stack, and a block's Python objects.
    return max(states, 8 * total) + activations * dtype.itemsize + logits + MIB + 2**15 * config.layers


def free_memory() -> float:
    """Free bytes of this machine, or of its container if that has fewer. Infinity if the system tells neither."""
    free = math.inf
    # All the memory that is built in, if the system says no more than that.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Linux: what is available.
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    # A container: its limit, which is a number or the word "max", less what its processes hold.
    with contextlib.suppress(OSError, ValueError):
        used = Path("/sys/fs/cgroup/memory.stat").read_text().split()[1]  # "anon", and how much of it
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) - int(used))
    return free


def check_memory(per_rank: float, ranks: int) -> None:
    """`ValueError` if `ranks` ranks need more than this machine has free. per_rank: bytes."""
    if per_rank * ranks > (free := free_memory()):
        raise ValueError(
            f"{ranks:,} ranks need about {per_rank * ranks / MIB:,.0f} MiB, this machine has {free / MIB:,.0f} MiB "
            "free: use a smaller --batch-size, --sequence-length, --width, --layers or --world-size"
        )
