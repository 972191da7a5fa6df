"""One step as bars in time: computation above, communication beside it; or as a file for Perfetto.

If a bar of communication lies under one of computation, they overlap. That is what prefetch buys.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes

from minizero.pictures.style import COLORS, FONT, Look, keys, label_axes, new_axes

# A lane has the colour of the state that moves in it.
LANES = {
    "compute": COLORS["activations"],
    "all-gather": COLORS["parameters"],
    "reduce-scatter": COLORS["gradients"],
    "all-reduce": COLORS["communication"],
    "copy": "#56B4E9",
    "optimizer": COLORS["optimizer"],
}
BACKWARD = COLORS["temporary"]  # computing backward is drawn lighter than forward


@dataclass(frozen=True)
class Event:
    """Something that a rank did. lane: a key of LANES. start, end: seconds on one clock for all ranks."""

    rank: int
    lane: str
    name: str
    start: float
    end: float


def plot_timeline(events: Iterable[Event], ax: Axes | None = None) -> Axes:
    """Draws a row for each rank and lane, in milliseconds from the first event; returns the matplotlib Axes."""
    events = list(events)
    ranks = sorted({event.rank for event in events})
    lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
    rows = {(rank, lane): number for number, (rank, lane) in enumerate((r, x) for r in ranks for x in lanes)}
    ax = ax or new_axes(14, 0.6 + 0.5 * len(rows))
    edges: Look = {"edgecolor": "black", "linewidth": 0.4}
    origin = min(event.start for event in events)
    for event in events:
        left, width = 1e3 * (event.start - origin), 1e3 * (event.end - event.start)
        bottom = rows[event.rank, event.lane] - 0.42
        color = BACKWARD if event.name.startswith("backward") else LANES[event.lane]
        ax.broken_barh([(left, width)], (bottom, 0.84), color=color, **edges)
    ax.set_yticks(list(rows.values()), [f"rank {rank}  {lane}" for rank, lane in rows])
    for rank in ranks[1:]:
        ax.axhline(rows[rank, lanes[0]] - 0.5, color="black", linewidth=0.8)
    ax.invert_yaxis()
    label_axes(ax, "milliseconds", "", ticks=FONT - 4)
    colors = {"forward": LANES["compute"], "backward": BACKWARD}
    colors |= {lane: LANES[lane] for lane in lanes if lane != "compute"}
    keys(ax, colors, loc="upper left", bbox_to_anchor=(1, 1), fontsize=FONT - 2)
    return ax


def chrome_trace(events: Iterable[Event]) -> str:
    """The events in Chrome's trace format: a process for each rank, a thread for each lane."""
    events = list(events)
    origin = min((event.start for event in events), default=0.0)
    lanes = {lane: number for number, lane in enumerate(LANES)}
    named = [
        {"ph": "M", "pid": rank, "tid": lanes[lane], "name": kind, "args": {"name": label}}
        for rank, lane in sorted({(event.rank, event.lane) for event in events})
        for kind, label in (("process_name", f"rank {rank}"), ("thread_name", lane))
    ]
    bars = []
    for event in events:
        when = {"ts": 1e6 * (event.start - origin), "dur": 1e6 * (event.end - event.start)}
        what = {"pid": event.rank, "tid": lanes[event.lane], "name": event.name or event.lane, "cat": event.lane}
        bars.append({"ph": "X", **what, **when})
    return json.dumps({"traceEvents": named + bars, "displayTimeUnit": "ms"})
