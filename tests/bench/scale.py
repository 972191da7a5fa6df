"""The simulator against this machine: constants from 2 ranks, steps at 4 and 8 predicted. See `machine.py`."""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from minizero.simulate.machine import CLOCKS, CORES, STAGES, compare


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu where other work disturbs (default: wall)")
    options, _ = parser.parse_known_args()
    rows, machine = compare(rounds=options.rounds, clock=options.clock)
    link, console = machine.cluster.inside, Console()
    found = f"α {link.latency * 1e6:.0f} µs, β {link.bandwidth / 1e9:.2f} GB/s, {machine.rate / 1e9:.0f} GFLOP/s a rank"
    console.print(f"at 2 ranks: {found}", highlight=False)
    versions = f"torch {torch.__version__}, {CORES} cores"
    table = Table(title=f"One step, best of {3 * options.rounds}, {options.clock} clock, {versions}")
    for column in ("stage", "ranks", "measured, ms", "fitted, ms", "predicted, ms", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = ["", ""]
        cells[row.ranks > 2] = f"{row.simulated * 1e3:.1f}"
        name = STAGES[row.stage].__name__
        table.add_row(name, str(row.ranks), f"{row.measured * 1e3:.1f}", *cells, f"{row.error:+.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
