"""What it costs to watch a step: our ledger beside PyTorch's MemTracker, on steps of every size, in one process.

The time is what the processor spent on this thread; the runs take turns, and the best of many counts. "open": the
watcher stays open for all steps; "each": one is opened for every step, as the main job does. "nothing" lets every
operator come by and does nothing: what PyTorch takes to show them to Python, and no watcher of this kind can be below.
"""

import os
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from minizero.memory.operators import Watcher


class Nothing(Watcher):
    """Lets every operator come by."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


def smallest():
    """One hidden layer, plain SGD: some forty operators."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: F.cross_entropy(model(x), y)


def gpt(batch_size, **shapes):
    config = GPTConfig(**shapes)
    model = GPT(config)
    x, y = torch.randint(256, (2, batch_size, config.sequence_length))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: model(x, y)


CASES = {
    "the smallest: an MLP": (smallest, 2000),
    "a GPT of width 32": (lambda: gpt(2, width=32), 200),
    "the demo's GPT": (lambda: gpt(2), 40),
    "the demo's GPT, batch 16": (lambda: gpt(16), 12),
}


def tracker(model, optimizer):
    watcher = MemTracker()
    watcher.track_external(model, optimizer)
    return watcher


def measure(make, rounds):
    """The best seconds of a step by who watches, and how many operators it has."""
    model, optimizer, loss = make()

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds():
        start = time.thread_time()
        step()
        return time.thread_time() - start

    def each(watcher):
        start = time.thread_time()
        with watcher(model, optimizer):
            step()
        return time.thread_time() - start

    def still_open(watcher, reset):
        best = float("inf")
        with watcher(model, optimizer) as watching:
            for number in range(4):
                reset(watching)
                spent = seconds()
                best = min(best, spent) if number else best  # the first has more to learn
        return best

    step()
    with Ledger(model, optimizer) as ledger:
        step()
        operators = ledger.curve[-1].number
    calls = {
        "nobody": lambda: min(seconds() for _ in range(3)),
        "nothing, open": lambda: still_open(lambda *_: Nothing(), lambda _: None),
        "ledger, open": lambda: still_open(Ledger, Ledger.reset),
        "ledger, each": lambda: each(Ledger),
        "MemTracker, open": lambda: still_open(tracker, MemTracker.reset_mod_stats),
        "MemTracker, each": lambda: each(tracker),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], call())
    return best, operators


def main(scale=1.0):
    torch.set_num_threads(1)
    table = Table(title=f"A watched step / an unwatched one; torch {torch.__version__}, {os.cpu_count()} cores")
    names = ("nothing, open", "ledger, open", "ledger, each", "MemTracker, open", "MemTracker, each")
    for column in (
        "step",
        "operators",
        "ms",
        *(name.replace(", ", ",\n") for name in names),
        "ledger, µs\nan operator",
    ):
        table.add_column(column, justify="left" if column == "step" else "right")
    for case, (make, rounds) in CASES.items():
        best, operators = measure(make, max(3, int(rounds * scale)))
        alone = best["nobody"]
        each = (best["ledger, open"] - alone) / operators * 1e6
        ratios = [f"{best[name] / alone:.2f}" for name in names]
        table.add_row(case, str(operators), f"{alone * 1e3:.2f}", *ratios, f"{each:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
