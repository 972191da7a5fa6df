"""The pictures of mixed precision, drawn from plain data: losses, a loss scale, lost updates, sums, bytes.

FP32 is dark grey and mixed precision pink, as in Table 1's picture; parameters, gradients and optimizer states have
their colours of all other pictures.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, log2

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from minizero.pictures.style import COLORS, FONT, MIB, Look, box, draw_lines, label_axes, new_axes, note

GREY, PINK, ORANGE = "#4D4D4D", "#CC79A7", "#D55E00"
# One for each curve, in the order in which they are given. The wide ones come first, so that of equal ones both show.
RUNS: list[Look] = [
    {"color": GREY, "linewidth": 6, "alpha": 0.45},
    {"color": ORANGE, "linewidth": 3},
    {"color": "#E69F00", "linewidth": 7},
    {"color": "#000000", "linewidth": 2.5, "linestyle": "dashed"},
    {"color": PINK, "linewidth": 3.5},
    {"color": "#0072B2", "linewidth": 3, "linestyle": "dotted"},
]


def plot_runs(losses: Mapping[str, Sequence[float]], window: int = 10) -> Axes:
    """Draws the loss of up to six runs, each value the mean of the last `window` steps.

    A run that becomes NaN is drawn up to there, and a cross marks its end.
    """
    axes = new_axes(13, 6)
    for (name, values), look in zip(losses.items(), RUNS):
        finite = [value for value in values if isfinite(value)]
        parts = [finite[max(0, step + 1 - window) : step + 1] for step in range(len(finite))]
        means = [sum(part) / len(part) for part in parts]
        ends = len(finite) < len(values)
        axes.plot(means, label=None if ends else name, **look)
        if ends:  # the legend has the cross, since the line may be a single point
            cross: Look = {"color": look["color"], "markersize": 17, "markeredgecolor": "black", "zorder": 5}
            axes.plot(len(means) - 1, means[-1], "X", label=name, **cross)
            note(axes, f"NaN from step {len(means)} on", (len(means) - 1, means[-1]), (14, 16))
    place: Look = {"fontsize": FONT - 1, "loc": "upper left", "bbox_to_anchor": (1.01, 1), "handlelength": 3}
    low, high = 0.9 * axes.dataLim.y0, 1.1 * axes.dataLim.y1
    words = "training step, from 0", f"loss (mean of {window} steps)"
    label_axes(axes, *words, FONT - 2, ylim=(low, high), legend=place)
    return axes


def plot_scale(scales: Sequence[float], skipped: Sequence[int]) -> Axes:
    """Draws the loss scale of each step as a power of 2; crosses are the steps that were skipped."""
    axes = new_axes(12, 4.4)
    powers = [log2(scale) for scale in scales]
    axes.step(range(len(powers)), powers, where="post", color=PINK, linewidth=3.5)
    axes.plot(skipped, [powers[step] for step in skipped], "X", color="black", markersize=11, label="step skipped")
    low, high = int(min(powers)) - 1, int(max(powers)) + 2
    ticks = range(low, high + 1, 2)
    axes.set_yticks(list(ticks), [f"$2^{{{exponent}}}$" for exponent in ticks])
    place: Look = {"legend": {"loc": "upper right", "fontsize": FONT - 1}}
    label_axes(axes, "training step, from 0", "loss scale", FONT - 2, **place)
    return axes


def plot_lost(ratios: Sequence[float], lost: Mapping[str, Sequence[float]]) -> Axes:
    """Draws which share of updates is lost (0 to 1) against weight / update, a curve for each format."""
    axes = new_axes(11, 4.4)
    looks: list[Look] = [{"color": ORANGE, "linestyle": "dashed"}, {"color": COLORS["parameters"]}]
    draw_lines(axes, ratios, lost, [look | {"linewidth": 4} for look in looks], 1 / 100)
    for limit, side in ((256, "right"), (512, "left"), (2048, "right"), (4096, "left")):
        axes.axvline(limit, color="black", linewidth=1.2, linestyle="dotted")
        axes.text(limit, 50, f" {limit:,} ", ha=side, fontsize=FONT)
    ticks = [2**power for power in range(6, 14)]
    label_axes(axes, "weight / update", "updates lost (%)", FONT - 2, log="x", at=ticks, legend="upper left")
    return axes


def plot_sums(lengths: Sequence[int], errors: Mapping[str, Sequence[float]]) -> Axes:
    """Draws the relative error of sums against the number of terms, a curve for each way to add."""
    axes = new_axes(11, 5)
    looks = (ORANGE, "o", "solid"), ("#E69F00", "s", "dashed"), (GREY, "D", "dashdot")
    draw_lines(axes, lengths, errors, [dict(zip(("color", "marker", "linestyle"), look)) for look in looks])
    axes.set_xscale("log", base=2)
    place: Look = {"legend": {"fontsize": FONT - 1}, "yscale": "log"}
    label_axes(axes, "how many numbers from 0 to 1 are added", "relative error", FONT - 2, **place)
    return axes


def plot_bytes(columns: Mapping[str, Mapping[str, float]]) -> Axes:
    """Draws the bytes of one parameter as a column of boxes: {column: {"weight, FP16": bytes, …}}.

    The first word of a box decides its colour: weight, gradient, or else the optimizer's.
    """
    axes = new_axes(12, 6.5)
    colors = {"weight": COLORS["parameters"], "gradient": COLORS["gradients"]}
    for place, boxes in enumerate(columns.values()):
        below = 0.0
        for part, size in boxes.items():
            color = colors.get(part.split(",")[0].split()[0], COLORS["optimizer"])
            look: Look = {"ink": "black" if color == COLORS["gradients"] else "white", "size": FONT - 2}
            box(axes, place - 0.31, below, 0.62, size, color, f"{part}: {size:g}", linewidth=1.2, **look)
            below += size
        axes.text(place, below + 0.3, f"{below:g} bytes", ha="center", fontsize=FONT + 1, fontweight="bold")
    axes.autoscale(axis="x")
    label_axes(axes, "", "bytes for one parameter", FONT - 1, at=dict(enumerate(columns)), ylim=(0, 23))
    return axes


def plot_peaks(batch_sizes: Sequence[int], peaks: Mapping[str, Sequence[int]], axes: Axes | None = None) -> Axes:
    """Draws the peak bytes of a step against the batch size, {"FP32": …, "mixed precision": …}."""
    axes = axes or new_axes(11, 4.8)
    looks: list[Look] = [{"color": GREY, "marker": "o"}, {"color": PINK, "marker": "s", "linestyle": "dashed"}]
    draw_lines(axes, batch_sizes, peaks, looks, MIB)
    place: Look = {"legend": {"loc": "upper left", "fontsize": FONT - 1}, "at": batch_sizes}
    label_axes(axes, "images in the batch", "peak of one step (MiB)", FONT - 2, log="xy", **place)
    axes.set_yticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    return axes


def draw_step(sizes: Mapping[str, tuple[int, int]]) -> Axes:
    """Draws one step of one layer: what is kept in how many bits, and what comes out of what.

    sizes: (bits, bytes) of "input", "weight" and "output", "gradient of the input" and "of the output", "gradient" (the
    weight's), "FP32 gradient", "master" and "moments".
    """
    axes = new_axes(15, 9.5)
    for name, (left, bottom, words) in _BOXES.items():
        bits, size = sizes.get(name, (32, 4))
        color = _KINDS.get(name, COLORS["temporary"])
        look: Look = {"linewidth": 4 if bits == 32 else 1.2, "size": FONT + 1}
        look["ink"] = "white" if color in (COLORS["parameters"], COLORS["optimizer"]) else "black"
        text = f"{words}\nFP{bits}, {size / 1024:,.0f} KiB" if name in sizes else f"{words}\nFP{bits}"
        box(axes, left, bottom, 2.3, 1.1, color, text, **look)
    for start, end, words, (x, y), side in _ARROWS:
        arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=22, linewidth=2.2, color="black")
        axes.add_patch(arrow)
        axes.text(x, y, words, ha=side, va="center", fontsize=FONT + 1)
    axes.set(xlim=(-0.1, 14.2), ylim=(0, 8.4))
    axes.axis("off")
    return axes


# Left, bottom and words of each box, 2.3 wide and 1.1 high; then from where to where an arrow goes, and its words.
_BOXES: dict[str, tuple[float, float, str]] = {
    "input": (0, 7.1, "activation in"),
    "weight": (3.9, 7.1, "weight"),
    "output": (7.8, 7.1, "activation out"),
    "loss": (11.7, 7.1, "loss"),
    "gradient of the input": (3.9, 4.8, "gradient in × s"),
    "gradient of the output": (7.8, 4.8, "gradient out × s"),
    "scaled loss": (11.7, 4.8, "s × loss"),
    "gradient": (7.8, 2.5, "weight's\ngradient × s"),
    "FP32 gradient": (7.8, 0.2, "weight's\ngradient"),
    "moments": (3.9, 0.2, "Adam's moments"),
    "master": (0, 0.2, "master weight"),
}
_KINDS = {
    "weight": COLORS["parameters"],
    "gradient": COLORS["gradients"],
    "FP32 gradient": COLORS["gradients"],
    "master": COLORS["optimizer"],
    "moments": COLORS["optimizer"],
}
_ARROWS: list[tuple[tuple[float, float], tuple[float, float], str, tuple[float, float], str]] = [
    ((2.3, 7.65), (3.9, 7.65), "×", (3.1, 7.95), "center"),
    ((6.2, 7.65), (7.8, 7.65), "=", (7.0, 7.95), "center"),
    ((10.1, 7.65), (11.7, 7.65), "mean", (10.9, 7.95), "center"),
    ((12.85, 7.1), (12.85, 5.9), "1 scale", (13, 6.5), "left"),
    ((11.7, 5.35), (10.1, 5.35), "backward", (10.9, 5.65), "center"),
    ((7.8, 5.35), (6.2, 5.35), "× weight", (7.0, 5.65), "center"),
    ((8.95, 4.8), (8.95, 3.6), "× activation in", (9.1, 4.2), "left"),
    ((8.95, 2.5), (8.95, 1.3), "2 copy to FP32, 3 divide by s", (9.1, 1.9), "left"),
    ((7.8, 0.75), (6.2, 0.75), "4 Adam", (7.0, 1.05), "center"),
    ((3.9, 0.75), (2.3, 0.75), "4 step", (3.1, 1.05), "center"),
    ((1.15, 1.3), (3.9, 7.1), "5 round", (2.1, 4.1), "right"),
]
