"""Checkpoints, ours and PyTorch's: bytes and time of one forward and backward.

The time is what the processor spent on this process, one thread, the runs taken in turns and the best of many
counted; the ratio is to the better of PyTorch's two variants, above 1 ours is faster. The peak is the ledger's.
"""

import argparse
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint as theirs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from minizero.memory import Ledger
from minizero.models.gpt import GPT, RECOMPUTE, GPTConfig
from minizero.recompute import by_function, by_hooks, checkpoint, checkpoint_selective, keep_matmuls

OPERATORS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]
KEEP = partial(create_selective_checkpoint_contexts, OPERATORS)

WAYS = {
    "no checkpoint": lambda fn, *arguments: fn(*arguments),
    "by_function, the short one": by_function,
    "by_hooks, the short one": by_hooks,
    "checkpoint": checkpoint,
    "PyTorch, use_reentrant=True": partial(theirs, use_reentrant=True),
    "PyTorch, use_reentrant=False": partial(theirs, use_reentrant=False),
    "checkpoint_selective, matrix products kept": partial(checkpoint_selective, keep_matmuls),
    "PyTorch, the same products kept": partial(theirs, use_reentrant=False, context_fn=KEEP),
}
# Which of ours is set against which of theirs.
PEERS = {
    "checkpoint": ["PyTorch, use_reentrant=True", "PyTorch, use_reentrant=False"],
    "checkpoint_selective, matrix products kept": ["PyTorch, the same products kept"],
}


def mlp(way):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(16))
    batch = torch.randn(512, 64, requires_grad=True)

    def loss():
        x = batch
        for block in blocks:
            x = x + way(block, x)
        return x.square().mean()

    return blocks, loss


def gpt(way):
    RECOMPUTE["bench"] = way
    model = GPT(GPTConfig(recompute="bench"))
    x, y = torch.randint(256, (2, 4, 64), generator=torch.Generator().manual_seed(0))

    def loss():
        RECOMPUTE["bench"] = way
        return model(x, y)

    return model, loss


def step(model, loss):
    """Seconds of processor time."""
    model.zero_grad()
    start = time.process_time()
    loss().backward()
    return time.process_time() - start


def peak(model, loss):
    with Ledger(model) as ledger:
        loss().backward()
    return ledger.peak["total"]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recompute", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="default: 40")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    for title, make in {"16-block MLP": mlp, "GPT": gpt}.items():
        runs = {name: make(way) for name, way in WAYS.items()}
        peaks = {name: peak(*run) for name, run in runs.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(options.rounds):
            for name, run in runs.items():
                best[name] = min(best[name], step(*run))
        table = Table(title=f"{title}: best of {options.rounds}, one thread, torch {torch.__version__}")
        for column in ("how", "peak, MiB", "CPU, ms", "theirs / ours: peak", "CPU"):
            table.add_column(column, justify="left" if column == "how" else "right")
        for name in runs:
            ratios = [f"{min(x[peer] for peer in PEERS[name]) / x[name]:.3f}" for x in (peaks, best) if name in PEERS]
            table.add_row(name, f"{peaks[name] / 2**20:.2f}", f"{best[name] * 1e3:.2f}", *ratios)
        Console().print(table)


if __name__ == "__main__":
    main()
