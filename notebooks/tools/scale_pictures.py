"""The pictures that only notebook 08 needs, from plain data and simulated steps. Each says what is published in it,
what is fitted and what is predicted.
"""

import numpy as np
from matplotlib.patches import Patch

from minizero.pictures import FONT, PREDICTED
from minizero.pictures.style import label_axes, note, sheet
from minizero.simulate.tables import FITTED, PUBLISHED, ruler_errors
from notebooks.tools import zero_pictures

GIB = 2**30
SPEED = "TFLOP/s per GPU"
DIAMOND = PUBLISHED | {"s": 110}
STRATEGIES = {"full shard": "#0072B2", "hybrid, F = 8": "#E69F00", "replication, F = 1": "#009E73", "DDP": "#C1272D"}


def draw_steps(steps):
    """A simulated step for each title, one above the other."""
    figure = zero_pictures.draw_steps({title: step.events() for title, step in steps.items()})
    figure.axes[-1].set_xlabel("milliseconds, predicted", fontsize=FONT)
    return figure


def draw_exposed(tokens, shares, kinks):
    """The exposed share of the step over the tokens on a GPU. shares, kinks: by network; a kink is in tokens."""
    axes = sheet(13, 5)
    for (name, line), marker, color in zip(shares.items(), "os", ("#0072B2", PREDICTED["color"])):
        look = PREDICTED | {"color": color, "marker": marker, "markersize": 9}
        axes.plot(tokens, [100 * share for share in line], **look, label=f"{name}, predicted")
        axes.axvline(kinks[name], color=color, linewidth=1.5)
        axes.text(kinks[name] * 1.03, 58, f"by hand, {name}:\n{kinks[name]:,.0f} tokens", fontsize=FONT - 1, va="top")
        place = next((i for i, share in enumerate(line) if share < 0.55), 0)
        note(axes, name, (tokens[place], 100 * line[place]), (12, 8))
    look = {"log": "x", "at": [256 * 2**i for i in range(7)], "ylim": (0, 100), "legend": "upper right"}
    label_axes(axes, "tokens on each GPU", "exposed, % of the step", FONT - 2, **look)
    return axes.figure


def draw_who_fits(steps, models):
    """The peak in GiB, black where it does not fit. steps: by strategy, a step for each model. models: parameters."""
    held = np.array([[step.memory["total"] / GIB for step in row] for row in steps.values()])
    fits = np.array([[step.fits for step in row] for row in steps.values()])
    axes = sheet(14, 5.4)
    axes.imshow(np.where(fits, np.log(held), np.nan), cmap="Oranges", aspect="auto", vmax=np.log(250))
    axes.set_facecolor("black")
    for (i, j), gib in np.ndenumerate(held):
        ink = "black" if fits[i, j] else "white"
        axes.text(j, i, f"{gib:,.0f}", ha="center", va="center", color=ink, fontsize=FONT)
    axes.set_yticks(range(len(steps)), list(steps))
    title = "GiB per GPU at the peak, predicted; black: more than the GPU or its host has"
    sizes = {place: f"{count / 1e9:.3g}B" for place, count in enumerate(models)}
    label_axes(axes, "parameters of the model", "strategy", FONT - 1, at=sizes, title=title)
    return axes.figure


def draw_foundry(one):
    """Left: the speeds, published and simulated, on 128 GPUs 1. Right: how far three predictions of 512 GPUs are off.

    one: a `Fit`.
    """
    left, right = sheet(15, 6, 1, 2, width_ratios=(1.25, 1))
    names = list(one.efficiencies)
    ends = {}  # by model: the last published value
    for name in names:
        rows = [(row, value) for row, value in zip(one.publication.rows, one.values) if row.model == name]
        gpus, values = [row.plan.ranks for row, _ in rows], [value / rows[0][1] for _, value in rows]
        published = [row.value / rows[0][0].value for row, _ in rows]
        left.plot(gpus[:2], values[:2], **FITTED | {"linewidth": 4})
        left.plot(gpus[1:], values[1:], **PREDICTED)
        left.scatter(gpus, published, **DIAMOND)
        ends[name.removeprefix("mpt-").upper()] = published[-1]
    places = {"above": 2.0}
    for name, end in sorted(ends.items(), key=lambda pair: -pair[1]):
        places[name] = min(end, min(places.values()) - 0.009)  # one below the other
        left.annotate(name, (530, end), (570, places[name]), fontsize=FONT, va="center")
    left.plot([], [], **FITTED | {"linewidth": 4}, label="fitted: 128, 256")
    left.plot([], [], **PREDICTED, label="predicted: 512")
    left.scatter([], [], **DIAMOND, label="published")
    look = {"xlim": (115, 720), "ylim": (0.85, 1.03), "yticks": [0.85, 0.9, 0.95, 1]}
    look["legend"] = {"loc": "lower left", "fontsize": FONT - 1}
    label_axes(left, "GPUs (H100)", "speed of a GPU / that on 128 GPUs", log="x", at=gpus, **look)
    line, flat = ruler_errors(one)
    kinds = {"simulator": (one.errors(fitted=False), PREDICTED["color"], "o"), "ruler": (line, "black", "x")}
    kinds["no change since 256"] = (flat, "#8A8A8A", "s")
    for kind, (errors, color, marker) in kinds.items():
        mean = np.abs(errors).mean()
        percent = [100 * error for error in errors]
        label = f"{kind}: {mean:.1%} on average"
        right.plot(percent, range(len(names)), marker, color=color, markersize=11, markeredgewidth=3, label=label)
    right.axvline(0, ymax=0.7, color="black", linewidth=1)
    right.set_yticks(range(len(names)), [name.removeprefix("mpt-").upper() for name in names])
    place = {"loc": "upper left", "fontsize": FONT - 1}
    label_axes(right, "predicted / published − 1 at 512 GPUs (%)", "", ylim=(-0.5, 8.2), legend=place)
    return right.figure


def draw_strategies(groups, published):
    """TFLOP/s of T5 by size and strategy, in the paper's colours. groups: by label, {strategy: (step, kind)}.

    kind: "fitted", "predicted" or "assumed". published: {(label, strategy): TFLOP/s}.
    """
    hatches = {"fitted": "", "predicted": "//", "assumed": ".."}
    axes = sheet(15, 6.4)
    for place, (label, steps) in enumerate(groups.items()):
        for number, (strategy, (step, kind)) in enumerate(steps.items()):
            x = place + 0.21 * (number - 1.5)
            if not step.fits:
                look = {"ha": "center", "fontsize": FONT - 1, "color": STRATEGIES[strategy]}
                axes.text(x, 3, "out of memory", rotation=90, **look)
                continue
            look = {"color": STRATEGIES[strategy], "hatch": hatches[kind], "edgecolor": "white", "linewidth": 0}
            axes.bar(x, step.tflops, 0.19, **look)
            if (label, strategy) in published:
                axes.scatter(x, published[label, strategy], **DIAMOND)
    keys = [Patch(color=color, label=strategy) for strategy, color in STRATEGIES.items()]
    look = {"facecolor": "#8A8A8A", "edgecolor": "white", "linewidth": 0}
    for kind, hatch in hatches.items():
        keys.append(Patch(hatch=hatch, label=kind + ": BF16's efficiency" * (kind == "assumed"), **look))
    keys.append(axes.scatter([], [], **DIAMOND, label="published, about"))
    place = {"handles": keys, "fontsize": FONT - 1, "ncols": 2, "loc": "upper left"}
    ends = {"xlim": (-0.5, len(groups) - 0.5), "ylim": (0, 165), "legend": place}
    label_axes(axes, "model, and the format it computes in (16 GPUs)", SPEED, at=dict(enumerate(groups)), **ends)
    return axes.figure


def draw_scaling(panels):
    """TFLOP/s per GPU over GPUs. panels: (title, GPUs, {label: (line, style, published of its last point)})."""
    for axes, (title, gpus, lines) in zip(sheet(15, 5.4, 1, 2, sharey=True), panels):
        for (label, (line, style, published)), color in zip(lines.items(), ("#0072B2", "#E69F00")):
            axes.plot(gpus, line, style, color=color, linewidth=3, markersize=9, label=label)
            axes.scatter(gpus[-1], published, **DIAMOND | {"edgecolor": color, "linewidth": 2.5})
        axes.scatter([], [], **DIAMOND, label="published")
        look = {"ylim": (0, 215), "title": title, "legend": {"loc": "lower left", "fontsize": FONT - 1}}
        label_axes(axes, "GPUs (A100)", SPEED if title.startswith("T5") else "", log="x", at=gpus, **look)
    return axes.figure


def draw_causes(gpus, lines, published):
    """What is lost since the first number of GPUs, in percent. lines: by what is switched off. published: a range.

    The first line is fitted, the others are predicted.
    """
    axes = sheet(13, 5.6)
    looks = (FITTED | {"linewidth": 4}, PREDICTED, PREDICTED, PREDICTED)
    for (label, line), look, marker in zip(lines.items(), looks, "osD^"):
        axes.plot(gpus, [100 * share for share in line], **look, marker=marker, markersize=9)
        kind = "fitted" if look is looks[0] else "predicted"
        words = f"{label}, {kind}: {100 * line[-1]:.1f} %".replace("-", "−")
        axes.text(gpus[-1] * 1.12, 100 * line[-1], words, va="center", fontsize=FONT)
    low, high = (100 * share for share in published)
    axes.fill_between((gpus[-1] / 1.08, gpus[-1] * 1.08), low, high, color="black", alpha=0.25, linewidth=0)
    axes.text(gpus[-1] / 1.12, high, "published: 7 %", ha="right", va="center", fontsize=FONT)
    axes.axhline(0, color="black", linewidth=0.8)
    look = {"xlim": (7.5, 5000), "ylim": (-1, 8.2), "title": "T5-11B, batch 8"}
    label_axes(axes, "GPUs (A100)", "TFLOP/s per GPU lost since 8 (%)", log="x", at=gpus, **look)
    return axes.figure


def draw_megatron(one, kink):
    """Megatron-LM's table of ZeRO-3 over the tokens on a GPU. one: its `Fit`. kink: tokens, by hand."""
    axes = sheet(13, 5.4)
    points = {}  # by tokens: TFLOP/s, and what the point is called
    full = {"marker": "o", "markersize": 9}
    hollow = {"marker": "s", "markersize": 18, "markerfacecolor": "none", "markeredgewidth": 2.5}  # to see through
    for name, marker in (("megatron-175b", full), ("megatron-530b", hollow)):
        rows = [(row, value) for row, value in zip(one.publication.rows, one.values) if row.model == name]
        look, kind = (FITTED | {"linewidth": 6}, "fitted") if rows[0][0].fitted else (PREDICTED, "predicted")
        size = name.removeprefix("megatron-").upper()
        tokens = [2048 * row.plan.batch_size for row, _ in rows]
        axes.plot(tokens, [value for _, value in rows], **look, **marker, label=f"{size}, {kind}")
        for (row, _), count in zip(rows, tokens):
            points.setdefault(count, []).append((row.value, f"{size}, {row.plan.ranks:,} GPUs"))
    for count, pair in points.items():
        axes.scatter([count] * 2, [value for value, _ in pair], **DIAMOND)
        for (value, words), (*shift, side) in zip(sorted(pair), ((12, -20, "left"), (-12, 8, "right"))):
            note(axes, words, (count, value), shift, side, fontsize=FONT - 2)
    axes.scatter([], [], **DIAMOND, label="published")
    axes.axvline(kink, color="black", linewidth=1.5)
    words = f"by hand, with\nthe fitted network:\n{kink:,.0f} tokens"
    axes.text(kink * 0.985, 8, words, ha="right", fontsize=FONT)
    ends = {"xlim": (-400, 12_500), "ylim": (0, 190), "legend": "upper left"}
    label_axes(axes, "tokens on each GPU", SPEED, at=[0, 2048, 4096, 8192], **ends)
    return axes.figure
