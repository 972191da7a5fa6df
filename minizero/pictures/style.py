"""What all pictures share: colours, the size of letters, units.

Parameters are blue, gradients yellow, optimizer states green, in every picture. Measured and predicted never share a
colour.
"""

from typing import Any

from matplotlib.axes import Axes

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


def new_axes(width: float, height: float) -> Axes:
    """Axes on a figure of their own, of such a size in inches. A notebook shows the figure."""
    from matplotlib import pyplot  # it may open windows, so it is imported only when somebody asks for a figure

    return pyplot.figure(figsize=(width, height), layout="constrained").add_subplot()


def label_axes(axes: Axes, x: str, y: str, ticks: int = FONT) -> None:
    """Names both axes, and removes the frame above and on the right."""
    axes.set_xlabel(x, fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.tick_params(labelsize=ticks)
    axes.spines[["top", "right"]].set_visible(False)


def mib(count: float) -> str:
    """Bytes in MiB, with two decimals."""
    return f"{count / MIB:,.2f}"
