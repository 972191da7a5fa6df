"""The table and the pictures of the main job, drawn from plain data.

Everything here reads one dictionary, `results`, which is also what results.json holds, so that
`python -m minizero.report results.json` shows a run again without running it:

    machine        cpu, cores, python, torch, device
    config         the options of the run
    world_size, n_parameters
    runs           one for each stage: stage, name, losses, step_seconds (median of the steps that no ledger
                   watched; None where there are none), bytes_sent (in the last step), bytes_sent_formula,
                   ranks (persistent and peak bytes by category), predicted (persistent bytes per rank),
                   curve (rank 0 during one training step: phase, and bytes by category)

Measured and predicted never share a column or a colour. One MiB is 2^20 bytes.
"""

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from rich import box
from rich.console import Console
from rich.table import Table

Results = dict[str, Any]
Look = dict[str, Any]  # matplotlib's keywords

# Okabe and Ito's tones for the three states that ZeRO shards, neutral shades for all else.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#F0E442",
    "optimizer": "#009E73",
    "activations": "#8A8A8A",
    "temporary": "#C4C4C4",
    "communication": "#4D4D4D",
}
OTHER = "#A08C72"
PREDICTED: Look = {"color": "#D55E00", "linestyle": "dashed", "linewidth": 2.5}
# By stage. The widths fall, so that curves that coincide show beside each other.
LINE_STYLES: dict[int, Look] = {
    0: {"color": "#C4C4C4", "linestyle": "solid", "linewidth": 18, "solid_capstyle": "butt"},
    1: {"color": "#CC79A7", "linestyle": (0, (2, 0.4)), "linewidth": 10},
    2: {"color": "#5E2750", "linestyle": "dashdot", "linewidth": 5},
    3: {"color": "#000000", "linestyle": "dotted", "linewidth": 2, "marker": "o"},
}
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
MIB = 2**20
FONT = 16


def print_table(results: Results, console: Console) -> None:
    """Prints the run's machine and sizes, then three tables that fit 80 columns."""
    runs, machine = results["runs"], results["machine"]
    versions = f"Python {machine['python']}, torch {machine['torch']}, device {machine['device']}"
    options = ", ".join(f"{name} {value}" for name, value in results["config"].items())
    console.print(f"{machine['cpu']} ({machine['cores']} cores), {versions}", markup=False, highlight=False)
    console.print(f"{_size(results)}: {options}\n", markup=False, highlight=False)

    console.print("Persistent MiB per rank, between steps (largest rank)", style="italic")
    table = Table("category", "stage", box=box.SIMPLE_HEAD)
    table.add_column("measured", justify="right", style="bold")
    table.add_column("predicted", justify="right", style=PREDICTED["color"])
    held = [run["predicted"] for run in runs] + [rank["persistent"] for run in runs for rank in run["ranks"]]
    for category in [*_categories(held), "total"]:
        for run in runs:
            predicted = _mib(run["predicted"].get(category, 0))
            table.add_row(category, run["name"], _largest(run, "persistent", category), predicted)
        table.add_section()
    console.print(table)

    console.print("Peak MiB per rank, measured (largest rank)", style="italic")
    table = Table("category", box=box.SIMPLE_HEAD)
    for run in runs:
        table.add_column(run["name"], justify="right", style="bold")
    for category in _categories(rank["peak"] for run in runs for rank in run["ranks"]):
        table.add_row(category, *(_largest(run, "peak", category) for run in runs))
    table.add_section()
    table.add_row("joint total", *(_largest(run, "peak", "total") for run in runs))
    console.print(table)
    console.print("The categories peak at different moments: they do not add up to the joint total.\n")

    console.print("One training step", style="italic")
    table = Table("stage", box=box.SIMPLE_HEAD)
    table.add_column("sent per rank,\nmeasured, MiB", justify="right", style="bold")
    table.add_column("sent per rank,\npredicted, MiB", justify="right", style=PREDICTED["color"])
    for heading in ("seconds,\nmeasured", "seconds\n/ DDP's", "final\nloss"):
        table.add_column(heading, justify="right", style="bold")
    for run in runs:
        sent = _mib(run["bytes_sent"]), _mib(run["bytes_sent_formula"])
        table.add_row(run["name"], *sent, *_seconds(run, runs[0]), f"{run['losses'][-1]:.6f}")
    console.print(table)
    console.print("Seconds: the median step here, where the ranks share the cores: no benchmark.")
    if any(run["step_seconds"] is None for run in runs):
        console.print("A dash: so few steps that a ledger watched, and slowed, each. Use more --steps.")
    if len(runs[0]["losses"]) == 1:
        console.print("The first step starts from fresh parameters: Zero1 and Zero2 send half as much.")


def draw_curves(results: Results) -> Figure:
    """Draws what rank 0 holds during one training step: a panel for each stage, all on one scale."""
    runs = results["runs"]
    peaks = [_peaks(run["curve"]) for run in runs]
    names = _categories(peaks)
    highest = max(one["total"] for one in [*peaks, *(run["predicted"] for run in runs)])
    figure, columns = Figure(figsize=(16, 9)), min(len(runs), 2)
    for panel, run in enumerate(runs, start=1):
        axes = figure.add_subplot(-(-len(runs) // columns), columns, panel)
        _draw_curve(axes, run["curve"], names)
        predicted = axes.axhline(run["predicted"]["total"] / MIB, **PREDICTED)
        predicted.set_path_effects([withStroke(linewidth=4.5, foreground="white")])
        axes.set_title(run["name"], fontsize=FONT + 3, fontweight="bold", pad=28)
        axes.set_ylim(0, 1.2 * highest / MIB)
    keys = [*_keys(names), Line2D([], [], label="predicted persistent", **PREDICTED)]
    return _finish(figure, f"Memory of rank 0 during one training step: {_size(results)}", keys)


def plot_curve(samples: Sequence[Any], axes: Axes | None = None) -> Axes:
    """Draws the curve of a `Ledger` on `axes`, by default on a new figure, which a notebook shows."""
    if axes is None:
        from matplotlib import pyplot  # notebooks show the figures that pyplot knows

        axes = pyplot.figure(figsize=(14, 6), layout="constrained").add_subplot()
    curve: Results = {name: [sample[name] for sample in samples] for name in samples[0]}
    names = _categories([_peaks(curve)])
    _draw_curve(axes, curve | {"phase": [sample.phase for sample in samples]}, names)
    axes.legend(handles=_keys(names), loc="upper left", bbox_to_anchor=(1, 1), fontsize=FONT, frameon=False)
    return axes


def draw_boxes(results: Results) -> Figure:
    """Draws the ZeRO paper's picture to scale: a column for each rank, a box for each state it keeps."""
    runs, size = results["runs"], results["world_size"]
    names = _categories(rank["persistent"] for run in runs for rank in run["ranks"])
    figure = Figure(figsize=(16, 9))
    axes = figure.subplots()
    for group, run in enumerate(runs):
        # A stage gets one unit of the x axis, and its ranks share 0.84 of that.
        centres = [group - 0.42 + 0.84 * (rank + 0.5) / size for rank in range(size)]
        below = np.zeros(size)
        for name in names:
            heights = np.array([rank["persistent"].get(name, 0) / MIB for rank in run["ranks"]])
            edge: Look = {"edgecolor": "black", "linewidth": min(1, 8 / size)}
            axes.bar(centres, heights, 0.75 / size, below, label=name, color=COLORS.get(name, OTHER), **edge)
            below += heights
        totals = [rank["persistent"]["total"] for rank in run["ranks"]]
        text = " to ".join(dict.fromkeys(_mib(end) for end in (min(totals), max(totals))))
        _write_above(axes, f"{text} MiB\nper rank", (group, max(totals) / MIB))
    axes.set_xticks(range(len(runs)), [run["name"] for run in runs], fontweight="bold")
    _label(axes, "stage (one column per rank)", "persistent memory (MiB)")
    axes.set(xlim=(-0.5, len(runs) - 0.5), ymargin=0.15)
    return _finish(figure, f"Persistent memory of each rank: {_size(results)}", _keys(names))


def draw_losses(results: Results) -> Figure:
    """Draws the stages' losses over each other, and says by how much they differ at most."""
    losses = [run["losses"] for run in results["runs"]]
    figure = Figure(figsize=(16, 9))
    axes = figure.subplots()
    marks: Look = {"markersize": 11, "markerfacecolor": "white", "markevery": max(1, len(losses[0]) // 20)}
    for run in results["runs"]:
        axes.plot(
            range(1, len(run["losses"]) + 1), run["losses"], label=run["name"], **LINE_STYLES[run["stage"]], **marks
        )
    axes.locator_params(axis="x", integer=True)
    _label(axes, "training step", "loss (nats per token)")
    title = f"Training loss, mean over ranks: {_size(results)}"
    if len(losses) > 1:
        difference = np.ptp(list(zip(*losses)), axis=1).max()
        title += f"\nlargest difference between stages: {difference:.3g}"
    return _finish(figure, title, list(axes.lines), key_length=5)


def save(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes results.json, curves.png, boxes.png and losses.png into `folder`, which it creates.

    Raises OSError where that fails; each file is then whole, as it was before, or absent.
    """
    return _write({"results.json": json.dumps(results).encode(), **_pictures(results)}, Path(folder))


def _pictures(results: Results) -> dict[str, bytes]:
    pictures = {}
    for name, draw in {"curves.png": draw_curves, "boxes.png": draw_boxes, "losses.png": draw_losses}.items():
        draw(results).savefig(buffer := io.BytesIO(), format="png", dpi=120)
        pictures[name] = buffer.getvalue()
    return pictures


def _write(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Writes all files beside their places first: a full disk must not leave half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as beside:
        for name, content in files.items():
            Path(beside, name).write_bytes(content)
        for name in files:
            os.replace(Path(beside, name), folder / name)
    return [folder / name for name in files]


def _categories(found: Iterable[Mapping[str, int]]) -> list[str]:
    """The categories worth a row or a box: the known ones in the order of COLORS, then any others."""
    # Less than a thousandth of the total (a loss, a batch) could be neither read nor seen.
    names = {name for one in found for name, held in one.items() if held > one["total"] / 1000} - {"total"}
    return [*(name for name in COLORS if name in names), *sorted(names - COLORS.keys())]


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f}"


def _seconds(run: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[str, str]:
    """A run's seconds per step, and their ratio to DDP's; a dash for what was not measured."""
    mine, ddp = run["step_seconds"], first["step_seconds"] if first["stage"] == 0 else None
    return f"{mine:.3f}" if mine else "-", f"{mine / ddp:.2f}" if mine and ddp else "-"


def _largest(run: Mapping[str, Any], kind: str, category: str) -> str:
    return _mib(max(rank[kind].get(category, 0) for rank in run["ranks"]))


def _size(results: Results) -> str:
    return f"{results['n_parameters']:,} parameters, world size {results['world_size']}"


def _keys(names: Iterable[str]) -> list[Any]:
    return [Patch(label=name, color=COLORS.get(name, OTHER)) for name in names]


def _peaks(curve: Mapping[str, list[Any]]) -> dict[str, int]:
    return {name: max(held) for name, held in curve.items() if name != "phase"}


def _draw_curve(axes: Axes, curve: Mapping[str, list[Any]], names: list[str]) -> None:
    """Draws one curve, stacked by category, with its phases and its peak."""
    length, peak = len(curve["total"]), max(curve["total"])
    layers = [[held / MIB for held in curve.get(name, [0] * length)] for name in names]
    colors = [COLORS.get(name, OTHER) for name in names]
    axes.stackplot(range(length), layers, step="post", colors=colors, linewidth=0)
    _mark_phases(axes, curve["phase"])
    when = curve["total"].index(peak)
    axes.plot(when, peak / MIB, "o", color="black", markersize=8, zorder=4)
    side = "left" if when < length / 3 else "right" if when > length * 0.6 else "center"
    _write_above(axes, f"peak {_mib(peak)} MiB", (when, peak / MIB), side)
    _label(axes, "allocations and frees, in order", "memory (MiB)")
    axes.set(xlim=(0, length), ylim=(0, 1.2 * peak / MIB))


def _mark_phases(axes: Axes, phases: list[str]) -> None:
    """Draws a line where a phase starts and ends, and names it above the panel."""
    across = axes.get_xaxis_transform()
    for phase in sorted(PHASES.keys() & set(phases)):
        start, end = phases.index(phase), len(phases) - phases[::-1].index(phase)
        # The last phase is often too narrow for its name, which then ends where the phase ends.
        place, side = (end, "right") if start > len(phases) * 0.6 else (start, "left")
        axes.text(place, 1.02, PHASES[phase], ha=side, fontsize=FONT, transform=across)
        axes.vlines([start, end], 0, 1, color="black", linewidth=1.2, transform=across)


def _write_above(axes: Axes, text: str, place: tuple[float, float], side: str = "center") -> None:
    words = axes.annotate(text, place, (0, 9), textcoords="offset points", ha=side, fontsize=FONT + 1)
    words.set(fontweight="bold", path_effects=[withStroke(linewidth=5, foreground="white")])


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, title: str, keys: Sequence[Any], key_length: float = 1.5) -> Figure:
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
    figure.suptitle(title, fontsize=FONT + 4)
    look: Look = {"handlelength": key_length, "handletextpad": 0.5, "columnspacing": 1.2, "frameon": False}
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 7), fontsize=FONT, **look)
    return figure


def main() -> None:
    """Shows a saved run again: prints its tables, and draws its pictures beside it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m minizero.report results.json")
    results = json.loads(Path(sys.argv[1]).read_text())
    print_table(results, Console())
    _write(_pictures(results), Path(sys.argv[1]).parent)


if __name__ == "__main__":
    main()
