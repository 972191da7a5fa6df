"""Tiled attention on a CPU beside plain attention and PyTorch's fused one: forward and backward, in ms.

1 × 4 heads × N × 64, float32, 2 threads. Interleaved, in a shuffled order, and the best of many, since other
work on the machine only ever slows a run down. Ratios: tiled / naive below 1 means that tiled is faster. The last
column has the medians instead: plain attention mostly has to get its matrices from the operating system, page by
page, in its best round not.
"""

import argparse
import math
import os
import random
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from flash import attention_tiled, flash_attention

LENGTHS = (512, 1024, 2048, 4096)


def naive(q, k, v, causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    return scores.softmax(-1) @ v


ATTENTIONS = {
    "naive": naive,
    "tiled": lambda q, k, v, causal: attention_tiled(q, k, v, causal=causal),
    "flash": lambda q, k, v, causal: flash_attention(q, k, v, causal=causal),
    "sdpa": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
}


def times(n, causal, rounds):
    """Seconds of forward and backward for each attention: one number a round."""
    q, k, v = (torch.randn(1, 4, n, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 4, n, 64)
    seconds = {name: [] for name in ATTENTIONS}
    order = list(ATTENTIONS)
    for _ in range(rounds):
        random.shuffle(order)  # what ran before leaves its data in the caches: not always the same
        for name in order:
            start = time.perf_counter()
            torch.autograd.grad(ATTENTIONS[name](q, k, v, causal), (q, k, v), dout)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="at N = 512; fewer for longer ones (default: 60)")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(2)
    title = (
        f"Attention forward + backward, best of many, torch {torch.__version__}, 2 threads of {os.cpu_count()} cores"
    )
    table = Table(title=title)
    ratios = [("tiled", "naive", min), ("tiled", "sdpa", min), ("tiled", "naive", median)]
    titles = [f"{one} /\n{other}" + (",\nmedian" if of is median else "") for one, other, of in ratios]
    for column in ("N", "causal", *(f"{name},\nms" for name in ATTENTIONS), *titles):
        table.add_column(column, justify="right")
    for causal in (False, True):
        for n in LENGTHS:
            seconds = times(n, causal, max(3, options.rounds * 512 // n))
            cells = [f"{min(x) * 1e3:.1f}" for x in seconds.values()]
            cells += [f"{of(seconds[one]) / of(seconds[other]):.2f}" for one, other, of in ratios]
            table.add_row(f"{n:,}", "yes" if causal else "no", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
