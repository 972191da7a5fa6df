"""What ranks send, and how long it takes: bytes beside their lower bound, seconds beside α + n/β."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from minizero.pictures.style import COLORS, FONT, PREDICTED, Look, draw_lines, label_axes, new_axes, note

# By their order in a picture.
WAYS: list[Look] = [
    {"color": "#CC79A7", "linestyle": "dashed", "linewidth": 3, "marker": "s"},
    {"color": "#0072B2", "linestyle": "dashdot", "linewidth": 3, "marker": "^"},
    {"color": "#000000", "linestyle": "solid", "linewidth": 3, "marker": "o"},
]
BEST: Look = {"color": "#E69F00", "linestyle": "dotted", "linewidth": 5}  # lies on two of the others, by turns
SIZES = {0: "bytes", 10: "KiB", 20: "MiB", 30: "GiB"}


def draw_busiest(loads: Mapping[str, Mapping[int, float]]) -> Axes:
    """Draws what the busiest rank sends. loads: {way: {ranks: tensors sent}}, at most three ways."""
    axes = new_axes(10, 4.8)
    for (name, load), look, wider in zip(loads.items(), WAYS, (6, 0, 0)):  # two may coincide: then both show
        line: Look = {**look, "linewidth": look["linewidth"] + wider, "markersize": 11 + 2 * wider}
        axes.plot(list(load), list(load.values()), label=name, **line)
        last, sent = max(load.items())
        note(axes, f"{sent:.3g}", (last, sent), (14, -5))
    sizes = sorted({size for load in loads.values() for size in load})
    label_axes(axes, "ranks N", "sent by the busiest rank (tensors)", at=sizes, ylim=(0, None), legend="best")
    return axes


def draw_bound(sent: Mapping[int, tuple[float, float]]) -> Axes:
    """Draws both halves of an all-reduce, on each other, and the bound 2(N-1)/N.

    sent: {N: (tensors that a rank sends in a reduce-scatter, in an all-gather)}.
    """
    axes = new_axes(11.5, 5.2)
    sizes, halves = list(sent), np.array(list(sent.values()))
    places = range(len(sizes))
    look: Look = {"width": 0.6, "edgecolor": "black"}
    axes.bar(places, halves[:, 0], color=COLORS["gradients"], label="reduce-scatter, measured", **look)
    blue = COLORS["parameters"]
    axes.bar(places, halves[:, 1], bottom=halves[:, 0], color=blue, hatch="//", label="all-gather, measured", **look)
    for place, size in enumerate(sizes):
        bound = 2 * (size - 1) / size
        line: Look = {**PREDICTED, "linestyle": "solid", "linewidth": 4}
        line["label"] = None if place else "the bound 2(N − 1)/N"
        axes.plot([place - 0.42, place + 0.42], [bound] * 2, **line)
        axes.text(place, bound + 0.06, f"{bound:.3g}", ha="center", fontsize=FONT)
    axes.axhline(2, color=COLORS["communication"], linestyle="dotted", linewidth=2)
    axes.text(-0.55, 2.04, "2", ha="left", fontsize=FONT)
    at = {place: str(size) for place, size in enumerate(sizes)}
    legend: Look = {"ncols": 3, "loc": "upper center", "columnspacing": 1.2, "handlelength": 1.4}
    label_axes(axes, "ranks N", "sent by each rank (tensors)", at=at, ylim=(0, 2.75), legend=legend)
    return axes


def draw_message_times(measured: Mapping[str, Mapping[int, float]], fitted: Mapping[str, tuple[float, float]]) -> Axes:
    """Draws points and the line α + n/β that was fitted to them, on logarithmic axes.

    measured: {name: {bytes: seconds}}; fitted: {name: (α in seconds, β in bytes a second)}.
    """
    axes = new_axes(10, 5.4)
    for (name, found), look in zip(measured.items(), WAYS[::-1]):
        alpha, beta = fitted[name]
        grid = np.geomspace(min(found), max(found))
        point: Look = {"color": look["color"], "marker": look["marker"], "linestyle": "none", "markersize": 12}
        axes.plot(list(found), [1e3 * t for t in found.values()], label=f"{name}: measured", **point)
        axes.plot(grid, 1e3 * (alpha + grid / beta), label=f"{name}: fitted", **{**look, "marker": ""})
    sizes = sorted({size for found in measured.values() for size in found})
    label_axes(axes, "n, the size of a message", "time (milliseconds)", **_by_powers(axes, sizes))
    return axes


def draw_predicted_times(
    sizes: Sequence[float], predicted: Mapping[str, Sequence[float]], marked: Mapping[float, str]
) -> Axes:
    """Draws predicted seconds over the size of a tensor, both logarithmic, at most four ways.

    sizes: in bytes; marked: {bytes: words}, drawn as vertical lines.
    """
    axes = new_axes(10, 5.4)
    draw_lines(axes, sizes, predicted, [*({**look, "marker": ""} for look in WAYS), BEST])
    powers = _by_powers(axes, [2**k for k in range(0, 64, 5) if sizes[0] <= 2**k <= sizes[-1]])
    for size, words in marked.items():
        axes.axvline(size, color=COLORS["communication"], linestyle="dotted", linewidth=2)
        note(axes, words, (size, powers["ylim"][1]), (-6, -12), "right")
    label_axes(axes, "size of the tensor", "predicted time (seconds)", **powers)
    return axes


def size_in_words(nbytes: int) -> str:
    """A whole number of bytes, KiB, MiB or GiB."""
    unit = max(unit for unit in SIZES if nbytes >= 2**unit)
    return f"{nbytes / 2**unit:g} {SIZES[unit]}"


def _by_powers(axes: Axes, sizes: Sequence[int]) -> Look:
    """For `label_axes`: sizes in words, and 0.1, 1 and 10 in place of powers. The y axis begins and ends at one."""
    drawn = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines])
    decades = [10.0**k for k in range(math.floor(math.log10(drawn.min())), math.ceil(math.log10(drawn.max())) + 1)]
    at: Look = {"log": "xy", "at": {size: size_in_words(size) for size in sizes}, "legend": "best"}
    return at | {
        "yticks": decades,
        "yticklabels": [f"{each:,g}" for each in decades],
        "ylim": (decades[0], decades[-1]),
    }
