"""The loss in chunks beside plain cross-entropy and PyTorch's own in chunks: bytes and time of forward and backward.

The peak is what PyTorch's profiler counts above the start, which sees into operators, too: PyTorch's loss in chunks is
one. The gradients are in it. The time is what the processor spent on this process, one thread, the ways taken in turns
and the best of many counted. The last two columns are PyTorch's, in as many tokens at a time, divided by ours: above 1
ours is smaller or faster.
"""

import argparse
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from minizero import cross_entropy_in_chunks
from tests.bench.allocators import profile_step

TOKENS, WIDTH, VOCABULARY = 1024, 128, 16384
CASES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def plain(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def theirs(hidden, weight, targets, **options):
    """PyTorch's: without options at once, with options in chunks."""
    chosen = torch.nn.LinearCrossEntropyOptions(chunking_method=None, **options) if options else None
    return F.linear_cross_entropy(hidden, weight, targets, options=chosen)


def ways():
    """By name. PyTorch before 2.13 has none of its own."""
    found = {"cross_entropy": plain}
    if hasattr(F, "linear_cross_entropy"):
        found["PyTorch, linear_cross_entropy"] = theirs
    for chunk in (32, 128, 512):
        if hasattr(F, "linear_cross_entropy"):
            found[f"PyTorch, {chunk} at a time"] = partial(theirs, batch_chunk_size=chunk)
        found[f"in chunks of {chunk}"] = partial(cross_entropy_in_chunks, chunk=chunk)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chunked_loss", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    for title, dtype in CASES.items():
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (
            torch.randn(n, WIDTH, generator=generator).mul(0.3).to(dtype).requires_grad_() for n in (TOKENS, VOCABULARY)
        )
        targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)

        def step(loss_of, given=(hidden, weight, targets)):
            given[0].grad = given[1].grad = None
            loss_of(*given).backward()

        steps = {name: partial(step, way) for name, way in ways().items()}
        peaks = {}
        for name, one in steps.items():

            def from_nothing(one=one, given=(hidden, weight)):
                one()
                given[0].grad = given[1].grad = None

            peaks[name] = profile_step(from_nothing).peak
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(options.rounds):
            for name, one in steps.items():
                start = time.process_time()
                one()
                best[name] = min(best[name], time.process_time() - start)
        shape = f"{TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}"
        all_logits = f"all logits in FP32 {TOKENS * VOCABULARY * 4 / 2**20:.0f} MiB"
        run = f"best of {options.rounds}, one thread, torch {torch.__version__}"
        table = Table(title=f"{title}: {shape}; {all_logits}\n{run}")
        for column in ("loss", "peak, MiB", "CPU, ms", "theirs / ours: peak", "CPU"):
            table.add_column(column, justify="left" if column == "loss" else "right")
        for name in steps:
            peer = name.replace("in chunks of ", "PyTorch, ") + " at a time"
            ratios = [f"{x[peer] / x[name]:.2f}" for x in (peaks, best) if peer in steps]
            table.add_row(name, f"{peaks[name] / 2**20:.1f}", f"{best[name] * 1e3:.0f}", *ratios)
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
