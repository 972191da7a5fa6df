"""Tiled attention on a CPU beside plain attention and PyTorch's fused one: forward and backward, in ms.

1 × 4 heads × N × 64, float32, 2 threads. Interleaved and the best of many, since other work on the machine
only ever slows a run down. Ratios: tiled / naive below 1 means that tiled is faster.
"""

import argparse
import math
import os
import time

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


def best_times(n, causal, rounds):
    """Seconds of forward and of forward and backward, for each attention."""
    q, k, v = (torch.randn(1, 4, n, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 4, n, 64)
    best = dict.fromkeys(ATTENTIONS, (math.inf, math.inf))
    for _ in range(rounds):
        for name, attention in ATTENTIONS.items():
            start = time.perf_counter()
            out = attention(q, k, v, causal)
            middle = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), dout)
            spent = middle - start, time.perf_counter() - start
            best[name] = tuple(map(min, zip(best[name], spent)))
    return best


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="at N = 512; fewer for longer ones (default: 60)")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(2)
    title = (
        f"Attention forward + backward, best of many, torch {torch.__version__}, 2 threads of {os.cpu_count()} cores"
    )
    table = Table(title=title)
    for column in (
        "N",
        "causal",
        *(f"{name}, ms" for name in ATTENTIONS),
        "tiled / naive",
        "flash / naive",
        "flash / sdpa",
    ):
        table.add_column(column, justify="right")
    for causal in (False, True):
        for n in LENGTHS:
            times = best_times(n, causal, max(3, options.rounds * 512 // n))
            both = {name: x[1] for name, x in times.items()}
            ratios = both["tiled"] / both["naive"], both["flash"] / both["naive"], both["flash"] / both["sdpa"]
            cells = [f"{seconds * 1e3:.1f}" for seconds in both.values()] + [f"{ratio:.2f}" for ratio in ratios]
            table.add_row(f"{n:,}", "yes" if causal else "no", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
