"""The report of an X-ray: the picture of a step, and what would help. In the terminal, as PNG, HTML and JSON.

report = xray(model, inputs)
report.show()                    tables of at most 100 columns
report.save("results/xray")      xray.png, xray.html, which needs no network, and xray.json
"""

import base64
import dataclasses
import functools
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

from minizero.cli import write_files
from minizero.pictures.memory import plot_curve
from minizero.xray.case import Case
from minizero.xray.fit import Fit, fit, kept_free
from minizero.xray.holders import Row, rows_at_peak
from minizero.xray.lines import LineLedger
from minizero.xray.plan import Plan
from minizero.xray.script import with_minizero, with_pytorch
from minizero.xray.step import Optimizer, Result, result
from minizero.xray.techniques import Outcome, outcome, techniques

GIB = 2**30
SHOWN = 12  # rows of the table of holders; JSON has all
SAMPLES = 2000  # of the curve, in pictures and JSON
# What no ledger of tensors sees, and its size where it is known.
UNSEEN = (
    "Not seen: scratch inside operators, an allocator's fragments, and a GPU's context and workspaces, about 1 GiB.",
    "The step ran as on a CPU. On a GPU attention has other kernels: with dropout the CPU's stores its scores, there "
    "none does; and optimizers step all parameters at once (foreach, in the table).",
)


class Report:
    """What one case's step holds. Bytes are of one rank.

    peak: by category, each category's own maximum, and the joint maximum `total`, as the ledger's. holders: rows, the
    largest first, of what is alive at the joint maximum. curve: samples, as the ledger's, at most 2,000.
    """

    def __init__(self, case: Case, ranks: int = 8, name: str = "") -> None:
        self.case, self.ranks = case, ranks
        self.title = f"{name or type(case.model).__name__}: {case.parameters:,} parameters, batch {case.batch_size}"
        measured = case.measure(Plan(), LineLedger)
        self.plain: Result = result(measured)
        self.peak = self.plain.peak
        self.holders: list[Row] = rows_at_peak(measured.ledger, case.vocabulary)
        self.curve = thinned(measured.ledger.curve)
        self.phase = max(self.curve, key=lambda sample: sample["total"]).phase
        self.fits: tuple[float, Fit] | None = None  # after `fit`: the budget, and what was found

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """A row for each technique. The first use runs them, which takes as long as some twenty steps."""
        return [outcome(self.case, each, self.plain) for each in techniques(self.ranks, self.case.batch_size)]

    @property
    def has_table(self) -> bool:
        """Have the techniques been run? Files contain what has been asked for."""
        return "outcomes" in vars(self)

    def fit(self, budget: float) -> Fit:
        """The cheapest stack of techniques on `ranks` devices of `budget` bytes each."""
        self.fits = budget, fit(self.case, budget, self.ranks)
        return self.fits[1]

    def plot(self, axes: Any = None) -> Any:
        """Draw the curve by category; returns the matplotlib Axes."""
        return plot_curve(
            self.curve, axes, "not seen: scratch inside operators, an allocator's reserve, a GPU's context"
        )

    # In the terminal, and on the page: the same tables.

    def show(self, console: Console | None = None) -> None:
        """Print the picture of the step."""
        console = console or Console(width=100)
        console.print(f"{self.title}\n", highlight=False)
        held = [(name, count) for name, count in self.plain.parts.items() if count >= self.peak["total"] / 1000]
        parts = ", ".join(f"{name} {size(count)}" for name, count in held if name not in ("total", "host"))
        console.print(f"Peak {size(self.peak['total'])}, in {self.phase}: {parts}\n", highlight=False)
        console.print("Who holds the peak", style="italic")
        console.print(self.table_of_holders())
        for line in UNSEEN:
            console.print(line, highlight=False)
        console.print()

    def what_would_help(self, console: Console | None = None) -> list[Outcome]:
        """Run the step again with each technique, and print the table; returns its rows."""
        console = console or Console(width=100)
        console.print("What would help: the same step, run again", style="italic")
        console.print(self.table_of_techniques())
        for note in self.case.notes:
            console.print(note, highlight=False)
        return self.outcomes

    def show_fit(self, console: Console | None = None) -> None:
        """Print what `fit` has found, and the lines to write."""
        console = console or Console(width=100)
        assert self.fits is not None
        for line in self.words_of_fit():
            console.print(line, highlight=False, markup=False)

    def table_of_holders(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", justify="right", no_wrap=True)
        for heading in ("category", "what", "where", "line"):
            table.add_column(heading, overflow="fold")
        for row in self.holders[:SHOWN]:
            modules = f"{row.module}, {row.alike} alike" if row.alike > 1 else row.module
            table.add_row(size(row.bytes), row.category, row.what, modules, row.line)
        if rest := self.holders[SHOWN:]:
            table.add_row(size(sum(row.bytes for row in rest)), "", f"{len(rest)} smaller rows")
        return table

    def table_of_techniques(self) -> Table:
        table = Table("technique", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("peak", "against\nplain", "extra\nforwards", "sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("what it costs", overflow="fold")
        table.add_row("none", size(self.peak["total"]), "1.00", "0", "-", "")
        for row in self.outcomes:
            name, plan = row.technique.name, row.technique.plan
            if row.result is None:
                table.add_row(name, "-", "-", "-", "-", row.remark, style="dim")
                continue
            sent = size(row.result.sent) if row.result.sent else "-"
            words = f"{row.remark}. {row.technique.price}" if row.remark else row.technique.price
            figures = size(row.result.peak["total"]), f"{row.against:.2f}", f"{plan.recompute:d}", sent
            table.add_row(name, *figures, words, style="bold" if row.against > 1 else "")
        return table

    def words_of_fit(self) -> list[str]:
        """What `fit` has found, line by line."""
        assert self.fits is not None
        budget, found = self.fits
        peak, free = size(found.result.peak["total"]), size(kept_free(budget))
        verdict = f"fits, with {size(found.spare)} to spare" if found.spare >= 0 else f"{size(-found.spare)} too much"
        lines = [
            f"{self.ranks} × {size(budget)}: the "
            + ("cheapest that fits" if found.spare >= 0 else "smallest, which does not fit"),
            f"    {found.plan}",
            f"    peak {peak}, and {free} kept free for what is not seen: {verdict}. Stacks tried: {found.tried}.",
            "",
            "With this package:",
            *(f"    {line}" for line in with_minizero(found.plan, self.case.model)),
            "",
            "With PyTorch's own:",
            *(f"    {line}" for line in with_pytorch(found.plan, self.case.model)),
        ]
        return lines

    # Files.

    def numbers(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        curve = {key: [sample[key] for sample in self.curve] for key in self.curve[0]}
        curve |= {key: [getattr(sample, key) for sample in self.curve] for key in ("phase", "operator", "number")}
        rows = [
            {"name": row.technique.name, "price": row.technique.price, "remark": row.remark, "against": row.against}
            | (dataclasses.asdict(row.result) if row.result else {})
            for row in (self.outcomes if self.has_table else ())
        ]
        return {
            "title": self.title,
            "torch": torch.__version__,
            "parameters": self.case.parameters,
            "ranks": self.ranks,
            "peak": self.peak,
            "at_peak": self.plain.parts,
            "holders": [dataclasses.asdict(row) for row in self.holders],
            "techniques": rows,
            "fit": self.words_of_fit() if self.fits else None,
            "notes": [*self.case.notes, *UNSEEN],
            "curve": curve,
        }

    def page(self, picture: bytes) -> str:
        """One HTML page that needs no network. picture: the PNG."""
        console = Console(width=110, record=True, file=io.StringIO())
        self.show(console)
        if self.has_table:
            self.what_would_help(console)
        if self.fits:
            self.show_fit(console)
        text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        encoded = base64.b64encode(picture).decode()
        return PAGE.format(title=self.title, picture=encoded, text=text)

    def save(self, folder: str | Path) -> list[Path]:
        """Write xray.png, xray.html and xray.json into `folder`; returns their paths."""
        figure = Figure(figsize=(16, 8), layout="constrained")
        axes = self.plot(figure.subplots())
        axes.set_title(self.title, fontsize=18, pad=28)
        figure.savefig(picture := io.BytesIO(), format="png", dpi=110)
        files = {
            "xray.png": picture.getvalue(),
            "xray.html": self.page(picture.getvalue()).encode(),
            "xray.json": json.dumps(self.numbers()).encode(),
        }
        return write_files(files, Path(folder))


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }}
img {{ width: 100% }} pre {{ font: 13px/1.35 ui-monospace, monospace; overflow-x: auto }}</style>
<h1>Memory of a training step</h1>
<img alt="memory by category through one training step" src="data:image/png;base64,{picture}">
{text}</html>
"""


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
