"""python -m tests.bench [what …]: our code beside others', as one table each: size × contender × measure.

"/ first" is a contender's number divided by that of the first one of the same size: above 1 the first is better.
Ranks are processes on this machine; start these again to compare them, since some launches are luckier than others
from their first message to their last.
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

from tests.bench import cases
from tests.support.processes import run

ON_RANKS = ("collectives", "engines")
ALONE = ("ledger", "recompute", "attention", "formats")


def table(title, rows):
    """size, contender, and for each measure its number and the ratio to the first contender's."""
    rows = list(rows)
    measures = list(dict.fromkeys(measure for _, found in rows for its in found.values() for measure in its))
    made = Table("size", "contender", title=title, box=box.SIMPLE_HEAD)
    for heading in [heading for measure in measures for heading in (measure, "/ first")]:
        made.add_column(heading, justify="right")
    for size, found in rows:
        first = next(iter(found.values()))
        for place, (name, its) in enumerate(found.items()):
            cells = []
            for measure in measures:
                number, unit = its.get(measure), first.get(measure)
                cells += ["" if number is None else f"{number:,.2f}", f"{number / unit:.2f}" if number and unit else ""]
            made.add_row("" if place else size, name, *cells)
    return made


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(ON_RANKS + ALONE)} (default: all)")
    parser.add_argument("--seconds", type=float, default=4, help="for each size, at least three rounds (default: 4)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of processes (default: 2 4)")
    options = parser.parse_args()
    if unknown := set(options.what) - {*ON_RANKS, *ALONE}:
        parser.error(f"there is no benchmark {', '.join(unknown)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for what in options.what or ON_RANKS + ALONE:
        title = f"{what}: {getattr(cases, what).__doc__.splitlines()[0]}\ntorch {torch.__version__}"
        for ranks in options.ranks if what in ON_RANKS else [1]:
            if what in ALONE:
                rows = getattr(cases, what)(options.seconds)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    rows = run(partial(cases.of_ranks, what=what, limit=options.seconds), ranks, Path(folder))[0]
            Console(width=100).print(table(title + f", {ranks} ranks" * (what in ON_RANKS), rows))


if __name__ == "__main__":
    main()
