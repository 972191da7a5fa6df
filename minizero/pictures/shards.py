"""Who holds which part: a rank's piece stands at its own place, and what other ranks hold is a pale outline.

Rajbhandari et al., 2019, "ZeRO", figure 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minizero.pictures.style import COLORS, FONT, MIB, OTHER, Look, box, keys, label_axes, mib, note, sheet

Results = dict[str, Any]
STATES = ("parameters", "gradients", "optimizer")
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the stage of ZeRO that begins to cut it
PALE = "#F4F4F4"
OUTLINE: Look = {"edgecolor": "#BBBBBB", "linewidth": 0.8}


def draw_boxes(results: Results) -> Figure:
    """Draws the ZeRO paper's picture to scale: a column for each rank, with its pieces at their places.

    `report` says what `results` holds. Rank 0's piece of a state that is cut stands lowest, the last rank's highest.
    """
    runs, size = results["runs"], results["world_size"]
    whole = {name: max(_whole(run, name) for run in runs) for name in STATES}
    base = {name: sum(whole[below] for below in STATES[:place]) for place, name in enumerate(STATES)}
    axes = sheet(16, 9)
    for group, run in enumerate(runs):
        # A stage gets one unit of the x axis, and its ranks share 0.84 of that.
        centres = [group - 0.42 + 0.84 * (rank + 0.5) / size for rank in range(size)]
        look: Look = {"width": 0.75 / size, "linewidth": min(0.8, 8 / size)}
        for name in STATES:
            axes.bar(centres, whole[name] / MIB, bottom=base[name] / MIB, label="", color=PALE, **{**OUTLINE, **look})
            heights = [rank["persistent"].get(name, 0) for rank in run["ranks"]]
            bottoms = [base[name] + (sum(heights[:rank]) if _is_cut(run, name) else 0) for rank in range(size)]
            own: Look = {"bottom": [bottom / MIB for bottom in bottoms], "edgecolor": "black", "label": name}
            axes.bar(centres, [height / MIB for height in heights], color=COLORS.get(name, OTHER), **own, **look)
        totals = [rank["persistent"]["total"] for rank in run["ranks"]]
        text = " to ".join(dict.fromkeys(mib(end) for end in (min(totals), max(totals))))
        at = (group, sum(whole.values()) / MIB)
        note(axes, f"{text} MiB\nper rank", at, (0, 9), "center", fontsize=FONT + 1, weight="bold")
    axes.set_xticks(range(len(runs)), [run["name"] for run in runs], fontweight="bold")
    ends: Look = {"xlim": (-0.5, len(runs) - 0.5), "ymargin": 0.15}
    label_axes(axes, f"stage (a column for each rank, 0 to {size - 1})", "whole of each state (MiB)", **ends)
    names = f"{results['n_parameters']:,} parameters, world size {size}"
    axes.figure.suptitle(f"Which part each rank holds after a step: {names}", fontsize=FONT + 4)
    return _with_legend(axes.figure)


def _is_cut(run: Results, name: str) -> bool:
    return bool(run["stage"] >= SHARDED_FROM[name])


def _whole(run: Results, name: str) -> int:
    """Bytes of a state on all ranks together, a copy counted once."""
    held = [rank["persistent"].get(name, 0) for rank in run["ranks"]]
    return sum(held) if _is_cut(run, name) else max(held)


def draw_numbers(held: Mapping[str, Sequence[Mapping[str, range]]], whole: int) -> Figure:
    """Draws which numbers each rank holds: a panel for each stage, rows for each rank, cells for the numbers.

    held: for each stage by its name, for each rank, by what is stored (such as "gradients g"), the places it holds.
    The first word of what is stored gives its colour. whole: how many numbers there are.
    """
    panels = sheet(16, 6.2, 1, len(held))
    for axes, (stage, ranks) in zip(panels, held.items()):
        rows = list(ranks[0])
        for rank, stored in enumerate(ranks):
            for row, name in enumerate(rows):
                top = rank * (len(rows) + 1) + row
                for place in range(whole):
                    color, edge = (COLORS[name.split()[0]], "black") if place in stored[name] else (PALE, "#BBBBBB")
                    box(axes, place + 0.06, top + 0.08, 0.88, 0.84, color, edgecolor=edge, linewidth=0.8)
        count = sum(map(len, ranks[0].values()))
        axes.set_title(f"{stage}\n{count} numbers a rank", fontsize=FONT + 1, fontweight="bold")
        at = {place + 0.5: str(place) for place in range(whole)}
        ends: Look = {"xlim": (0, whole), "ylim": (len(ranks) * (len(rows) + 1) - 1, -0.1)}
        label_axes(axes, "place of the number", "", at=at, **ends)
        middles = [rank * (len(rows) + 1) + len(rows) / 2 for rank in range(len(ranks))]
        axes.set_yticks(middles, [f"rank {rank}" if axes is panels[0] else "" for rank in range(len(ranks))])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    labels: dict[str, list[str]] = {}
    for state, symbol in [name.split(maxsplit=1) for name in rows]:
        labels.setdefault(state, []).append(symbol)
    words = {state: f"{state} ({', '.join(symbols)})" for state, symbols in labels.items()}
    return _with_legend(panels[0].figure, words)


def draw_board(board: Sequence[Mapping[str, Mapping[str, float]]], ax: Axes) -> Axes:
    """Draws boxes, a row for each rank and a column for each unit, with a bar in it for each state.

    board: for each rank, by unit and state, the share that the rank holds: from 0 (none) to 1 (all). A rank that holds
    1/N holds its own N-th: it stands at that height.
    """
    names = list(board[0])
    for row, units in enumerate(board):
        for column, name in enumerate(names):
            for number, state in enumerate(STATES):
                left, share = column + 0.08 + 0.28 * number, units[name][state]
                bottom = row + 0.93  # the axis runs down, from rank to rank, so upward is less
                box(ax, left, bottom, 0.26, -0.84, PALE, **OUTLINE)
                if share:
                    start, color = row % round(1 / share) * share, COLORS[state]
                    box(ax, left, bottom - 0.84 * start, 0.26, -0.84 * share, color, edgecolor=color)
            box(ax, column + 0.04, row + 0.04, 0.92, 0.92, "none")
    ax.set(xlim=(0, len(names)), ylim=(len(board), 0))
    labels = [name.removeprefix("blocks.") if name == "root" else name.replace("blocks.", "block ") for name in names]
    ax.set_xticks([column + 0.5 for column in range(len(names))], labels)
    ax.set_yticks([row + 0.5 for row in range(len(board))], [f"rank {row}" for row in range(len(board))])
    ax.tick_params(length=0, labelsize=FONT + 2)
    ax.spines[:].set_visible(False)
    return ax


def draw_boards(boards: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> Figure:
    """Draws a board (`draw_board`) for each moment, by its title."""
    rows = -(-len(boards) // 2)
    panels = sheet(16, 4.3 * rows, rows, 2)
    for axes, (title, board) in zip(panels, boards.items()):
        draw_board(board, axes).set_title(title, fontsize=FONT, fontweight="bold")
    for axes in panels[len(boards) :]:
        axes.remove()
    return _with_legend(panels[0].figure)


def _with_legend(figure: Any, labels: Mapping[str, str] = {}) -> Figure:  # noqa: B006
    colors = {labels.get(state, state): COLORS[state] for state in STATES} | {"not on this rank": PALE}
    keys(figure, colors, loc="outside lower center", ncols=4)
    return figure
