"""The report of an X-ray: what is found, and how it is shown: in the terminal, as PNG, HTML and JSON.

report = xray(model, inputs)
report.show()                    tables of at most 100 columns
report.save("results/xray")      xray.png, xray.html, which needs no network, xray.json and snapshot.pickle
"""

import base64
import dataclasses
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import nn

from minizero.cli import write_files
from minizero.memory.snapshot import snapshot
from minizero.memory.tape import columns
from minizero.pictures.memory import plot_curve
from minizero.xray.budget import CONTEXT, GIB, RESERVED, SMALL, Choice, cheapest, kept_free, largest, price
from minizero.xray.case import WORTH_A_LINE, Case
from minizero.xray.holders import rows_at_peak
from minizero.xray.hugging_face import with_caches
from minizero.xray.lines import LineLedger
from minizero.xray.plan import Plan
from minizero.xray.script import with_minizero, with_pytorch
from minizero.xray.step import Optimizer, tensors_of, time_first
from minizero.xray.techniques import Outcome, costs_of, name_of, outcome, plans

SAMPLES = 2000  # of the curve
SHOWN = 12  # rows of the table of holders; JSON has all
UNSEEN = {
    False: "Not seen: scratch inside operators, an allocator's fragments, and a GPU's context and workspaces.\n"
    "The step ran as on a CPU. On a card attention, dropout, autocast and optimizers keep other tensors: --card h100.",
    True: "This is what the card's allocator is asked for. It hands out up to 1 % more, reserves 5 to 18 % more, and "
    "a context takes about 1 GiB: --fit counts with these. If sizes change from step to step, it reserves far more: in "
    "one published run 16.4 GiB, and 10.8 with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.\n"
    "Not modelled: workspaces of convolutions and RNNs (cuDNN), torch.compile, and kernels that are not PyTorch's "
    "(flash-attn, Triton). A mask of ones is kept here; transformers drops it in a real step.",
}
OWN_LOOP = (
    "make() has returned a loop. What changes a loop is not tried: smaller batches, BF16, other optimizers, offload, "
    "ZeRO. Change it there, or let make() return (model, inputs)."
)
PRICE = "A price is a guess at the time that a stack adds to a step. It only sets the order in which stacks are tried."
NUMBERS: dict[str, Any] = {"justify": "right", "no_wrap": True}
LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


class Report:
    """What one case's step holds. Bytes are of one rank.

    plain: the figures of the step. peak: by category, each category's own maximum, and the joint maximum `total`, as
    the ledger's. phase: in which that is. holders: rows, the largest first, of what is alive then. curve: samples, as
    the ledger's, at most 2,000. fits: after `fit`, the budget and what was found. tape: the step's.
    """

    def __init__(self, case: Case, ranks: int = 1, name: str = "") -> None:
        self.case, self.ranks = case, ranks
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in case.model.parameters()}
        kind = getattr(case.make_optimizer, "__name__", type(case.make_optimizer).__name__)
        optimizer = kind.replace("<lambda>", "an optimizer of its own")
        shape = next((tuple(tensor.shape) for tensor in tensors_of(case.inputs)), ())
        batch = f"inputs of {shape}" if time_first(case.model) else f"batch {case.batch_size}"
        step = "its own loop" if case.loops else f"{batch}, {optimizer}"
        title = f"{name or type(case.model).__name__}: {case.parameters:,} parameters in {', '.join(sorted(dtypes))}"
        self.title = f"{title}, {step}, {f'as on {case.card}' if case.card else 'as on a CPU'}"
        measured = case.measure(Plan(), LineLedger)
        self.plain = case.found[case.as_run(Plan())] = measured.result()
        self.peak = self.plain.peak
        self.tape = measured.ledger.tape
        self.holders = rows_at_peak(measured.ledger, case.vocabulary())
        again = [row for row in self.holders if row.what.startswith("recomputed")]
        if (held := sum(row.bytes for row in again)) > self.peak["total"] / 4:
            alike = max(row.alike for row in again)
            case.notes.add(
                f"In backward {size(held)} of the peak are recomputed, of {alike} modules at once: a checkpoint around "
                "each block holds one block at a time."
            )
        curve = measured.ledger.curve
        stretch = -(-len(curve) // SAMPLES)  # of each the highest, so that no peak is lost
        stretches = (curve[start : start + stretch] for start in range(0, len(curve), stretch))
        self.curve = [max(samples, key=lambda sample: sample["total"]) for samples in stretches]
        self.phase = max(self.curve, key=lambda sample: sample["total"]).phase
        self.fits: tuple[float, Choice] | None = None

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """A row for each technique. The first use runs them, which takes as long as some twenty to forty steps."""
        frozen = not all(parameter.requires_grad for parameter in self.case.model.parameters())
        every = plans(self.ranks, self.case.batch_size, frozen)
        wanted = [plan for plan in every if not (self.case.loops and plan.needs_its_loop)]
        self.case.run_all(wanted)
        return [outcome(self.case, plan) for plan in wanted]

    def fit(self, budget: float) -> Choice:
        """The cheapest stack of techniques on `ranks` devices of `budget` bytes each."""
        self.fits = budget, cheapest(self.case, budget, self.ranks)
        return self.fits[1]

    def largest(self, budget: float) -> dict[str, int]:
        """The largest batch that fits, by the name of a plan: the step as it is, and with recompute if that can be."""
        found = [outcome(self.case, plan) for plan in (Plan(), Plan(recompute=True))]
        return {name_of(row.plan): largest(self.case, budget, row.plan) for row in found if row.result}

    def show(self, console: Console | None = None) -> None:
        """Print the picture of the step: its peak, and who holds it."""
        write = printer(console)
        held = [(name, count) for name, count in self.plain.parts.items() if name not in ("total", "host")]
        parts = ", ".join(f"{name} {size(count)}" for name, count in held if count >= self.peak["total"] / 1000)
        write(f"{self.title}\n\nPeak {size(self.peak['total'])}, in {self.phase}: {parts}\n\nWho holds the peak")
        names = (Column(heading, overflow="fold") for heading in ("category", "what", "where", "line"))
        table = Table(Column("", **NUMBERS), *names, **LOOK)
        for row in self.holders[:SHOWN]:
            modules = f"{row.module}, {row.alike} alike" if row.alike > 1 else row.module
            table.add_row(size(row.bytes), row.category, row.what, modules, row.line)
        if rest := self.holders[SHOWN:]:
            table.add_row(size(sum(row.bytes for row in rest)), "", f"{len(rest)} smaller rows")
        write(table)
        if (host := self.peak["host"]) >= WORTH_A_LINE:
            write(f"On the host, and not in the peak: up to {size(host)}.")
        write("".join(f"{note}\n" for note in sorted(self.case.notes)) + f"{UNSEEN[bool(self.case.card)]}\n")

    def what_would_help(self, console: Console | None = None) -> list[Outcome]:
        """Run the step again with each technique, and print the table; returns its rows."""
        write = printer(console)
        write("What would help: the same step, run again")
        figures = (Column(heading, **NUMBERS) for heading in ("peak", "against\nplain", "extra\nforwards", "sent"))
        table = Table("technique", *figures, Column("what it costs", overflow="fold"), **LOOK)
        table.add_row("none", size(self.peak["total"]), "1.00", "0", "-", "")
        below = []
        for plan, found, against, remark in self.outcomes:
            if found is None:
                table.add_row(name_of(plan), "-", "-", "-", "-", remark, style="dim")
            elif against < 0.995:
                row = size(found.peak["total"]), f"{against:.2f}", f"{plan.recompute:d}", size(found.sent)
                table.add_row(name_of(plan), *row, costs_of(plan))
            else:
                below.append(f"Saves nothing here: {name_of(plan)}{f' ({remark})' if remark else ''}\n")
        write(table)
        write("".join(below), end="")
        if self.case.loops:
            write(OWN_LOOP)
        elif self.case.masters(Plan(stage=3)):
            write("Its weights are in 16 bits: in the rows of engines, masters in FP32 come beside them.")
        if with_caches(self.case.model):
            write("With recompute: use_cache=False, since a cache would keep what recompute drops.")
        return self.outcomes

    def show_fit(self, console: Console | None = None) -> None:
        """Print what `fit` has found, and the lines to write."""
        assert self.fits is not None
        (budget, found), write = self.fits, printer(console)
        plan, tied = found.plan, found.tied
        fits, peak, free = found.spare >= 0, size(found.result.peak["total"]), size(kept_free(budget))
        verdict = f"fits, with {size(found.spare)} to spare" if fits else f"{size(-found.spare)} too much"
        context = f"{size(CONTEXT)} for a GPU's context, and " if budget > SMALL else ""
        part = f" Up to {size(SMALL)}, a budget is taken for part of a device: no context is counted."
        write(
            f"{self.ranks} × {size(budget)}: the {'cheapest that fits' if fits else 'smallest, which does not fit'}\n"
            f"    {name_of(plan)}\n"
            f"    peak {peak}, and {free} kept free for what is not seen: {verdict}. "
            f"Stacks tried: {len(found.peaks)}.\n"
            f"    Kept free: {context}room for an "
            f"allocator to reserve {RESERVED} times what it is asked for.{'' if context else part}\n"
            f"    price {price(plan):.0%}: {costs_of(plan) or 'none'}"
        )
        if tied:
            write(f"    Stacks of the same price, not tried: {'; '.join(map(name_of, tied))}")
        if not fits or self.case.loops:
            least = sorted(found.peaks.items(), key=lambda each: each[1])[:SHOWN]
            write("    Tried: " + "; ".join(f"{name_of(plan)} {size(peak)}" for plan, peak in least))
            write("".join(f"    {name_of(plan)}: {why}\n" for plan, why in found.refused.items()), end="")
        if self.case.loops:
            write(OWN_LOOP)
        write(f"{PRICE}\n")
        dtype = self.case.masters(plan)
        plan = dataclasses.replace(plan, dtype=dtype or plan.dtype)
        for heading, lines in (("With this package:", with_minizero), ("With PyTorch's own:", with_pytorch)):
            to_write = ["model.float()"] * bool(dtype) + list(lines(plan, self.case.model))
            write("\n    ".join([heading, *(to_write or ["nothing: the step stays as it is"])]) + "\n")

    def plot(self, axes: Any = None) -> Any:
        """Draw the curve by category; returns the matplotlib Axes."""
        unseen = "not seen: scratch inside operators, an allocator's reserve, a GPU's context"
        return plot_curve(self.curve, axes, unseen)

    def numbers(self) -> dict[str, Any]:
        """Everything that was asked for so far as plain data, fit for JSON."""
        budget, found = self.fits or (None, None)
        return {
            "title": self.title,
            "torch": torch.__version__,
            "parameters": self.case.parameters,
            "ranks": self.ranks,
            "card": self.case.card,
            "notes": sorted(self.case.notes),
            "peak": self.peak,
            "at_peak": self.plain.parts,
            "holders": [dataclasses.asdict(row) for row in self.holders],
            "techniques": [
                {"name": name_of(row.plan), "costs": costs_of(row.plan), "against": row.against, "remark": row.remark}
                | (row.result._asdict() if row.result else {})
                for row in vars(self).get("outcomes", [])
            ],
            "fit": found
            and {"budget": budget, "plan": name_of(found.plan), "peak": found.result.peak, "spare": found.spare},
            "curve": columns(self.curve),
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Write xray.png, .html, .json, which have what was asked for, and snapshot.pickle into `folder`; the paths."""
        figure = Figure(figsize=(16, 8), layout="constrained")
        axes = self.plot(figure.subplots())
        axes.set_title(self.title, fontsize=18, pad=28)
        figure.savefig(picture := io.BytesIO(), format="png", dpi=110)
        self.show(console := Console(width=110, record=True, file=io.StringIO()))
        if "outcomes" in vars(self):
            self.what_would_help(console)
        if self.fits:
            self.show_fit(console)
        data = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
        shown = f'<h1>Memory of a training step</h1><img alt="memory by category" style="width: 100%" src="{data}">'
        page = console.export_html(inline_styles=True).replace("<body>", f"<body>{shown}", 1)
        page = page.replace("<head>", f"<head><title>{self.title}</title>", 1)
        numbers = json.dumps(self.numbers())
        files = {"xray.png": picture.getvalue(), "xray.html": page.encode(), "xray.json": numbers.encode()}
        files["snapshot.pickle"] = snapshot(self.tape)
        return write_files(files, Path(folder))


def printer(console: Console | None) -> Callable[..., None]:
    """Prints lines and tables, by default in 100 columns, and as they are: brackets are no markup."""
    return functools.partial((console or Console(width=100)).print, highlight=False, markup=False)


def size(count: float) -> str:
    """Bytes in words: GiB from 1 GiB on, else MiB."""
    if not count:
        return "-"
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / 2**20:,.2f} MiB"


def xray(
    model: nn.Module,
    inputs: Any,
    optimizer: Optimizer = torch.optim.AdamW,
    *,
    ranks: int = 1,
    name: str = "",
    card: str | None = None,
) -> Report:
    """Run a step of `model` without its numbers, and tell where its memory goes.

    model: any module, also on "meta"; it stays as it is. inputs: with which `model(*inputs)` or `model(**inputs)`
    gives the loss, or something with `.loss`; one rank's batch; or a function that runs a whole step. optimizer: one of
    the model's parameters, or a class, or a function of the parameters. ranks: how many the tables on sharding shall
    have; 1: none. card: such as h100; None: as on a CPU. `NotPossible`, a `ValueError`, if the step needs numbers.
    """
    return Report(Case(model, inputs, optimizer, card), ranks, name)
