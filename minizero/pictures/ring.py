"""The ring, drawn from what a run has recorded: which rank holds what after each step, and who sends which chunk.

Each of four ranks holds four chunks. A chunk is drawn as a box with four digits: rank 0 brings 1000, rank 1 brings
0100, rank 2 brings 0010 and rank 3 brings 0001, and the digits of a sum say whose numbers are in it. A coloured stripe
lies under each 1. A thick frame: the sum is complete.

    states[step][rank][chunk]   the digits as a number, such as 1101; step 0 is before the first message
    sent[step][rank]            the chunk that this rank sends to the rank below, in step + 1
"""

import re
from collections.abc import Callable, Iterable, Sequence

from matplotlib import rc_context
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from minizero.pictures.clickable import player
from minizero.pictures.style import FONT, Look

States = Sequence[Sequence[Sequence[int]]]
Sent = Sequence[Sequence[int]]
Place = tuple[float, float, int, int]  # x, y of the lower left corner; the chunk's number; the digits

CHUNKS = ("#E69F00", "#56B4E9", "#CC79A7", "#BBCC33")
ARROW = "#6E6E6E"
HEIGHT, PITCH = 0.8, 1.6  # of a box, and from a rank to the next; a box is 1 wide
XLIM, YLIM = (-1.45, 5.5), (-0.85, 6.95)
FAMILIES = {"sans-serif": "Sans", "monospace": "Sans Mono"}  # DejaVu, by kind; a browser may have another
ADVANCE = 0.602  # how wide a digit of the typeface is, for size 1


def draw_ring(states: States, sent: Sent) -> None:
    """Draws a panel for each step on a new figure."""
    from matplotlib import pyplot

    unit = 42  # points: the width of a box
    rows = -(-(len(states) + 1) // 4)  # one panel more, for the key
    size = [4 * unit * (XLIM[1] - XLIM[0]) / 72, rows * unit * (YLIM[1] - YLIM[0]) / 72]
    figure, axes = pyplot.subplots(rows, 4, figsize=size, squeeze=False, dpi=72)
    figure.subplots_adjust(0, 0, 1, 1, 0.02, 0.02)
    panels = list(axes.flat)
    for step, ax in enumerate(panels[: len(states)]):
        _draw_state(ax, states[step], title_of(step, len(states)), unit)
        for rank, chunk in enumerate(sent[step - 1] if step else []):
            _draw_arrival(ax, (rank + 1) % 4, chunk)
    for ax in panels[len(states) :]:
        ax.axis("off")
    key = "1000  rank 0 alone\n1101  rank 2 is missing\n1111  complete"
    panels[-1].text(0.05, 0.5, key, fontsize=FONT + 4, va="center", linespacing=1.7, transform=panels[-1].transAxes)


def animate_ring(states: States, sent: Sent) -> str:
    """A player as HTML that waits to be started: for each step the chunks leave, arrive, and are added or kept."""
    from matplotlib import pyplot

    unit = 66
    figure = pyplot.figure(figsize=(unit * (XLIM[1] - XLIM[0]) / 72, unit * (YLIM[1] - YLIM[0]) / 72))
    ax = figure.add_axes((0, 0, 1, 1))

    def draw(number: int) -> None:
        ax.clear()
        draw_frame(ax, states, sent, number, unit)

    return play(figure, draw, 3 * len(states) - 2)


def play(figure: Figure, draw: Callable[[int], None], frames: int) -> str:
    """A player as HTML of the pictures that draw(0), draw(1), … make on `figure`, which it closes."""
    from matplotlib import pyplot

    brief: Look = {"svg.fonttype": "none", "animation.frame_format": "svg"}
    brief |= {f"font.{kind}": [f"DejaVu {name}", kind] for kind, name in FAMILIES.items()}
    with rc_context(brief):  # type: ignore[arg-type]
        made = player(FuncAnimation(figure, draw, frames=frames, interval=900))  # type: ignore[arg-type]
    pyplot.close(figure)
    return made


def draw_frame(ax: Axes, states: States, sent: Sent, number: int, unit: float) -> None:
    """Draws frame `number` of the player: 0 is the beginning, and each step has three frames."""
    step, part = divmod(number + 2, 3)
    adds = step <= (len(states) - 1) // 2
    phase = ("they leave", "they arrive", "added" if adds else "kept")[part] if step else "what each rank brings"
    _draw_state(ax, states[step - (part < 2)], f"{title_of(step, len(states))}: {phase}", unit)
    travelling = []
    for rank, chunk in enumerate(sent[step - 1] if part < 2 else []):
        x, y = _corner(rank, chunk) if part == 0 else _corner((rank + 1) % 4, chunk)
        travelling.append((x, y - 0.4 if part == 0 else y + HEIGHT + 0.07, chunk, states[step - 1][rank][chunk]))
    _draw_boxes(ax, travelling, 0.33, unit, thick=2)


def title_of(step: int, count: int) -> str:
    """Names a step. count: how many states there are; the first half of the steps is a reduce-scatter."""
    half = (count - 1) // 2
    name = "reduce-scatter" if step <= half else "all-gather"
    return "before" if step == 0 else f"{name} {(step - 1) % half + 1} of {half}"


def _draw_state(ax: Axes, state: Sequence[Sequence[int]], title: str, unit: float) -> None:
    places = [(*_corner(rank, chunk), chunk, state[rank][chunk]) for rank in range(4) for chunk in range(4)]
    _draw_boxes(ax, places, HEIGHT, unit)
    letter = max(FONT - 1, 0.3 * unit)
    ax.text(-0.15, -0.65, "chunk", ha="right", fontsize=letter)
    for rank in range(4):
        ax.text(-0.15, _corner(rank, 0)[1] + 0.4, f"rank {rank}", ha="right", va="center", fontsize=letter)
        ax.text(_corner(0, rank)[0] + 0.5, -0.65, f"{rank}", ha="center", fontsize=letter)
    # The arrow at the right closes the ring.
    look: Look = {"arrowstyle": "-|>", "color": ARROW, "linewidth": 2, "connectionstyle": "arc3,rad=0.25"}
    ax.annotate("", (4.68, _corner(0, 0)[1] + 0.4), (4.68, _corner(3, 0)[1] + 0.4), arrowprops=look)
    ax.text((XLIM[0] + XLIM[1]) / 2, 6.5, title, ha="center", fontsize=FONT + 1, fontweight="bold")
    ax.set(xlim=XLIM, ylim=YLIM)
    ax.axis("off")


def _draw_arrival(ax: Axes, rank: int, chunk: int) -> None:
    """An arrow into the box: this chunk has just come from the rank above, for rank 0 from rank 3."""
    x, y = _corner(rank, chunk)
    look: Look = {"arrowstyle": "-|>", "linewidth": 2.2, "color": "black"}
    start = y + PITCH if rank else y + HEIGHT + 0.45
    ax.annotate("", (x + 0.5, y + HEIGHT), (x + 0.5, start), arrowprops=look)
    if rank == 0:
        ax.text(x + 0.62, y + HEIGHT + 0.14, "from 3", fontsize=FONT - 2)


def _draw_boxes(ax: Axes, places: Iterable[Place], height: float, unit: float, thick: float = 4) -> None:
    """Draws each box with a digit in each quarter. What looks alike is one path: that keeps the player small."""
    looks: dict[tuple[str, str, float], list[tuple[float, float, float, float]]] = {}
    for x, y, chunk, digits in places:
        text = f"{digits:04}"
        for run in re.finditer("1+", text):
            stripe = (x + run.start() / 4, y, len(run[0]) / 4, height)
            looks.setdefault((CHUNKS[chunk], "none", 0), []).append(stripe)
        looks.setdefault(("none", "black", thick if text == "1111" else 1), []).append((x, y, 1, height))
        look: Look = {"ha": "center", "va": "center_baseline", "family": "monospace"}
        ax.text(x + 0.5, y + height / 2, text, fontsize=unit / 4 / ADVANCE, **look)
    for (face, edge, line), boxes in looks.items():
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in boxes]
        outline = Outline.make_compound_path(*(Outline(points, closed=True) for points in corners))
        ax.add_patch(PathPatch(outline, facecolor=face, edgecolor=edge, linewidth=line, zorder=2 + (edge == "black")))


def _corner(rank: int, chunk: int) -> tuple[float, float]:
    """The lower left corner of a box."""
    return 1.2 * chunk, PITCH * (3 - rank)
