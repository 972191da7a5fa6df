"""Where the numbers of a format lie, how far apart they are, and where rounding takes the others.

The numbers come as plain floats: this file knows no format.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from minizero.pictures.bits import NORMAL, SUBNORMAL, power
from minizero.pictures.style import COLORS, FONT, MIB, Look, draw_bars, draw_lines, label_axes, new_axes, note


def draw_bytes(held: Mapping[str, int]) -> Axes:
    """A bar of MiB for each name: bytes of parameters."""
    axes = new_axes(12, 0.8 * len(held) + 1.2)
    sizes = {name: count / MIB for name, count in held.items()}
    draw_bars(axes, sizes, [f"{size:.0f} MiB" for size in sizes.values()], color=COLORS["parameters"])
    label_axes(axes, "MiB", "")
    axes.margins(x=0.12)
    return axes


def draw_number_line(rows: Mapping[str, tuple[Sequence[float], Sequence[float], float]]) -> list[Axes]:
    """For each title, its (normal numbers, subnormal numbers and zero, end of the axis) as lines on an axis from 0 on.

    The ground changes its shade at each power of two. Subnormal numbers are shorter, thicker and coloured.
    """
    panels = new_axes(15, 2.1 * len(rows), len(rows), 1)
    for axes, (title, (normal, subnormal, end)) in zip(panels, rows.items()):
        for exponent in range(round(math.log2(min(normal))), math.ceil(math.log2(end))):
            shade = "#E4E4E4" if exponent % 2 else "#F3F3F3"
            axes.axvspan(2.0**exponent, min(2.0 ** (exponent + 1), end), color=shade, linewidth=0)
        axes.vlines([x for x in normal if x <= end], -0.35, 0.35, color="black", linewidth=2.5)
        axes.vlines(subnormal, -0.22, 0.22, color=SUBNORMAL, linewidth=6)
        axes.set_yticks([0], [title])
        label_axes(axes, "", "", xlim=(-end / 100, end), ylim=(-0.5, 0.5))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    panels[-1].set_xlabel("value", fontsize=FONT)
    return list(panels)


def draw_spacing(numbers: Sequence[float], mark: float, turn: float) -> Axes:
    """The distance from each number to the next, both axes by powers of two.

    numbers: positive, ascending. mark: a number whose step is named. turn: below it the steps stay as they are.
    """
    values = np.asarray(numbers)
    steps = np.diff(values)
    axes = new_axes(13, 5)
    below = values[:-1] < turn
    axes.step(values[:-1][~below], steps[~below], where="post", color=NORMAL, linewidth=3)
    axes.plot([*values[:-1][below], turn], [*steps[below], steps[below][-1]], color=SUBNORMAL, linewidth=5)
    step = steps[values[:-1] == mark][0]
    axes.plot(mark, step, "o", color="black", markersize=12)
    axes.annotate(f"{mark:g}: the next number\nis {step:g} away", (mark, step), (mark / 2**11, step), fontsize=FONT)
    axes.annotate(f"below {power(round(math.log2(turn)))} the steps\nstay equal (section 5)", (turn, steps[0]),
                  (turn / 2**9, steps[0] * 2**5), fontsize=FONT, color=SUBNORMAL)  # fmt: skip
    ticks = {2.0**exponent: power(exponent) for exponent in range(-24, 17, 4)}
    label_axes(axes, "number", "distance to the next", log="xy", at=ticks)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(2.0**-26, 2.0**8)
    return axes


def draw_rounding(
    x: Sequence[float], rounded: Mapping[str, Sequence[float]], ties: Mapping[str, Mapping[float, float]],
    names: Mapping[float, str],
) -> list[Axes]:  # fmt: skip
    """A staircase for each way to round: where each x goes. ties: where the middles go, as large dots.

    names: what stands at the y axis, by number of the format.
    """
    panels = new_axes(15, 4.6, 1, len(rounded), sharey=True)
    for axes, (name, values) in zip(panels, rounded.items()):
        outside = [at not in ties[name] for at in x]
        steps = np.where(outside, values, np.nan)
        for number in names:
            axes.plot(x, np.where(np.asarray(steps) == number, number, np.nan), color="black", linewidth=4)
        axes.plot(x, x, color="#BBBBBB", linewidth=2, linestyle="dashed")
        axes.plot(ties[name].keys(), ties[name].values(), "o", color="black", markersize=13)
        axes.set_title(name, fontsize=FONT + 2)
        axes.set_yticks(list(names), list(names.values()))
        axes.grid(axis="y", color="#DDDDDD")
        whole = {place: str(place) for place in range(math.ceil(min(x)), math.floor(max(x)) + 1)}
        label_axes(axes, "exact result", "", FONT - 2, at=whole)
    panels[0].set_ylabel("rounded to FP16", fontsize=FONT)
    return list(panels)


def draw_sums(exact: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Axes:
    """Sums of ones against how many were added: the exact ones dotted, on one or two others, whose last is named."""
    axes = new_axes(12, 4.4)
    look: Look = {"color": "black", "linestyle": "dotted", "linewidth": 1.5, "zorder": 3}
    looks = [look, {"color": "#CC79A7", "linewidth": 8}, {"color": "#D55E00"}]
    draw_lines(axes, range(1, len(exact) + 1), {"exact": exact, **curves}, looks)
    for values in curves.values():
        note(axes, f"{values[-1]:g}", (len(exact), values[-1]), (8, -6))
    label_axes(axes, "how many ones were added", "sum", legend="best")
    return axes


def draw_blocks(rows: Mapping[str, tuple[Sequence[float], Sequence[float], float]]) -> list[Axes]:
    """For each title numbers in their order, and what they are in a format. The axis ends at the third, on both sides.

    What lies beyond stands at the edge, with its value. What has become 0 is a cross.
    """
    panels = new_axes(15, 3 * len(rows), len(rows), 1)
    for axes, (title, (numbers, rounded, end)) in zip(panels, rows.items()):
        axes.axhline(0, color="black", linewidth=1)
        axes.plot(numbers, "o", color="white", markeredgecolor="black", markersize=14, label="the number")
        lost = np.equal(rounded, 0) & np.not_equal(numbers, 0)
        axes.plot(np.where(lost, np.nan, rounded), "o", color=NORMAL, markersize=9, label="in the format")
        zeros = np.where(lost, 0, np.nan)
        axes.plot(zeros, "x", color="#D55E00", markersize=11, markeredgewidth=3, label="became 0")
        for place, number in enumerate(numbers):
            if abs(number) > end:
                axes.annotate(f"{number:.0f} ↑", (place, end), ha="center", va="top", fontsize=FONT)
        label_axes(axes, "", "", xlim=(-0.7, len(numbers) - 0.3), ylim=(-end, end))
        axes.set_title(title, fontsize=FONT, loc="left")
    panels[0].legend(fontsize=FONT, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    panels[-1].set_xlabel("which of the 32 numbers", fontsize=FONT)
    return list(panels)
