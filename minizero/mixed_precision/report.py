"""The table and the picture of `table1`, drawn from plain data.

Everything here reads one dictionary, `results`. It is also what table1.json holds:

    rows       one for each network: network, unit, published (baseline and mixed, or None), baseline and mixed
               (one measurement for each seed), activations (bytes: baseline, mixed)
    memory     network, batch_sizes, baseline and mixed (peak bytes of a step), crossover (a batch size, or None)
    plan, machine, short, processes, seconds

Baseline is FP32. Measured and published never share a column or a colour: the published networks are larger, and saw
other images.
"""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from minizero.cli import write_files
from minizero.pictures.mixed import GREY, PINK, plot_peaks
from minizero.pictures.style import FONT, MIB, Look, label_axes

Row = Mapping[str, Any]
COMMITTED = Path(__file__).parents[2] / "notebooks" / "results" / "table1" / "table1.json"

BASELINE: dict[str, Any] = {"color": GREY, "label": "FP32"}
MIXED: dict[str, Any] = {"color": PINK, "label": "mixed precision"}
PUBLISHED: dict[str, Any] = {"color": "white", "edgecolor": "black", "marker": "D", "label": "published (ImageNet)"}


def difference(row: Row) -> float:
    """How much the mixed runs differ from the baseline on average."""
    return mean(row["mixed"]) - mean(row["baseline"])


def seed_noise(row: Row) -> float | None:
    """The standard deviation from seed to seed, of both kinds of runs together; None for a single seed."""
    if len(row["baseline"]) < 2:
        return None
    return math.sqrt((stdev(row["baseline"]) ** 2 + stdev(row["mixed"]) ** 2) / 2)


def saved(row: Row) -> float:
    """The activations' bytes in mixed precision, as a fraction of those in FP32."""
    return row["activations"]["mixed"] / row["activations"]["baseline"]


def print_table(results: Mapping[str, Any], console: Console) -> None:
    """Prints two tables that fit 80 columns, and the machine that they were measured on."""
    plan, machine = results["plan"], results["machine"]
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    console.print(f"{machine['cpu']} ({machine['cores']} cores), {versions}", markup=False, highlight=False)
    if results["short"]:
        console.print("Shortened: so few steps and seeds show how it works, not what it is worth.", style="bold")
    seeds = f"{plan['seeds']} seeds: mean ± standard deviation" if plan["seeds"] > 1 else "1 seed"
    console.print(f"\nTest accuracy after {plan['steps']} steps, {seeds}", style="italic", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("network", no_wrap=True)
    table.add_column("published\nFP32, mixed", justify="right", style="dim", no_wrap=True)
    for heading in ("measured\nFP32", "measured\nmixed", "mixed\n- FP32", "seed\nnoise"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results["rows"]:
        published = ", ".join(f"{value:.2f}" for value in row["published"] or [])
        digits, noise = 2 if row["unit"] == "%" else 3, seed_noise(row)
        cells = [_mean_and_deviation(row[kind], digits) for kind in ("baseline", "mixed")]
        cells += [f"{difference(row):+.{digits}f}", "-" if noise is None else f"{noise:.{digits}f}"]
        table.add_row(row["network"], published, *cells)
    console.print(table)
    console.print("In percent; gpt: bits per byte of unseen text. Published: the original networks on ImageNet.")

    console.print("\nActivations kept from forward to backward, measured", style="italic")
    table = Table("network", box=box.SIMPLE_HEAD)
    for heading in ("FP32\nMiB", "mixed\nMiB", "mixed\n/ FP32"):
        table.add_column(heading, justify="right")
    for row in results["rows"]:
        held = [f"{row['activations'][kind] / MIB:.2f}" for kind in ("baseline", "mixed")]
        table.add_row(row["network"], *held, f"{saved(row):.3f}")
    console.print(table)
    memory = results["memory"]
    where = "at none of" if memory["crossover"] is None else f"from {memory['crossover']:.1f} images on, of"
    sizes = f"{memory['batch_sizes'][0]} to {memory['batch_sizes'][-1]}"
    console.print(
        f"{memory['network']}: the peak of all memory is lower in mixed precision {where} batches of {sizes}."
    )
    console.print(f"{results['seconds']:.0f} s in {results['processes']} processes", highlight=False)


def draw(results: Mapping[str, Any]) -> Figure:
    """Draws the differences beside the seed noise, the activations, and the peak against the batch size."""
    figure = Figure(figsize=(16, 10), layout="constrained")
    axes = figure.subplot_mosaic([["differences", "activations"], ["peak", "peak"]])
    _draw_differences(axes["differences"], [row for row in results["rows"] if row["unit"] == "%"])
    _draw_activations(axes["activations"], results["rows"])
    memory, peak, plan = results["memory"], axes["peak"], results["plan"]
    held = {"FP32": memory["baseline"], "mixed precision": memory["mixed"]}
    plot_peaks(memory["batch_sizes"], held, peak)
    peak.set_title(f"Peak of all memory in a training step with Adam: {memory['network']}", fontsize=FONT + 1)
    if memory["crossover"] is not None:
        words = f" crossover at {memory['crossover']:.1f} images:\n before it masters cost more\n than activations save"
        peak.axvline(memory["crossover"], color="black", linestyle="dotted")
        peak.text(memory["crossover"], 0.97, words, va="top", fontsize=FONT, transform=peak.get_xaxis_transform())
    words = f"{plan['seeds']} seed{'s' * (plan['seeds'] > 1)}, {plan['steps']} steps"
    figure.suptitle(f"Mixed precision (FP16, FP32 masters) against FP32: {words}", fontsize=FONT + 4)
    return figure


def _draw_differences(ax: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        noise = seed_noise(row)
        if noise is not None:
            ax.bar(place, 2 * noise, bottom=-noise, width=0.6, color="#E4E4E4", label="± seed noise (FP32 and mixed)")
        each = [mixed - baseline for baseline, mixed in zip(row["baseline"], row["mixed"])]
        ax.scatter([place] * len(each), each, color=MIXED["color"], alpha=0.5, label="one seed")
        ax.hlines(difference(row), place - 0.3, place + 0.3, color=MIXED["color"], linewidth=4, label="measured mean")
        if row["published"]:
            published = row["published"][1] - row["published"][0]
            ax.scatter(place + 0.15, published, s=70, zorder=3, **PUBLISHED)
    ax.axhline(0, color="black", linewidth=1)
    label_axes(ax, "", "percentage points", FONT - 3, at=_names(rows), title="Accuracy: mixed precision less FP32")
    handles, labels = ax.get_legend_handles_labels()
    low, high = ax.dataLim.intervaly
    ax.set_ylim(low - 0.1 * (high - low), high + 0.4 * (high - low))  # room for the legend
    ax.legend(*zip(*dict(zip(labels, zip(handles, labels))).values()), fontsize=FONT - 4, frameon=False, ncols=2)


def _draw_activations(ax: Axes, rows: Sequence[Row]) -> None:
    for shift, kind, look in ((-0.2, "baseline", BASELINE), (0.2, "mixed", MIXED)):
        ax.bar([i + shift for i in range(len(rows))], [row["activations"][kind] / MIB for row in rows], 0.4, **look)
    for place, row in enumerate(rows):
        height = row["activations"]["mixed"] / MIB
        ax.text(place + 0.2, height, f"{saved(row):.2f}", ha="center", va="bottom", fontsize=FONT - 3)
    rest: Look = {"title": "Activations kept for backward", "legend": "upper left"}
    label_axes(ax, "", "memory (MiB)", FONT - 3, at=_names(rows), **rest)


def _names(rows: Sequence[Row]) -> dict[float, str]:
    return {place: row["network"].replace("_", "\n") for place, row in enumerate(rows)}


def save(results: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Writes table1.json and table1.png into `folder`, which it makes if needed. Returns their paths."""
    draw(results).savefig(picture := io.BytesIO(), format="png", dpi=100)
    data = (json.dumps(results, indent=1) + "\n").encode()
    return write_files({"table1.json": data, "table1.png": picture.getvalue()}, Path(folder))


def _mean_and_deviation(values: Sequence[float], digits: int) -> str:
    words = f"{mean(values):.{digits}f}"
    return f"{words} ± {stdev(values):.{digits}f}" if len(values) > 1 else words
