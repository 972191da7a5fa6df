"""The report of an X-ray: the picture of a step, and what would help. In the terminal, as PNG, HTML and JSON.

    report = xray(model, inputs)
    report.show()                    tables of at most 100 columns
    report.save("results/xray")      xray.png, xray.html, which needs no network, and xray.json
"""

import base64
import dataclasses
import html
import io
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from minizero.report import write_files
from minizero.xray.case import Case
from minizero.xray.holders import Row, rows_at_peak
from minizero.xray.plan import Plan
from minizero.xray.step import Optimizer

GIB = 2**30
SHOWN = 12  # rows of the tables; JSON has all
SAMPLES = 2000  # of the curve, in pictures and JSON


class Report:
    """What one case's step holds. Bytes are of one rank.

    peak: by category, each category's own maximum, and the joint maximum `total`, as the ledger's. holders: rows, the
    largest first, of what is alive at the joint maximum. curve: samples, as the ledger's, at most 2,000.
    """

    def __init__(self, case: Case, ranks: int = 8, name: str = "") -> None:
        self.case, self.ranks = case, ranks
        self.name = name or type(case.model).__name__
        ledger = case.measure(Plan()).ledger
        self.peak: dict[str, int] = ledger.peak
        self.holders: list[Row] = rows_at_peak(ledger, case.vocabulary)
        self.curve = thinned(ledger.curve)
        top = max(self.curve, key=lambda sample: sample["total"])
        self.phase, self.operator = top.phase, top.operator.removeprefix("aten.").removesuffix(".default")

    @property
    def title(self) -> str:
        return f"{self.name}: {self.case.parameters:,} parameters, a batch of {self.case.batch_size}"

    def plot(self, axes: Any = None) -> Any:
        """Draw the curve by category; returns the matplotlib Axes."""
        from minizero.pictures.memory import plot_curve  # here, because matplotlib loads slowly

        return plot_curve(self.curve, axes, "not seen: scratch inside operators, an allocator's reserve, a GPU's context")

    def show(self, console: Console | None = None) -> None:
        """Print the picture of the step."""
        console = console or Console(width=100)
        console.print(f"{self.title}\n", highlight=False)
        parts = ", ".join(f"{name} {size(held)}" for name, held in self.at_peak().items())
        console.print(f"Peak {size(self.peak['total'])}, in {self.phase}: {parts}\n", highlight=False)
        console.print("Who holds the peak", style="italic")
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", justify="right", no_wrap=True)
        for heading in ("category", "what", "where", "line"):
            table.add_column(heading, overflow="fold")
        for row in self.holders[:SHOWN]:
            table.add_row(size(row.bytes), row.category, row.what, where(row), row.line)
        if rest := self.holders[SHOWN:]:
            table.add_row(size(sum(row.bytes for row in rest)), "", f"{len(rest)} smaller rows")
        console.print(table)

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the peak, without those that hold nothing."""
        top = max(self.curve, key=lambda sample: sample["total"])
        return {name: held for name, held in top.items() if held and name not in ("total", "host")}


def where(row: Row) -> str:
    """The modules that a row stands for."""
    return f"{row.module}, {row.alike} alike" if row.alike > 1 else row.module


def size(count: float) -> str:
    """Bytes in words: GiB from 1 GiB on, else MiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / 2**20:,.2f} MiB"


def thinned(curve: list[Any]) -> list[Any]:
    """At most `SAMPLES` samples: the highest of each stretch, so that no peak is lost."""
    stretch = -(-len(curve) // SAMPLES)
    return [max(curve[i : i + stretch], key=lambda sample: sample["total"]) for i in range(0, len(curve), stretch)]


def xray(
    model: nn.Module, inputs: Any, optimizer: Optimizer = torch.optim.AdamW, *, ranks: int = 8, name: str = ""
) -> Report:
    """Run a step of `model` without its numbers, and tell where its memory goes.

    model: any module, also on "meta"; it stays as it is. inputs: with which `model(*inputs)` or `model(**inputs)`
    gives the loss, or something with `.loss`; one rank's batch. optimizer: a class, or a function of the parameters.
    ranks: how many the tables on sharding shall have. `NotPossible`, a `ValueError`, if the step needs numbers.
    """
    return Report(Case(model, inputs, optimizer), ranks, name)
