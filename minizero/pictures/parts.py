"""What is held at one moment, as bars of stacked parts; and whole steps, each beside the bar of its peak.

The parts of a bar are those of one moment, so they add up to its height. The largest of each part, wherever it comes
in the step, would add up to more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from minizero.pictures.memory import plot_curve, shown_categories
from minizero.pictures.style import COLORS, FONT, MIB, OTHER, Look, keys, label_axes, new_axes, note

Held = Mapping[str, float]  # bytes by category; `total` beside them, or not
Unit = tuple[float, str]  # bytes, and what the axis then counts: "memory (MiB)"
NAMES = {"optimizer": "optimizer states"}  # in the legend: a phase of the step is called "optimizer", too


def draw_parts(
    bars: Mapping[str, Held],
    axes: Axes | None = None,
    *,
    unit: Unit = (MIB, "memory (MiB)"),
    limit: float | None = None,
    limit_name: str = "",
    digits: int = 1,
    smallest: float = 0.06,
) -> Axes:
    """Draws a bar for each name, stacked by category, with the number of each part in it and the sum above it.

    bars: bytes by category, of one moment each. unit: what the axis counts. limit: bytes; a line across all bars.
    smallest: a part has a number from this share of the highest bar on; a high figure has room for less.
    """
    axes = axes or new_axes(11, 5.5)
    names = shown_categories([_with_total(held) for held in bars.values()])
    highest = max([limit or 0, *(_with_total(held)["total"] for held in bars.values())]) / unit[0]
    for place, held in enumerate(bars.values()):
        _stack(axes, place, held, names, unit[0], highest, digits, smallest=smallest)
    ends: Look = {"xlim": (-0.5, len(bars) - 0.5), "ylim": (0, 1.15 * highest)}
    label_axes(axes, "", unit[1], at=dict(enumerate(bars)), **ends)
    axes.locator_params(axis="y", integer=True)
    if limit is not None:
        axes.axhline(limit / unit[0], color="black", linestyle="dashed", linewidth=2.5)
        note(axes, limit_name, (-0.47, limit / unit[0]), (0, 5))
    # From top to bottom, the legend's names stand in the bars' order.
    colors = {NAMES.get(name, name): COLORS.get(name, OTHER) for name in reversed(names)}
    keys(axes, colors, loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def draw_steps(steps: Mapping[str, Sequence[Any]]) -> list[Axes]:
    """Draws the curve of each step, and beside them a bar for each, its peak by parts; all on one scale.

    steps: the samples of a `Ledger`, as `plot_curve` takes them. A dotted line leads from a peak to its bar.
    """
    widths = [5.0] * len(steps) + [1.1 * len(steps)]
    panels = new_axes(16, 6, 1, len(widths), sharey=True, width_ratios=widths)
    peaks = {name: max(samples, key=lambda sample: sample["total"]) for name, samples in steps.items()}
    draw_parts(peaks, panels[-1])
    panels[0].figure.draw_without_rendering()  # lays them out: a name of a phase is placed by its room
    for axes, (name, samples) in zip(panels, steps.items()):
        plot_curve(samples, axes)
        if (legend := axes.get_legend()) is not None:
            legend.remove()  # the one beside the bars is for all
        (dot,) = axes.lines
        ((when,), (peak,)) = dot.get_data()
        # A peak that lasts one operator is narrower than a pixel: here it is drawn as a needle.
        length = 1.03 * axes.get_xlim()[1]  # room for a peak at the very end
        axes.set_xlim(0, length)
        _stack(axes, when, peaks[name], list(peaks[name])[:-1], MIB, None, width=length / 100)
        (words,) = [text for text in axes.texts if text.get_text().startswith("peak")]
        words.set_text(f"peak {peak:.1f} MiB")  # with one decimal, as above its bar
        axes.hlines(peak, when, length, color="black", linestyle="dotted", linewidth=1.5)
        axes.set_xlabel("operators, one after the other (not time)", fontsize=FONT)
        axes.set_title(name, fontsize=FONT + 2, pad=28)
    panels[-1].set(ylabel="", ylim=(0, 1.2 * max(sample["total"] for sample in peaks.values()) / MIB))
    panels[-1].set_title("at the peak", fontsize=FONT + 2, pad=28)
    for axes in panels[1:-1]:
        axes.set_ylabel("")
    return list(panels)


def _stack(
    axes: Axes,
    place: float,
    held: Held,
    names: Sequence[str],
    unit: float,
    highest: float | None,
    digits: int = 1,
    width: float = 0.7,
    smallest: float = 0.06,
) -> None:
    """One bar. highest: the end of the axis in units, from which follows whether a number fits; None: no numbers."""
    below = 0.0
    for name in names:
        height = held.get(name, 0) / unit
        front = 3 if highest is None else 1  # a needle stands before the lines that part phases
        axes.bar(place, height, width, below, color=COLORS.get(name, OTHER), label=name, zorder=front)
        if highest is not None and height > smallest * highest:
            dark = name in ("parameters", "optimizer", "communication")
            look: Look = {"color": "white" if dark else "black", "fontsize": FONT - 1}
            axes.text(place, below + height / 2, f"{height:,.{digits}f}", ha="center", va="center", **look)
        below += height
    if highest is not None:
        look = {"fontsize": FONT + 1, "fontweight": "bold", "zorder": 5}
        look["path_effects"] = [withStroke(linewidth=5, foreground="white")]  # the line of a limit may cross it
        note(axes, f"{below:,.{digits}f}", (place, below), (0, 5), "center", **look)


def _with_total(held: Held) -> dict[str, Any]:
    """The parts, and their sum as `total`."""
    parts = {name: bytes_ for name, bytes_ in held.items() if name not in ("total", "host")}
    return parts | {"total": sum(parts.values())}
