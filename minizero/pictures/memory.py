"""The pictures of the main job and of a ledger, drawn from plain data. `report` says what `results` holds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from minizero.pictures.style import (
    COLORS,
    FONT,
    HOST,
    LINE_STYLES,
    MIB,
    OTHER,
    PREDICTED,
    Look,
    label_axes,
    new_axes,
    note,
    sheet,
)

Results = dict[str, Any]
UNITS = {"MiB": MIB, "GiB": 1024 * MIB}
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}


def draw_curves(results: Results) -> Figure:
    """Draws what rank 0 holds during one training step: a panel for each stage of ZeRO, all on one scale."""
    panels = [(run["name"], run["curve"], run["predicted"]["total"]) for run in results["runs"]]
    title = f"Memory of rank 0 during one training step: {describe_size(results)}"
    rim = [withStroke(linewidth=4.5, foreground="white")]
    return draw_panels(title, panels, {"label": "predicted persistent", **PREDICTED, "path_effects": rim})


def draw_panels(title: str, runs: Sequence[tuple[str, Mapping[str, list[Any]], float]], line: Look) -> Figure:
    """Draws a panel for each run, all on one scale.

    runs: name, curve, and the height of a line across it, in bytes. line: its look and label.
    """
    peaks = [_peaks(curve) for _, curve, _ in runs]
    names = shown_categories(peaks)
    highest = max(*(one["total"] for one in peaks), *(height for *_, height in runs))
    unit = "GiB" if highest >= UNITS["GiB"] else "MiB"
    longest = max(_length(curve) for _, curve, _ in runs)
    columns = min(len(runs), 2)
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(16, 1 + 4 * rows + 1.5 * (rows == 1)))
    for panel, (name, curve, height) in enumerate(runs, start=1):
        axes = figure.add_subplot(rows, columns, panel)
        _draw_curve(axes, curve, names, longest, unit)
        axes.axhline(height / UNITS[unit], **line)
        axes.set_title(name, fontsize=FONT + 3, fontweight="bold", pad=28)
        axes.set_ylim(0, 1.2 * highest / UNITS[unit])
        axes.set_xlim(0, longest)
    return _finish(figure, title, [*_keys(names), Line2D([], [], **line)])


def plot_curve(samples: Sequence[Any], axes: Axes | None = None, note: str = "") -> Axes:
    """Draws the curve of a `Ledger` on `axes`, by default on a new figure.

    note: a text below, such as what the ledger could not see.
    """
    axes = axes or new_axes(14, 6)
    curve: Results = {name: [sample[name] for sample in samples] for name in samples[0]}
    names = shown_categories([_peaks(curve)])
    curve["phase"] = [sample.phase for sample in samples]
    if hasattr(samples[0], "number"):
        curve["number"] = [sample.number for sample in samples]
    _draw_curve(axes, curve, names, unit="GiB" if max(curve["total"]) >= UNITS["GiB"] else "MiB")
    axes.set_xlabel("\n".join(filter(None, [axes.get_xlabel(), note])))
    axes.legend(handles=_keys(names), loc="upper left", bbox_to_anchor=(1, 1), fontsize=FONT, frameon=False)
    return axes


def mark_place(axes: Axes, place: float, before: str, after: str) -> None:
    """Draws a dotted line at `place`, and names what is on its left and on its right."""
    axes.axvline(place, color="black", linestyle="dotted", linewidth=2)
    for words, side, shift in ((before, "right", -8), (after, "left", 8)):
        at: Look = {"xycoords": axes.get_xaxis_transform(), "xytext": (shift, 0), "textcoords": "offset points"}
        axes.annotate(words, (place, 0.94), ha=side, fontsize=FONT, **at)


def draw_losses(results: Results) -> Figure:
    """Draws the stages' losses over each other, and says by how much they differ at most."""
    losses = [run["losses"] for run in results["runs"]]
    axes = sheet(16, 9)
    marks: Look = {"markersize": 11, "markerfacecolor": "white", "markevery": max(1, len(losses[0]) // 20)}
    for run in results["runs"]:
        first = run.get("steps_before", 0) + 1
        steps = range(first, first + len(run["losses"]))
        axes.plot(steps, run["losses"], label=run["name"], **LINE_STYLES[run["stage"]], **marks)
    axes.locator_params(axis="x", integer=True)
    label_axes(axes, "training step", "loss (nats per token)")
    title = f"Training loss, mean over ranks: {describe_size(results)}"
    if len(losses) > 1:
        difference = np.ptp(list(zip(*losses)), axis=1).max()
        title += f"\nlargest difference between stages: {difference:.3g}"
    return _finish(axes.figure, title, list(axes.lines), key_length=5)


def shown_categories(found: Iterable[Mapping[str, int]]) -> list[str]:
    """The categories large enough to show: the known ones in the order of COLORS, then any others."""
    # Less than a thousandth of the total (a loss, a batch) could not be seen.
    names = {name for one in found for name, held in one.items() if held > one["total"] / 1000} - {"total"}
    return [*(name for name in COLORS if name in names), *sorted(names - COLORS.keys())]


def describe_size(results: Results) -> str:
    """The parameters and the world size, in a title's words."""
    return f"{results['n_parameters']:,} parameters, world size {results['world_size']}"


def _keys(names: Iterable[str]) -> list[Any]:
    return [
        Line2D([], [], label="host (not the device's)", **HOST)
        if name == "host"
        else Patch(label=name, color=COLORS.get(name, OTHER))
        for name in names
    ]


def _peaks(curve: Mapping[str, list[Any]]) -> dict[str, int]:
    return {name: max(held) for name, held in curve.items() if name not in ("phase", "number")}


def _length(curve: Mapping[str, list[Any]]) -> int:
    """Where the x axis of a curve ends."""
    return int(_spread(curve.get("number", range(len(curve["total"]))))[-1]) + 1


def _draw_curve(
    axes: Axes, curve: Mapping[str, list[Any]], names: list[str], width: int | None = None, unit: str = "MiB"
) -> None:
    """Draws one curve, stacked by category, with its phases and its peak. The x axis counts operators if it can.

    width: where the x axis ends, by default with the curve. unit: of the y axis.
    """
    peak, each = max(curve["total"]), UNITS[unit]
    places = _spread(curve.get("number", range(len(curve["total"]))))
    stacked = [name for name in names if name != "host"]  # the total leaves the host out
    layers = [[held / each for held in curve.get(name, [0] * len(places))] for name in stacked]
    colors = [COLORS.get(name, OTHER) for name in stacked]
    axes.stackplot(places, layers, step="post", colors=colors, linewidth=0)
    length, width = _length(curve), width or _length(curve)
    highest = peak
    if "host" in names:
        axes.step(places, [held / each for held in curve["host"]], where="post", **HOST)
        highest = max(highest, *curve["host"])
    axes.set_xlim(0, width)
    _mark_phases(axes, curve["phase"], [*places, length])
    when = places[curve["total"].index(peak)]
    axes.plot(when, peak / each, "o", color="black", markersize=8, zorder=4)
    side = "left" if when < width / 3 else "right" if when > width * 0.6 else "center"
    look: Look = {"fontweight": "bold", "path_effects": [withStroke(linewidth=5, foreground="white")]}
    note(axes, f"peak {peak / each:,.2f} {unit}", (when, peak / each), (0, 9), side, fontsize=FONT + 1, **look)
    counted = "operators, in order" if "number" in curve else "allocations and frees, in order"
    label_axes(axes, counted, f"memory ({unit})")
    axes.set_ylim(0, 1.2 * highest / each)


def _spread(numbers: Sequence[int]) -> list[float]:
    """A place on the axis for each sample. Samples of one number share the space up to the next number."""
    count = Counter(numbers)
    first = {number: place for place, number in reversed(list(enumerate(numbers)))}
    return [number + (place - first[number]) / count[number] for place, number in enumerate(numbers)]


def _mark_phases(axes: Axes, phases: list[str], places: Sequence[float]) -> None:
    """Draws a line where a phase starts and ends, and names it above the panel.

    places: of each sample, and the end. A phase that comes again, with every micro-batch, is named once. A name that is
    wider than its phase stands beside it, and points at it.
    """
    across = axes.get_xaxis_transform()
    taken: list[tuple[float, float]] = []  # from where to where the names reach
    end_of_axis = axes.get_xlim()[1]
    letter = end_of_axis * 0.62 * FONT / 72 / (axes.get_window_extent().width / axes.figure.dpi)
    changes = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]] + [len(phases)]
    for phase, name in reversed(PHASES.items()):
        labels = []
        for start, end in [(places[i], places[j]) for i, j in pairwise(changes) if phases[i] == phase]:
            axes.vlines([start, end], 0, 1, color="black", linewidth=1.2, transform=across)
            width = letter * len(name)
            if width <= end - start:
                labels.append((start, start + width, "left", name))
                continue
            wide = letter * (len(name) + 2)
            beside = [(start - wide, start, "right", f"{name} ▸"), (end, end + wide, "left", f"◂ {name}")]
            labels += [label for label in beside if label[0] >= 0 and label[1] <= end_of_axis]
            labels.append((end - width, end, "right", name))
        # The first place that no other name takes, or the last at all.
        free = [label for label in labels if all(label[0] >= end or label[1] <= start for start, end in taken)]
        for left, right, side, words in (free + labels[-1:])[:1]:
            place, shift = (right, -4) if side == "right" else (left, 4)
            at: Look = {"xy": (place, 1.02), "xycoords": across, "xytext": (shift, 0), "textcoords": "offset points"}
            axes.annotate(words, ha=side, fontsize=FONT, **at)
            taken.append((left, right))


def _finish(figure: Figure, title: str, keys: Sequence[Any], key_length: float = 1.5) -> Figure:
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
    figure.suptitle(title, fontsize=FONT + 4)
    look: Look = {"handlelength": key_length, "handletextpad": 0.5, "columnspacing": 1.2, "frameon": False}
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 7), fontsize=FONT, **look)
    return figure
