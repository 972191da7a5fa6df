"""python -m tests.bench: a step of ours beside PyTorch's own, as one table each: engines, recompute, the ledger.

"/ first" is a contender's number divided by that of the first one of the same size: above 1 the first is better. Of
ranks start these again to compare them: some launches are luckier than others from their first message to their last.
Rings stand beside PyTorch's in `python -m minizero.lab`, kernels of attention in `make gpu`.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench import beside
from tests.support.processes import run


def table(title, rows):
    """rows: size, {contender: its seconds, and peak in bytes}."""
    made = Table("size", "contender", title=f"{title}\ntorch {torch.__version__}", box=box.SIMPLE_HEAD)
    for heading in ("ms", "/ first", "MiB", "/ first"):
        made.add_column(heading, justify="right")
    for size, found in rows:
        first = next(iter(found.values()))
        for name, numbers in found.items():
            both = zip(numbers, first, (1e3, 2**-20))
            made.add_row(size, name, *(f"{x:,.2f}" for its, unit, scale in both for x in (its * scale, its / unit)))
    Console(width=100).print(made)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4, help="for each size, at least three rounds (default: 4)")
    limit = parser.parse_args().seconds
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table(beside.engines.__doc__, run(partial(beside.engines, limit), 2, Path(folder))[0])
    for what in (beside.recompute, beside.ledger):
        table(what.__doc__, what(limit))


if __name__ == "__main__":
    main()
