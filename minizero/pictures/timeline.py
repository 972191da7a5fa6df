"""One step as bars in time: computation above, communication beside it; or as a file for Perfetto.

Where a bar of communication lies under one of computation they overlap: that is what prefetch buys.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minizero.pictures.style import COLORS, FONT, new_axes

# A lane's colour is that of what moves, or is written, in it.
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
    """Something that a rank did. lane: a key of LANES; start, end: seconds, on one clock for all ranks."""

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
    if ax is None:
        ax = new_axes(14, 0.6 + 0.5 * len(rows))
    origin = min(event.start for event in events)
    for event in events:
        place = [(1e3 * (event.start - origin), 1e3 * (event.end - event.start))]
        color = BACKWARD if event.name.startswith("backward") else LANES[event.lane]
        ax.broken_barh(
            place, (rows[event.rank, event.lane] - 0.42, 0.84), color=color, edgecolor="black", linewidth=0.4
        )
    ax.set_yticks(list(rows.values()), [f"rank {rank}  {lane}" for rank, lane in rows])
    for rank in ranks[1:]:
        ax.axhline(rows[rank, lanes[0]] - 0.5, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds", fontsize=FONT)
    ax.tick_params(labelsize=FONT - 4)
    ax.spines[["top", "right"]].set_visible(False)
    keys = {"forward": LANES["compute"], "backward": BACKWARD} | {
        lane: LANES[lane] for lane in lanes if lane != "compute"
    }
    patches = [Patch(facecolor=color, edgecolor="black", linewidth=0.4, label=name) for name, color in keys.items()]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), fontsize=FONT - 2, frameon=False)
    return ax


def save_chrome_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write the events in Chrome's trace format: a process for each rank, a thread for each lane."""
    events = list(events)
    origin = min((event.start for event in events), default=0.0)
    lanes = {lane: number for number, lane in enumerate(LANES)}
    named = [
        {"ph": "M", "pid": rank, "tid": lanes[lane], "name": kind, "args": {"name": label}}
        for rank, lane in sorted({(event.rank, event.lane) for event in events})
        for kind, label in (("process_name", f"rank {rank}"), ("thread_name", lane))
    ]
    bars = [
        {
            "ph": "X",
            "pid": event.rank,
            "tid": lanes[event.lane],
            "name": event.name or event.lane,
            "cat": event.lane,
            "ts": 1e6 * (event.start - origin),
            "dur": 1e6 * (event.end - event.start),
        }
        for event in events
    ]
    Path(path).write_text(json.dumps({"traceEvents": named + bars, "displayTimeUnit": "ms"}))
