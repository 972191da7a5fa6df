"""What all pictures share: colours, the size of letters, units; axes, lines, boxes and words.

Parameters are blue, gradients yellow, optimizer states green, in every picture. Measured and predicted never share a
colour.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

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
HOST: Look = {"color": "#5E2750", "linestyle": "dashed", "linewidth": 2.5}  # under offload: memory of the CPU
PREDICTED: Look = {"color": "#D55E00", "linestyle": "dashed", "linewidth": 2.5}
# By stage of ZeRO. The widths fall, so that of curves that coincide each still shows.
LINE_STYLES: dict[int, Look] = {
    0: {"color": "#C4C4C4", "linestyle": "solid", "linewidth": 18, "solid_capstyle": "butt"},
    1: {"color": "#CC79A7", "linestyle": (0, (2, 0.4)), "linewidth": 10},
    2: {"color": "#5E2750", "linestyle": "dashdot", "linewidth": 5},
    3: {"color": "#000000", "linestyle": "dotted", "linewidth": 2, "marker": "o"},
}
FONT = 16  # points
MIB = 2**20  # bytes


def new_axes(width: float, height: float, *shape: int, **options: Any) -> Any:
    """Axes on a figure of their own, of such a size in inches. A notebook shows the figure.

    shape: rows and columns; then a list of all panels.
    """
    from matplotlib import pyplot  # it may open windows, so it is imported only when somebody asks for a figure

    return sheet(width, height, *shape, make=pyplot.figure, **options)


def sheet(width: float, height: float, *shape: int, make: Any = Figure, **options: Any) -> Any:
    """The same on a figure that nobody shows unless it is returned."""
    panels = make(figsize=(width, height), layout="constrained").subplots(*shape, squeeze=False, **options)
    return panels.ravel() if shape else panels[0, 0]


def label_axes(
    axes: Axes,
    x: str,
    y: str,
    ticks: int = FONT,
    *,
    log: str = "",
    at: Iterable[float] | Mapping[float, str] | None = None,
    legend: str | Look | None = None,
    **rest: Any,
) -> None:
    """Names both axes, and removes the frame above and on the right.

    log: the axes that go by powers, "x", "y" or "xy". at: the ticks of the x axis, or their words by place. legend:
    where it stands, "beside" for outside on the right, or what `Axes.legend` takes. rest: what `Axes.set` takes.
    """
    axes.set(**{f"{axis}scale": "log" for axis in log}, **rest)
    if at is not None:
        words = at.values() if isinstance(at, Mapping) else [f"{tick:,}" for tick in at]
        axes.set_xticks(list(at), list(words))
    if log:
        axes.minorticks_off()
    axes.set_xlabel(x, fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.tick_params(labelsize=ticks)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize(max(FONT, axes.title.get_fontsize()))
    if legend is not None:
        beside: Look = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        place = {"loc": legend} if isinstance(legend, str) else legend
        axes.legend(**{"fontsize": FONT, "frameon": False, **(beside if legend == "beside" else place)})


def keys(on: Axes | Figure, colors: Mapping[str, str], **place: Any) -> None:
    """A legend of coloured patches, by their words."""
    patches = [Patch(facecolor=color, edgecolor="black", label=words) for words, color in colors.items()]
    on.legend(handles=patches, **{"fontsize": FONT, "frameon": False, **place})


def draw_lines(
    axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[float]], looks: Iterable[Look], unit: float = 1
) -> None:
    """A line for each name, in units of `unit`, each with its look."""
    for (name, values), look in zip(curves.items(), looks):
        axes.plot(x, [value / unit for value in values], **{"label": name, "linewidth": 3, "markersize": 10, **look})


def draw_bars(axes: Axes, lengths: Mapping[str, float], words: Iterable[str], **look: Any) -> None:
    """A bar to the right for each name, the first on top, with its words at its end."""
    bars = axes.barh(list(lengths), list(lengths.values()), **{"height": 0.6, **look})
    axes.bar_label(bars, list(words), padding=6, fontsize=FONT + 1)
    axes.invert_yaxis()


def note(
    axes: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], ha: str = "left", **look: Any
) -> Any:
    """Words beside a place, so many points to the right and above."""
    return axes.annotate(words, at, shift, textcoords="offset points", ha=ha, **{"fontsize": FONT, **look})


def box(
    axes: Axes, left: float, bottom: float, width: float, height: float, color: Any, words: str = "",
    *, size: float = FONT, ink: str = "black", weight: str | None = None, **look: Any,
) -> None:  # fmt: skip
    """A rectangle with words in its middle. size, ink, weight: of its letters. look: what matplotlib's takes."""
    axes.add_patch(Rectangle((left, bottom), width, height, **{"facecolor": color, "edgecolor": "black", **look}))
    if words:
        middle = left + width / 2, bottom + height / 2
        axes.text(*middle, words, ha="center", va="center", fontsize=size, color=ink, weight=weight)


def mib(count: float) -> str:
    """Bytes in MiB, with two decimals."""
    return f"{count / MIB:,.2f}"
