"""What a run will need, before it starts, and what the machine has.

Memory is estimated instead of tried: Linux kills a process that takes too much, and asks nobody first.
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
    # Tiled attention keeps no scores; the textbook's keeps them before and after softmax, and their masks.
    scores = batch_size * config.heads * sequence**2 * {"naive": 1, "reference": 3}.get(config.attention, 0)
    # A block keeps about 16 vectors for each token and its scores; backward makes two more of the scores.
    vector = tokens * config.width
    block = 16 * vector + scores
    # Recomputed, one block at a time is whole; the others keep their input, or the 10 that products give and take.
    kept = {"none": block, "full": vector, "selective": 10 * vector + scores}[config.recompute]
    activations = (config.layers - 1) * kept + block + 2 * scores + (sequence**2 if scores else 0)
    logits = 8 * tokens * config.vocabulary
    # While it is wrapped, a module exists twice. A thread has its stack, a block its Python objects.
    return max(states, 8 * total) + activations * dtype.itemsize + logits + MIB + 2**15 * config.layers


def free_memory() -> float:
    """Bytes that this machine, and the container around us, can still give; infinity where nothing tells."""
    free = math.inf
    with contextlib.suppress(OSError, ValueError, AttributeError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # the limit is a number, or the word "max"
        used = Path("/sys/fs/cgroup/memory.stat").read_text().split()[1]  # "anon", and how much of it
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) - int(used))
    return free


def check_memory(per_rank: float, ranks: int) -> None:
    """`ValueError` where `ranks` ranks on this machine need more than it has free."""
    if per_rank * ranks > (free := free_memory()):
        raise ValueError(
            f"{ranks:,} ranks need about {per_rank * ranks / MIB:,.0f} MiB, this machine has {free / MIB:,.0f} MiB "
            "free: use a smaller --batch-size, --sequence-length, --width, --layers or --world-size"
        )
