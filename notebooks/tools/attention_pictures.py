"""The pictures of notebooks 07 and 07b, from plain data."""

from itertools import takewhile

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.patches import Polygon

from minizero.pictures import FONT, MIB, plot_curve
from minizero.pictures.ring import play
from minizero.pictures.style import box, draw_lines, keys, label_axes, note, sheet

PLAIN, TILED, THIRD = "#CC79A7", "#5E2750", "#8A8A8A"
CHIP, HBM, DONE = "#E69F00", "#A6D8F5", "#E4E4E4"
LOOKS = ({"color": PLAIN, "marker": "s", "linestyle": "dashed"}, {"color": TILED, "marker": "o"})
LOOKS += ({"color": "black", "marker": "^", "linestyle": "dotted"}, {"color": CHIP, "marker": "d"})


def draw_heads(tokens, parts):
    """The matrices of one head, side by side. parts: (title, matrix, what stands behind it)."""
    axes = sheet(17, 3.2)
    x, high = 0, len(tokens)
    for title, matrix, sign in parts:
        rows, columns = len(matrix), len(matrix[0])
        top = -(high - rows) / 2
        whole = all(number == round(number) for row in matrix for number in row)
        if rows == high and not title.startswith("P"):  # its rows are those of the scores beside it
            x += 1.3
            for row, token in enumerate(tokens):
                axes.text(x - 0.12, -row - 0.5, token, ha="right", va="center", fontsize=FONT - 2)
        for place, token in enumerate(tokens if columns == high else ()):
            axes.text(x + place + 0.5, top + 0.15, token, ha="center", fontsize=FONT - 2)
        for row, column in np.ndindex(rows, columns):
            number = matrix[row][column]
            shade = (0.9, 0.62, 0, 0.15 + 0.85 * number) if title.startswith("P") else "white"
            box(axes, x + column, top - row - 1, 1, 1, shade, f"{number:.{0 if whole else 2}f}", size=FONT - 1)
        axes.text(x + columns / 2, 0.8, title, ha="center", fontsize=FONT + 2, weight="bold")
        behind = 0.6 + 0.3 * len(sign)
        axes.text(x + columns + behind / 2, -high / 2, sign, ha="center", va="center", fontsize=FONT + 4)
        x += columns + behind
    axes.set(xlim=(-0.05, x - 0.5), ylim=(-high - 0.05, 1.4), aspect="equal")
    axes.axis("off")
    return axes.figure


def draw_memories(memories, between):
    """A pyramid, not to scale. memories: (name, size, speed), from the top; between: what to say of two neighbours."""
    axes = sheet(14, 5.4)
    floors = len(memories)
    for floor, ((name, size, speed), color) in enumerate(zip(memories, (CHIP, HBM, DONE))):
        top, bottom = floors - floor, floors - floor - 0.94
        corners = [(x, y) for y, signs in ((top, (-1, 1)), (bottom, (1, -1))) for x in (s * (4.4 - y) for s in signs)]
        axes.add_patch(Polygon(corners, facecolor=color, edgecolor="black"))
        middle = (top + bottom) / 2
        axes.text(0, middle + 0.17, name, ha="center", va="center", fontsize=FONT + 3, weight="bold")
        axes.text(0, middle - 0.2, f"{size}, {speed}", ha="center", va="center", fontsize=FONT)
    for floor, words in enumerate(between, 1):
        height = floors - floor + 0.03
        axes.annotate("", (4.0, height - 0.42), (4.0, height + 0.42), arrowprops={"arrowstyle": "->", "linewidth": 2})
        axes.text(4.15, height, words, va="center", fontsize=FONT + 1)
    axes.set(xlim=(-4.4, 8), ylim=(0, floors + 0.05))
    axes.axis("off")
    return axes.figure


def draw_roofline(name, bytes_per_second, operations_per_second, points, measured=None, in_fp32=None):
    """The most operations a second, over operations for a byte. points: {title: operations for a byte}.

    measured: operations a second by the same titles; without them each point stands on the line.
    in_fp32: the most for FP32 numbers, then a second line.
    """
    axes = sheet(14, 6)
    ridge, low, high = operations_per_second / bytes_per_second, 3, 3000
    x = np.array([low, ridge, high])
    axes.plot(x, np.minimum(x * bytes_per_second, operations_per_second) / 1e12, color="black", linewidth=3)
    top = 2.6 * operations_per_second / 1e12
    bottom = min([low * bytes_per_second, *(0.5 * each for each in (measured or {}).values())]) / 1e12
    whose = "FP16 " if measured else ""  # numbers of 4 bytes have the second line
    for left, right, color, words in ((low, ridge, HBM, "waits for bytes"), (ridge, high, "#F5DFA8", "computes")):
        axes.axvspan(left, right, color=color, alpha=0.45, linewidth=0)
        axes.text((left * right) ** 0.5, top / 1.35, whose + words, ha="center", fontsize=FONT + 3, weight="bold")
    for title, each in points.items():
        at_most = min(each * bytes_per_second, operations_per_second) / 1e12
        reached = measured[title] / 1e12 if measured else at_most
        color, marker = (PLAIN, "s") if "plain" in title else (TILED, "o")
        axes.plot(each, reached, marker, color=color, markersize=15, markeredgecolor="black")
        near = (0, 16, "center") if each > ridge else (14, -12, "left")
        near = (-14, 0, "right") if reached > at_most else near  # beside the line, not across it
        note(axes, f"{title}: {reached if measured else each:.0f}", (each, reached), near[:2], near[2])
    if measured:  # so are both parts of the line
        words = f"a copy: {bytes_per_second / 1e12:.1f} · 10¹² bytes a second"
        axes.text(0.16 * ridge, 0.2 * operations_per_second / 1e12, words, ha="right", fontsize=FONT)
        axes.plot([in_fp32 / bytes_per_second, high], [in_fp32 / 1e12] * 2, "--", color=PLAIN, linewidth=3)
        for most, words in ((operations_per_second, "FP16"), (in_fp32, "FP32")):
            words = f"a product of large matrices in {words}: {most / 1e12:.0f}"
            axes.text(0.9 * high, 1.1 * most / 1e12, words, ha="right", fontsize=FONT)
        axes.set_title(name, fontsize=FONT + 2)
    else:
        axes.axvline(ridge, color="black", linewidth=1, linestyle="dotted")
    ticks, heights = [3, 10, 30, 100, round(ridge, -1), 1000, 3000], [10, 30, 100, 300, 1000][: 5 if top > 1000 else 4]
    words = "10¹² operations a second" + ("" if measured else f",\n{name}, at most")
    at = {tick: f"{tick:,.0f}" for tick in ticks}
    ends = {"xlim": (low, high), "ylim": (bottom, top)}
    label_axes(axes, "operations for each byte between HBM and the chip", words, log="xy", at=at, **ends)
    axes.set_yticks(heights, [f"{height:,}" for height in heights])
    return axes.figure


def draw_rates(name, matmul, rates):
    """Operations a second over the number of tokens, a line for each attention. All in 10¹² a second.

    matmul: what a product of large matrices reaches. rates: {title: {tokens: operations a second}}.
    """
    axes = sheet(14, 5.6)
    lengths = sorted({n for its in rates.values() for n in its})
    axes.axhline(matmul, color="black", linewidth=1, linestyle="dotted")
    axes.text(lengths[0], 1.02 * matmul, f"a product of matrices: {matmul:.0f}", fontsize=FONT)
    ends = []
    for title, its in rates.items():
        plain, ours, (n, rate) = "plain" in title, title.startswith("our"), max(its.items())
        color = PLAIN if plain else TILED if ours else THIRD
        look = {"linestyle": "dashed" if plain else "solid", "marker": "s" if plain else "o", "markersize": 9}
        axes.plot(its.keys(), its.values(), color=color, linewidth=5 if ours else 2.5, **look)
        ends.append((rate, f"{title}: {rate:.0f}" + (f" at {n:,}" if n < lengths[-1] else ""), color))
    below = -np.inf
    for rate, words, color in sorted(ends):  # of lines that end close together the names stand one above the other
        below = max(rate, below + 0.062 * matmul)
        note(axes, words, (lengths[-1], below), (16, 0), color=color, va="center")
    axes.set_title(name, fontsize=FONT + 2)
    ends = {"xlim": (0.9 * lengths[0], 3.4 * lengths[-1]), "ylim": (0, 1.1 * matmul)}
    label_axes(axes, "tokens N", "10¹² operations a second", log="x", at=lengths, **ends)
    return axes.figure


def animate_online(scores, steps, exact):
    """A player: the keys so far, as they count now, and the output so far. steps: of `flash.tiled.online_softmax`."""
    from matplotlib import pyplot

    figure, (bars, output) = pyplot.subplots(1, 2, figsize=(12, 3.8), width_ratios=(3, 1))

    def draw(number):
        step, seen = steps[number], range(number + 1)
        bars.clear()
        bars.bar(seen, np.exp(np.array(scores[: number + 1]) - step.maximum), color=[HBM] * number + [CHIP])
        words = f"m = {step.maximum:.1f}, what was there × {step.rescale:.2f}, l = {step.total:.2f}"
        look = {"xlim": (-0.6, len(scores) - 0.4), "ylim": (0, 1.12), "title": words}
        label_axes(bars, "key", "exp(score − m)", at=range(len(scores)), **look)
        output.clear()
        output.bar([0], [step.output.item()], color=CHIP)
        output.axhline(exact, color="black", linestyle="dashed", linewidth=2)
        label_axes(output, "dashed: exact", "o / l", at=[], ylim=(0, 1.08))
        figure.tight_layout()

    return play(figure, draw, len(steps))


def draw_tile(axes, blocks, tile, title):
    """Which blocks of Q, K, V, O are on the chip while this tile of the scores is made, and what is done already."""
    i, j = tile
    axes.clear()

    for b in range(blocks):
        y, row, column = blocks - 1 - b, CHIP if b == i else HBM, CHIP if b == j else HBM
        boxes = [(-1.6, y, row, f"Q{b}"), (b, blocks + 0.4, column, f"K{b}"), (b, blocks + 1.4, column, f"V{b}")]
        boxes.append((blocks + 0.6, y, row if b <= i else "white", f"O{b}"))
        for left, bottom, color, name in boxes:
            box(axes, left, bottom, 0.92, 0.92, color, name)
        for c in range(blocks):
            color = CHIP if (b, c) == tile else DONE if (b, c) < tile else "white"
            box(axes, c, y, 0.92, 0.92, color, linestyle="dotted")
    axes.set(xlim=(-1.8, blocks + 1.7), ylim=(-0.2, blocks + 2.5), aspect="equal")
    axes.set_title(title, fontsize=FONT)
    axes.axis("off")


def draw_tiles(blocks, moves):
    """The first tile, one in the middle, and the last. moves: [(tile, bytes moved so far)]."""
    panels = sheet(15, 5, 1, 3)
    figure = panels[0].figure
    figure.get_layout_engine().set(wspace=0.2)
    for axes, number in zip(panels, (0, len(moves) // 2, len(moves) - 1)):
        tile, moved = moves[number]
        draw_tile(axes, blocks, tile, f"tile {number + 1}: {moved:,} bytes so far")
    colors = {"on the chip": CHIP, "in HBM": HBM, "forgotten": DONE, "to come": "white"}
    keys(figure, colors, loc="outside lower center", ncols=4)
    return figure


def animate_tiles(blocks, moves, plain):
    """A player of all of them, with a counter of bytes. plain: the bytes of plain attention."""
    from matplotlib import pyplot

    figure, (axes, counter) = pyplot.subplots(1, 2, figsize=(10.5, 5.2), width_ratios=(5, 3))

    def draw(number):
        tile, moved = moves[number]
        draw_tile(axes, blocks, tile, "orange: on the chip, blue: in HBM")
        counter.clear()
        counter.bar([0, 1], [moved / 1024, plain / 1024], color=[TILED, PLAIN])
        words = {0: "tiles,\nso far", 1: "plain,\nin all"}
        label_axes(counter, "", "KiB moved", at=words, title=f"{moved:,} bytes")
        figure.tight_layout()

    return play(figure, draw, len(moves))


def draw_theorem(srams, moved, names, curve, constant):
    """Bytes over SRAM: those of the best blocks that fit, by their names, and the theorem's curve. All in bytes.

    Of neighbours with the same blocks the first is named.
    """
    axes = sheet(13, 5.4)
    sizes = [sram // 1024 for sram in srams]
    label = f"{constant:.1f} N² d² / M, the theorem's form"
    axes.plot(sizes, [constant * each / MIB for each in curve], color="black", linewidth=2, label=label)
    axes.plot(sizes, [each / MIB for each in moved], "o", color=TILED, markersize=14, label="best blocks that fit")
    for at, (size, each, name) in enumerate(zip(sizes, moved, names)):
        if name not in names[:at]:
            note(axes, f"{each / MIB:,.0f} MiB\nblocks of {name}", (size, each / MIB), (0, 14), fontsize=FONT - 1)
    ends = {"xlim": (sizes[0] * 0.9, sizes[-1] * 1.55), "ylim": (160, 2800), "legend": "best"}
    words = "SRAM of one program (KiB)", "moved, forward and\nbackward (MiB)"
    label_axes(axes, *words, log="xy", at=dict(zip(sizes, sizes)), **ends)
    axes.set_yticks([200, 400, 800, 1600], ["200", "400", "800", "1,600"])
    return axes.figure


def draw_growth(lengths, peaks, seconds):
    """Memory and time over the number of tokens, a line for each attention. peaks, seconds: {name: by length}."""
    panels = zip(sheet(15, 5.2, 1, 2), (peaks, seconds), (MIB, 1e-3), ("peak (MiB)", "best of several turns (ms)"))
    for axes, curves, unit, label in panels:
        draw_lines(axes, lengths, curves, LOOKS, unit)
        label_axes(axes, "tokens N", label, at=lengths, ylim=(0, None), legend=None if curves is peaks else "best")
    return axes.figure


def draw_floors(label, floors):
    """What a pass takes by its operations and by its bytes. floors: {title: (products, seconds, seconds)}."""
    axes = sheet(14, 0.95 * len(floors) + 1.6)
    for row, (products, operations, moved) in enumerate(floors.values()):
        bars = ((-0.19, operations, CHIP, f" ({products} products)"), (0.19, moved, HBM, ""))
        for shift, value, color, words in bars:
            axes.barh(row + shift, 1e6 * value, 0.36, color=color, edgecolor="black")
            axes.text(1e6 * value + 2, row + shift, f"{1e6 * value:.0f}{words}", va="center", fontsize=FONT)
    axes.set_yticks(range(len(floors)), list(floors))
    axes.invert_yaxis()
    keys(axes, {"time for the operations": CHIP, "time for the bytes": HBM}, loc="lower right")
    axes.margins(x=0.1)
    label_axes(axes, label, "")
    return axes.figure


def draw_passes(curves):
    """Memory until the optimizer's step, a panel for each attention, on one scale. curves: {name: a ledger's curve}."""
    highest = max(sample["total"] for curve in curves.values() for sample in curve) / MIB
    panels = sheet(17, 5.4, 1, len(curves))
    for axes, (name, curve) in zip(panels, curves.items()):
        samples = [*takewhile(lambda sample: sample.phase != "optimizer", curve)]
        plot_curve(samples, axes, "not seen: scratch inside operators")
        next(text for text in axes.texts if text.get_text().startswith("peak")).set_ha("left")  # off the lines
        top = [layer for layer in axes.collections if isinstance(layer, PolyCollection)][-1]
        top.set(edgecolor="black", linewidth=1)  # a peak of one operator is as thin as a line
        axes.set_title(f"{name} attention", pad=32, weight="bold", fontsize=FONT + 2)
        axes.set_ylim(0, 1.15 * highest)
        if axes is not panels[-1]:
            axes.get_legend().remove()  # the same as the last one's
    return axes.figure


def draw_training(lengths, seconds, peaks):
    """A training step with each attention: seconds and peak, bars for each length. {name: by length}."""
    panels = zip(sheet(15, 5.2, 1, 2), (seconds, peaks), (1e-3, MIB), ("ms a step, best of several", "peak (MiB)"))
    for axes, values, unit, label in panels:
        for shift, (name, its), color in zip((-0.2, 0.2), values.items(), (PLAIN, TILED)):
            places = np.arange(len(lengths)) + shift
            bars = axes.bar(places, [each / unit for each in its], 0.38, color=color, edgecolor="black", label=name)
            axes.bar_label(bars, fmt="%.0f", fontsize=FONT - 1, padding=3)
        axes.margins(y=0.12)
        label_axes(axes, "tokens N", label, at={place: f"{length:,}" for place, length in enumerate(lengths)})
    axes.legend(fontsize=FONT, frameon=False, loc="upper left")
    return axes.figure
