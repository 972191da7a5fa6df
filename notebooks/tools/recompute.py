"""What notebooks 05 and 05b count and draw with, from plain data; and what they measure on a card."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import torch
from matplotlib.patches import Circle
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minizero import GPTConfig
from minizero.memory.operators import Watcher
from minizero.pictures import COLORS, FONT, MIB, PREDICTED, plot_schedule
from minizero.pictures.style import box, draw_lines, label_axes, new_axes, note
from minizero.recompute.guards import state
from minizero.schedules import binomial, depth, optimal_schedule
from notebooks.tools.card import DEVICE, GIB, most_bytes
from notebooks.tools.card_memory import initial_values_by_the_device
from notebooks.tools.zero import table

PLAIN = {"color": "black", "marker": "o", "markersize": 11, "linewidth": 3}
REGIONS = {"color": "#CC79A7", "marker": "s", "markersize": 11, "linewidth": 3, "linestyle": "dashed"}
ONE_TAPE = {"color": "#E69F00", "marker": "^", "markersize": 11, "linewidth": 3}

# Counting.


def forwards(layers, run):
    """The layers that run forward in `run(layers)`, in order, counted from 1."""
    ran = []
    handles = [layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers, 1)]
    run(layers)
    for handle in handles:
        handle.remove()
    return ran


def watch(layers, way):
    """A step of `way(layers, x)`: the layers that ran, and how many tensors of x's size the ledger found at most."""
    device = next(layers[0].parameters()).device
    x, factors = torch.randn(2, 4096, layers[0][0].in_features, device=device)
    run = lambda layers: (way(layers, x.clone()) * factors).sum().backward()  # noqa: E731  the input counts, too
    return forwards(layers, run), round(depth.held_bytes(run, layers) / x.nbytes)


def compare(chain, step, ways):
    """Prints of each way (bytes held, matrix products against the first way's, gradients equal to the first's)."""
    found, expected = {}, None
    for name, way in ways.items():
        chain.zero_grad()
        with FlopCounterMode(display=False) as counter:
            step(chain, way)
        gradients = [parameter.grad.clone() for parameter in chain.parameters()]
        expected = expected or (counter.get_total_flops(), gradients)
        equal = all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))
        found[name] = depth.held_bytes(step, chain, way), counter.get_total_flops() / expected[0], equal
        held, products, _ = found[name]
        print(f"{name:28}{held / MIB:6.2f} MiB, products × {products:.2f}, gradients equal: {equal}")
    return found


def worst_moment(schedule, n, k=1):
    """Of n layers in regions of k: the layer at work, the nodes and the gradients in memory when they are most.

    Node i is the input of layer i, node n + 1 what the last layer gives.
    """
    kept, moments = set(), []
    for action, region in schedule.steps:
        first, last = region * k + 1, min((region + 1) * k, n)
        if action == "keep":
            kept.add(first)
        elif action == "drop":
            kept.remove(first)
        elif action == "backward":
            moments.append((last, kept | set(range(first, last + 2)), {last, last + 1}))
    return max(moments, key=lambda moment: len(moment[1]) + len(moment[2]))


def next_kept(n, slots):
    """The first layer after layer 0 whose input `binomial` keeps or uses at once: n layers, so many slots."""
    return next(stage for action, stage in binomial(n, slots).steps[1:] if action != "forward")


def every_tenth(i, end, kept, again=False):
    """A rule for `unfold`: every tenth input on the way up. again: `binomial` uses the free ones of ten places below.

    For the stretch from i on, 11 - len(kept) places are free: its own first input's counts.
    """
    tenth = i - i % 10 + 10
    if tenth < end:  # on the way up
        return tenth
    return i + next_kept(end - i, 11 - len(kept)) if again else end - 1


def regions_and_one_tape(stages):
    """By the size of the region, and by the budget: (peak, forwards) of both families. Forwards cost 1 each."""
    n, backward = len(stages), sum(stage.backward for stage in stages)
    plans = {k: depth.in_regions(stages, k) for k in range(1, n + 1)}
    budgets = range(int(binomial(n, 1).on(stages).peak), int(plans[1].peak) + 1)
    found = [optimal_schedule(stages, budget) for budget in budgets]
    regions = {k: (plan.peak, plan.time - backward) for k, plan in plans.items()}
    return regions, [(plan.peak, plan.time - backward) for plan in found]


# On a card.

THIN, THICK = "116 thin layers, batch 32", "12 blocks of a GPT, width 1,024"


class Launches(Watcher):
    """Counts the operators that give a card work: views do not, and neither does memory without numbers."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = [result.alias_info for result in func._schema.returns]
        is_view = results and all(alias is not None and not alias.is_write for alias in results)
        if not is_view and not func._schema.name.startswith("aten::empty"):
            self.ran[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})


def launches(run):
    """{operator: how often} in `run()`."""
    # What a checkpoint copies and compares of a module's buffers is hidden from modes, but not from a card.
    with mock.patch.object(state, "without_modes", contextlib.nullcontext), Launches() as found:
        run()
    return found.ran


def milliseconds(seconds):
    """The same, in ms."""
    return {way: 1000 * each for way, each in seconds.items()}


def side_by_side(found):
    """A table of {what: {"plain": …, "recompute": …}}, with the second over the first."""
    pairs = ((what, its.values()) for what, its in found.items())
    rows = [[what, f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.1f}"] for what, (a, b) in pairs]
    return table(["one step", "plain", "recompute", "ratio"], rows)


def two_steps(layers, x, k):
    """A step of the chain, plain and in regions of k."""
    return {"plain": lambda: depth.step(layers, x), "recompute": lambda: depth.step_in_regions(layers, x, k)}


def gpt_of(layers, width, length, device="cpu"):
    """A GPT as a chain, with any initial values."""
    config = GPTConfig(sequence_length=length, width=width, layers=layers, heads=width // 64)
    with initial_values_by_the_device(), torch.device(device):
        return nn.Sequential(*depth.gpt_layers(config))


def on_a_card():
    """The part "recompute": seconds of a step, plain and with recompute, and how deep a GPT fits into a GiB."""
    thin, images = nn.Sequential(*depth.resnet_layers(19)).to(DEVICE), torch.randn(32, 1, 28, 28, device=DEVICE)
    found = {THIN: depth.seconds(two_steps(thin, images, 8), 4)}
    text = torch.randint(256, (4, 512), device=DEVICE)
    found[THICK] = depth.seconds(two_steps(gpt_of(12, 1024, 512, DEVICE), text, 1), 2)
    found["greatest depth"] = greatest_depths(GIB, lambda n: gpt_of(n, 256, 256, DEVICE), text[:, :256])
    return found


def greatest_depths(limit, make, x):
    """How many blocks `make(n)` may have if a step takes at most `limit` bytes, parameters and gradients counted.

    x: on the card, whose allocator says what is taken; without a GPU it is the ledger.
    """

    def fits(n, way):
        try:
            return most_bytes(lambda: way(make(n), x))[1] <= limit
        except torch.OutOfMemoryError:
            return False

    ways = {"plain": depth.step, "recompute": functools.partial(depth.step_in_regions, k=1)}
    with at_most(limit) if x.is_cuda else contextlib.nullcontext():
        return {name: greatest(functools.partial(fits, way=way)) for name, way in ways.items()}


def greatest(fits):
    """The largest n that fits, 0 if not even 1 does: doubled until it does not fit, then the gap is halved."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@contextlib.contextmanager
def at_most(limit):
    """A card's allocator hands out so many bytes more than now, and then raises."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < limit:
        raise RuntimeError(f"the greatest depth needs {limit / GIB:.1f} GiB, and {free / GIB:.1f} are free")
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(min(before, (torch.cuda.memory_reserved() + limit) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


# Drawing.


def draw_nodes(rows):
    """A row for each name: (worst moment, layers that ran). Grey circles and yellow squares are in memory."""
    panels = new_axes(14, 2.3 * len(rows), len(rows), 1)
    for axes, (name, ((layer, nodes, gradients), ran)) in zip(panels, rows.items()):
        for node in range(1, 7):
            color = COLORS["activations"] if node in nodes else "white"
            axes.add_patch(Circle((node, 1), 0.3, facecolor=color, edgecolor="black", linewidth=2))
            axes.text(node, 1, node if node < 6 else "out", ha="center", va="center", fontsize=FONT + 2)
            if node in gradients:
                box(axes, node - 0.2, 0.05, 0.4, 0.4, COLORS["gradients"])
        arrow = {"arrowstyle": "-|>", "linewidth": 3, "color": "black", "mutation_scale": 20}
        axes.annotate("", (layer + 0.22, 0.25), (layer + 0.78, 0.25), arrowprops=arrow)
        title = f"{name}: {len(nodes) + len(gradients)} tensors, {len(ran)} forwards"
        axes.set_title(title, fontsize=FONT + 4, fontweight="bold", loc="left")
        starts = [i for i in range(1, len(ran)) if ran[i] <= ran[i - 1]]
        sweeps = [" ".join(map(str, ran[a:b])) for a, b in zip([0, *starts], [*starts, None])]
        axes.text(6.7, 1, "layers run:\n" + " | ".join(sweeps), va="center", fontsize=FONT + 1)
        axes.set(xlim=(0.6, 10.6), ylim=(-0.05, 1.4), aspect="equal")
        axes.axis("off")
    return panels


def draw_root(depths, plain, regions):
    """Inputs held, measured, against the number of layers; and the two formulas."""
    axes = new_axes(13, 5.6)
    axes.plot(depths, plain, label="keep everything, measured", **{**PLAIN, "linestyle": "none"})
    axes.plot(depths, regions, label="regions of √n, measured", **{**REGIONS, "linestyle": "none"})
    along = range(1, depths[-1] + 1)
    axes.plot(along, [n + 1 for n in along], label="n + 1 and 2√n, counted", **PREDICTED)
    axes.plot(along, [2 * n**0.5 for n in along], **PREDICTED)
    for amounts in (plain, regions):
        note(axes, f"{amounts[-1]:.0f}", (depths[-1], amounts[-1]), (-8, 12), "right", fontsize=FONT + 2)
    look = {"xlim": (0, None), "ylim": (0, 1.1 * plain[-1]), "legend": "best"}
    label_axes(axes, "layers, n", "peak (inputs of one layer)", **look)
    return axes


def draw_depths(layers, rows, clock):
    """Memory and time of a step against the depth. rows: of `depth.against_depth`, for "plain" and "regions"."""
    memory, time = new_axes(16, 5.6, 1, 2)
    names = {"plain": "keep everything", "regions": "regions of √n blocks"}
    words = "peak beside the parameters (MiB)", clock
    for axes, key, unit, label in zip((memory, time), ("bytes", "seconds"), (MIB, 1e-3), words):
        curves = {words: [row[key] for row in rows[name]] for name, words in names.items()}
        draw_lines(axes, layers, curves, (PLAIN, REGIONS), unit)
        axes.set_title("memory, measured" if axes is memory else "time, measured", fontsize=FONT + 2)
        label_axes(axes, "layers", label, xlim=(0, None), ylim=(0, None), xticks=layers)
    memory.legend(fontsize=FONT, frameon=False)
    return memory, time


def draw_region_sizes(held, counted, marks):
    """Peak against the size of a region. held, counted: by size, in inputs. marks: a size by its name."""
    axes = new_axes(13, 5.6)
    axes.plot(counted.keys(), counted.values(), label="n/k + k (w + 1), counted", **PREDICTED)
    axes.plot(held.keys(), held.values(), label="measured", **{**REGIONS, "linestyle": "none"})
    for name, size in marks.items():
        axes.axvline(size, color="#B5B5B5", linewidth=2, zorder=0)
        axes.text(size * 1.03, 0.9 * max(held.values()), name, fontsize=FONT + 2)
    place = {"loc": "upper left", "bbox_to_anchor": (0.12, 0.85)}
    words = "blocks in a region, k", "peak (inputs of one block)"
    label_axes(axes, *words, log="x", at=held.keys(), ylim=(0, None), legend=place)
    return axes


def draw_schedules(schedules):
    """Two in a row, each with its name, what it keeps and what it costs."""
    rows = len(schedules) // 2
    panels = new_axes(16, 4.75 * rows, rows, 2)
    figure = panels[0].figure
    figure.get_layout_engine().set(hspace=0.08)
    for axes, (name, schedule) in zip(panels, schedules.items()):
        schedule.plot(axes).set_ylabel("layer, from 0")
        ran = len(schedule.stages) + schedule.advances
        axes.set_title(f"{name}\nat most {schedule.slots} inputs at a time, {ran} forwards", fontsize=FONT + 2, pad=8)
        legend = axes.get_legend()
        entries = legend.legend_handles, [text.get_text() for text in legend.texts]
        legend.remove()
    figure.legend(*entries, loc="outside lower center", ncols=3, fontsize=FONT + 1, frameon=False)
    return panels


def draw_schedule(schedule, ticks):
    """One schedule of many layers, its bars as thick as they may be. ticks: the layers that get their number."""
    axes = new_axes(14, 9)
    n = len(schedule.stages)
    title = f"{n} layers: {schedule.advances} + {n} = {schedule.advances + n} forwards"
    plot_schedule(schedule.steps, title, axes, [1] * n)
    axes.set(ylabel="layer, counted from 0", yticks=ticks)
    axes.tick_params(axis="y", labelsize=FONT - 2)
    return axes


def draw_budgets(families, shown, points):
    """Forwards against memory, a panel for each title: (regions, one tape) of `regions_and_one_tape`.

    shown: the sizes of regions that get their number. points: other schedules by name, (peak, forwards) by panel.
    """
    for number, (axes, (title, (regions, one_tape))) in enumerate(zip(new_axes(16, 6.2, 1, 2), families.items())):
        axes.plot(*zip(*one_tape), label="one tape at a time: the best", **{**ONE_TAPE, "marker": "none"})
        least, ran = one_tape[0]  # above the axis
        at = next(peak for peak, its in one_tape if its < 330)
        note(axes, f"↑ down to {least:.0f} inputs:\n   {ran:,.0f} forwards", (at, 330), (4, -4), va="top")
        places = [regions[k] for k in shown]
        axes.plot(*zip(*places), label="regions of k", **{**REGIONS, "linestyle": "none"})
        for k, place in zip(shown, places):
            name = f"{k}" if k < max(shown) else f"{k}: keep everything"
            beside = 9 if k == 1 else 0  # regions of 1 and of 2 may lie close together
            note(axes, name, place, (beside, -24), "center" if k < max(shown) else "right")
        for name, where in points.items():
            axes.plot(*where[number], **{**ONE_TAPE, "linestyle": "none", "markeredgecolor": "black"})
            note(axes, name, where[number], (10, 6))
        axes.set_title(title, fontsize=FONT + 2)
        at = {tick: tick for tick in (5, 10, 20, 50, 100, 200, 500, 1000)}
        words = "peak (inputs of one layer)", f"forwards, all {max(regions)} layers"
        label_axes(axes, *words, log="x", at=at, ylim=(0, 330))
        if number == 0:
            axes.legend(fontsize=FONT, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.82))
