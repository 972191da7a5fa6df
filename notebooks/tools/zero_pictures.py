"""The pictures that only notebooks 02b and 02c need, from plain data."""

import dataclasses

from minizero.pictures import COLORS, FONT, MIB, OTHER, mark_place, plot_timeline
from minizero.pictures.style import LINE_STYLES, box, draw_lines, label_axes, note, sheet

SHORTEST = 0.002  # seconds: a shorter event is not drawn
ALONE, BETWEEN = "#CC79A7", "#5E2750"


def draw_peaks(tokens, peaks):
    """Peak memory over the tokens in a rank's batch: a line for each stage. peaks: bytes, by the stage's name."""
    axes = sheet(14, 6.2)
    draw_lines(axes, tokens, peaks, [{**look, "linewidth": 4, "marker": "o"} for look in LINE_STYLES.values()], MIB)
    look = {"log": "x", "at": tokens, "ylim": (0, None)}
    look["legend"] = {"handlelength": 4, "loc": "upper left", "bbox_to_anchor": (1, 1)}
    label_axes(axes, "tokens in a rank's batch", "peak of one step (MiB per rank)", **look)
    return axes.figure


def draw_factors(factors, states, crossing):
    """For each sharding factor what a rank holds, and what travels between the machines. states, crossing: bytes."""
    panels = zip(sheet(14, 5.2, 1, 2), (states, crossing), (ALONE, BETWEEN))
    words = ("states of a rank (MiB)", "between machines, all ranks,\none step (MiB)")
    for (axes, values, color), label in zip(panels, words):
        bars = axes.bar([f"F = {factor}" for factor in factors], [value / MIB for value in values], color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=FONT, padding=3)
        axes.margins(y=0.12)
        label_axes(axes, "ranks that share one copy", label)
    return axes.figure


def draw_steps(events, times=True):
    """One step for each title, one above the other, on one scale of time. events: by title, of one rank or several.

    times: False if they mean nothing, and order alone is to be read. Then all computations are equally wide.
    """
    ranks = {event.rank for its in events.values() for event in its}
    panels = sheet(16, (2.8 + 0.4 * len(ranks)) * len(events), len(events), 1, sharex=True)
    lengths = []
    for axes, (title, its) in zip(panels, events.items()):
        its = drawn(its) if times else in_order(drawn(its))
        plot_timeline(its, axes).set_title(title, fontsize=FONT, fontweight="bold", loc="left")
        last = 1e3 * (max(event.end for event in its) - min(event.start for event in its))
        axes.axvline(last, color="black", linewidth=2, linestyle="dashed")
        note(axes, f"{last:.0f} ms" if times else "end", (last, -0.35), (5, 0), va="center")
        if not times:
            axes.set(xticks=[], xlabel="in this order →")
        of_rank = "rank 0  " if len(ranks) == 1 else ""
        lanes = [label.get_text().removeprefix(of_rank) for label in axes.get_yticklabels()]
        axes.set_yticks(axes.get_yticks(), lanes)
        axes.tick_params(labelsize=FONT - 1)
        lengths.append(last)
        if axes is not panels[0]:
            axes.get_legend().remove()
        if axes is not panels[-1]:
            axes.set_xlabel("")
    panels[0].set_xlim(0, 1.1 * max(lengths))
    return panels[0].figure


def drawn(events):
    """Those that a picture of a step shows."""
    return [event for event in events if event.lane != "optimizer" and event.end - event.start > SHORTEST]


def in_order(events):
    """The same events, of each rank one after the other; a message is four times as wide as a computation."""
    placed, now = [], dict.fromkeys((event.rank for event in events), 0.0)
    for event in sorted(events, key=lambda event: event.start):
        start = now[event.rank]
        now[event.rank] += 0.01 if event.lane == "compute" else 0.04
        placed.append(dataclasses.replace(event, start=start, end=now[event.rank]))
    return placed


def draw_travel(found):
    """The flow of one step, from left to right: a row for each stage, a coloured box for each collective.

    found: by the stage's name, what `zero.traveled` returns. A box of length 1 sends the model once. What a rank
    computes is white: parameters travel before it, gradients after it.
    """
    axes = sheet(16, 1.2 + 1.15 * len(found))
    phases = {"forward": (0, 1.05), "backward": (2.05, 3.1), "optimizer's\nstep": (6.15, 6.15)}
    for row, sent in enumerate(found.values()):
        for phase, (start, computes) in phases.items():
            box(axes, computes, row + 0.12, 0.7, 0.76, "white", phase, linewidth=1, linestyle="dashed")
            place = {"parameters": start, "gradients": computes + 0.75}
            for what, how, length in _boxes(sent, phase.split()[-1]):
                look = {"linewidth": 2, "ink": "white" if what == "parameters" else "black"}
                box(axes, place[what], row + 0.12, length, 0.76, COLORS[what], f"{how}\n{what}", **look)
                place[what] += length
        axes.text(7.3, row + 0.5, f"{sum(sent.values()):.2f} ×", ha="center", va="center", fontsize=FONT + 2)
    axes.text(7.3, -0.1, "sent in all", fontsize=FONT + 1, fontweight="bold", ha="center", va="bottom")
    axes.set(xlim=(-0.05, 7.75), ylim=(len(found), -0.4), xticks=[])
    axes.set_yticks([row + 0.5 for row in range(len(found))], list(found), fontsize=FONT + 1, fontweight="bold")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return axes.figure


def _boxes(sent, phase):
    """Of a phase: (what travels, how, how often the model). An all-reduce of gradients is two halves."""
    boxes = []
    for (when, operation), length in sent.items():
        if when != phase or not length:
            continue
        if operation == "all_reduce":
            halves = ("reduce-scatter", "all-gather")
            boxes += [("gradients", half, length / 2) for half in halves]
        else:
            what = "parameters" if operation == "all_gather" else "gradients"
            boxes.append((what, operation.replace("_", "-"), length))
    return boxes


def draw_page(curve, whole, layers):
    """What a rank holds in a step of `zero3_on_a_page`, beside its shards. whole: bytes of all layers."""
    axes, layer = sheet(14, 4.6), whole / 1024 / layers
    axes.fill_between(range(len(curve)), [sample["total"] / 1024 for sample in curve], color=OTHER, step="post")
    for count, words in ((1, "1 layer"), (5, "5 layers")):
        axes.axhline(count * layer, color="black", linewidth=2, linestyle="dashed")
        note(axes, words, (len(curve), count * layer), (8, 0), va="center")
    note(axes, f"all {layers} layers: {whole / 1024:.0f} KiB ↑", (len(curve), 5.8 * layer), (0, 0), "right")
    backward = next(number for number, sample in enumerate(curve) if sample.phase == "backward")
    mark_place(axes, backward, "forward", "backward")
    ends = {"ylim": (0, 6.2 * layer), "xlim": (0, len(curve))}
    label_axes(axes, "changes of memory, in order", "beside its shards (KiB)", **ends)
    return axes.figure
