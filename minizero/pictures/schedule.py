"""A schedule as a picture: time goes to the right, one column for each forward or backward; a row for each stage.

A stage here is one of a chain's, not of ZeRO's. Its bar lasts from the moment its input is kept to the moment it is
dropped. A cut from bottom to top crosses as many bars as slots are taken. Cells climb while the chain runs forward,
and come down one backward at a time.
"""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from minizero.pictures.style import COLORS, FONT, Look, label_axes, new_axes

Step = tuple[str, int]  # what is done, and to which stage
KEPT, FORWARD, BACKWARD = "#B5B5B5", "#000000", COLORS["gradients"]


def plot_schedule(
    steps: Iterable[Step], title: str, axes: Axes | None = None, sizes: Sequence[float] | None = None
) -> Axes:
    """Draws the steps of a schedule on `axes`, by default on a new figure.

    sizes: of each stage's input. The bar of a larger one is thicker.
    """
    axes = axes or new_axes(14, 7)
    bars, cells = _where(steps)
    stages = 1 + max(stage for _, stage in cells["backward"])
    columns = sum(map(len, cells.values()))

    # From back to front. Heights differ as well as colours, so that nobody has to tell the colours.
    look: Look = {"linewidth": 0}
    kept, first, last = zip(*bars)
    thick = [0.4] * len(kept) if sizes is None else [0.8 * sizes[stage] / max(sizes) for stage in kept]
    axes.barh(kept, [b - a for a, b in zip(first, last)], thick, first, color=KEPT, label="input kept", **look)
    for action, color, height, label in (
        ("forward", FORWARD, 0.55, "forward without tape"),
        ("backward", BACKWARD, 0.95, "forward with tape, and backward"),
    ):
        if cells[action]:
            column, stage = zip(*cells[action])
            axes.barh(stage, 1, height, column, color=color, label=label, **look)

    legend: Look = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 3}
    legend |= {"handlelength": 1.2, "columnspacing": 1.5}
    label_axes(axes, "step", "stage", xlim=(0, columns), ylim=(-0.7, stages - 0.3), legend=legend)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(title, fontsize=FONT + 3, pad=44)
    return axes


def _where(steps: Iterable[Step]) -> tuple[list[tuple[int, int, int]], dict[str, list[tuple[int, int]]]]:
    """Bars (stage, first column, column after the last), and by action the cells (column, stage)."""
    bars: list[tuple[int, int, int]] = []
    since: dict[int, int] = {}  # by stage: the column where its input was kept
    cells: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": []}
    column = 0
    for action, stage in steps:
        if action == "keep":
            since[stage] = column
        elif action == "drop":
            bars.append((stage, since.pop(stage), column))
        else:
            cells[action].append((column, stage))
            column += 1
    return bars + [(stage, start, column) for stage, start in since.items()], cells
