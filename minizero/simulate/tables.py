"""The simulator's tables and pictures. Published, fitted and predicted never share a column or a colour."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from minizero.pictures.style import COLORS, FONT, OTHER, PREDICTED, keys, label_axes
from minizero.pictures.timeline import plot_timeline
from minizero.simulate.clusters import GIB
from minizero.simulate.fits import Fit, fit
from minizero.simulate.published import PUBLICATIONS, RATIO
from minizero.simulate.remedies import Changes
from minizero.simulate.search import describe
from minizero.simulate.step import Prediction

FITTED: dict[str, Any] = {"color": "#56B4E9", "linestyle": "dotted", "linewidth": 2.5}
PUBLISHED: dict[str, Any] = {"color": "white", "edgecolor": "black", "marker": "D", "s": 70, "zorder": 5}


def print_step(step: Prediction, console: Console) -> None:
    """Prints what one step holds and sends, and how long it takes."""
    plan, gpu = step.plan, step.cluster.gpu
    head = f"{step.model.name}, {step.model.parameters:,} parameters, {plan.ranks:,} x {gpu.name}: {describe(plan)}"
    console.print(head, markup=False, highlight=False)
    table = Table("for each GPU", box=box.SIMPLE_HEAD)
    table.add_column("predicted", justify="right", style=PREDICTED["color"])
    for name, held in step.memory.items():
        if name != "total" and held:
            table.add_row(f"GiB of {name}" + (" memory" if name == "host" else ""), f"{held / GIB:,.2f}")
    verdict = "fits" if step.fits else "OUT OF MEMORY"
    table.add_row(f"GiB at the peak, of {gpu.memory / GIB:,.0f}: {verdict}", f"{step.memory['total'] / GIB:,.2f}")
    table.add_section()
    rows = {
        "seconds for a step": f"{step.seconds:,.4g}",
        "of these exposed (the GPU computes nothing)": f"{step.exposed_seconds / step.seconds:.1%}",
        "tokens per second": f"{step.tokens_per_second:,.0f}",
        "10¹² FLOP/s, with what is computed twice": f"{step.tflops:,.1f}",
        "GiB sent": f"{step.sent / GIB:,.2f}",
        "of these, from host to host": f"{step.sent_between / GIB:,.2f}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def print_remedies(found: Sequence[tuple[Changes, Prediction]], console: Console) -> None:
    """Prints what makes a plan fit, as the command's options."""
    if not found:
        console.print("No switch makes it fit, nor do all together: take more GPUs, or a smaller batch.")
        return
    count = len(found[0][0])
    console.print(
        f"It fits with {'one switch' if count == 1 else f'{count} switches'} more. Any of these lines will do:"
    )
    table = Table("add", box=box.SIMPLE_HEAD)
    for heading in ("GiB\nper GPU", "tokens/s\nper GPU"):
        table.add_column(heading, justify="right", style=PREDICTED["color"])
    for changes, step in found:
        held = step.memory["total"] / GIB
        table.add_row(as_options(changes), f"{held:,.1f}", f"{step.tokens_per_second:,.0f}")
    console.print(table)


def as_options(changes: Changes) -> str:
    """Changes of a plan as options of `python -m minizero.simulate`."""
    words = []
    for name, value in changes.items():
        option = "no --sharding-factor" if value is None else f"--{name}"
        words.append(option if value is True or value is None else f"{option} {value}")
    return " ".join(words)


def print_search(steps: Sequence[Prediction], best: Iterable[Prediction], console: Console) -> None:
    """Prints the frontier: what less memory costs in speed."""
    console.print(f"{len(steps):,} plans fit. Those that no other beats in both speed and memory, predicted:")
    table = Table("plan (micro-batches x sequences)", box=box.SIMPLE_HEAD)
    for heading in ("tokens/s\nper GPU", "GiB\nper GPU", "exposed"):
        table.add_column(heading, justify="right", style=PREDICTED["color"])
    for step in best:
        held, exposed = step.memory["total"] / GIB, step.exposed_seconds / step.seconds
        table.add_row(describe(step.plan), f"{step.tokens_per_second:,.0f}", f"{held:,.1f}", f"{exposed:.1%}")
    console.print(table)


def print_published(console: Console) -> None:
    """Prints every published row, fitted or predicted, and by how much the simulator is off."""
    for name in PUBLICATIONS:
        one = fit(name)
        console.print(f"\n{name}: {one.publication.source}", highlight=False)
        table = Table("model", "run", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("published", justify="right", style="bold")
        table.add_column("fitted", justify="right", style=FITTED["color"])
        table.add_column("predicted", justify="right", style=PREDICTED["color"])
        table.add_column("error", justify="right")
        for row, value in zip(one.publication.rows, one.values):
            text = _number(value, row.unit)
            published = ("about " if row.about else "") + _number(row.value, row.unit)
            what = f"{row.plan.ranks} GPUs, batch {row.plan.batch_size}"
            what += ", DDP" if row.plan.stage == 0 else f", F = {f}" if (f := row.plan.sharding_factor) else ""
            what += f" / {row.against.ranks} GPUs" if row.against else ""
            cells = (text, "") if row.fitted else ("", text)
            table.add_row(row.model, what, published, *cells, f"{value / row.value - 1:+.1%}")
        console.print(table)
        console.print(_constants(one), highlight=False)
        console.print(one.publication.note, highlight=False)
        if name == "llm-foundry":
            line, flat = np.abs(ruler_errors(one)).mean(axis=1)
            others = f"a line through 128 and 256: {line:.1%}; of no change since 256: {flat:.1%}"
            console.print(f"Mean error at 512 GPUs of {others}.", highlight=False)


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == RATIO else f"{value:,.0f}" if value >= 300 else f"{value:.1f}"


def _constants(one: Fit) -> str:
    shared = [
        f"{name} {value:.3g}" + (" (carried over)" if name in one.publication.carried else "")
        for name, value in one.shared.items()
    ]
    efficiencies = ", ".join(f"{name} {value:.2f}" for name, value in one.efficiencies.items())
    off = np.abs(one.errors(fitted=False))
    return (
        f"Efficiency, fitted: {efficiencies}. Shared: {', '.join(shared)}.\n"
        f"Predicted rows: mean error {off.mean():.1%}, worst {off.max():.1%}."
    )


def ruler_errors(one: Fit) -> tuple[list[float], list[float]]:
    """The errors at the third of three published points: of a line over log GPUs through the first two, and of the
    second point itself.
    """
    line, flat = [], []
    rows = one.publication.rows
    for first, second, third in zip(rows[::3], rows[1::3], rows[2::3]):
        x = np.log([row.plan.ranks for row in (first, second, third)])
        slope = (second.value - first.value) / (x[1] - x[0])
        line.append((second.value + slope * (x[2] - x[1])) / third.value - 1)
        flat.append(second.value / third.value - 1)
    return line, flat


def draw_memory(steps: Sequence[Prediction], axes: Axes, labels: Sequence[str] | None = None) -> Axes:
    """Draws a bar for each step, the peak by category, and a line at what the GPU has."""
    edges: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6}
    for place, step in enumerate(steps):
        below = 0.0
        for name, held in step.memory.items():
            if name not in ("total", "host"):
                axes.barh(place, held / GIB, left=below, color=COLORS.get(name, OTHER), **edges)
                below += held / GIB
        words = f" {below:,.1f}" + ("" if step.fits else "  out of memory")
        axes.text(below, place, words, va="center", fontsize=FONT - 1)
    axes.axvline(steps[0].cluster.gpu.memory / GIB, color="black", linestyle="dashed")
    axes.set_yticks(range(len(steps)), labels or [describe(step.plan) for step in steps])
    axes.invert_yaxis()
    end = 1.55 * max(max(step.memory["total"], step.cluster.gpu.memory) for step in steps) / GIB
    label_axes(axes, "GiB per GPU at the peak, predicted; dashed: what it has", "", FONT - 1, xlim=(0, end))
    shown = {name: color for name, color in COLORS.items() if any(step.memory.get(name) for step in steps)}
    keys(axes, shown, loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def draw_step(step: Prediction) -> Figure:
    """Draws memory above, and the streams below: the whole step of a small model, else its middle.

    The middle is where the last eight units run forward and then backward.
    """
    figure = Figure(figsize=(16, 7), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(1, 3))
    draw_memory([step], above)
    ends = [end for lane, name, _, end in step.spans if lane == "compute"]
    turn, events, shown = len(step.model.units), step.events(), "milliseconds, predicted"
    if turn > 8:
        first, last = ends[turn - 9], ends[turn + 8]
        events = [event for event in events if event.start < last and event.end > first]
        shown += f"; the end of forward and the start of backward, of {step.seconds:.3g} s in all"
    plot_timeline(events, below)
    below.set_xlabel(shown, fontsize=FONT)
    name = f"{step.model.name} on {step.plan.ranks:,} x {step.cluster.gpu.name}"
    figure.suptitle(f"{name}: {step.seconds:.3g} s, {step.tflops:,.0f} TFLOP/s per GPU, predicted", fontsize=FONT + 2)
    return figure
