"""What notebook 06 trains, measures and draws."""

import contextlib
import functools
import itertools
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minizero import DDP, GPT, GPTConfig, World, all_gather, all_reduce, barrier
from minizero.accumulate import accumulate
from minizero.engines.timeline import Timeline
from minizero.memory import Ledger
from minizero.models.text import TEXT, read_text, windows
from minizero.pictures import MIB, draw_steps
from minizero.pictures.style import COLORS, FONT, box, draw_bars, keys, label_axes, note, sheet
from notebooks.tools.zero import Block, slow_link

LENGTH = 32  # tokens of a sequence
SMALL = GPTConfig(sequence_length=LENGTH, width=64, layers=1, heads=4)
DEEP = GPTConfig(sequence_length=LENGTH, width=64, layers=4, heads=4)
BIG = GPTConfig(sequence_length=LENGTH, width=128, layers=4, heads=4)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8C8C8C"
PARTS = ("#F3DCE8", "#E0A9C7", "#B5648F", "#5E2750")  # of a batch
TEST = 20  # the last twentieth of the text


def sample(count, seed, test=False):
    """x and y, (count, LENGTH), from random places of the text; y is one byte ahead."""
    text = read_text(TEXT, LENGTH)
    text = text[-len(text) // TEST :] if test else text[: -len(text) // TEST]
    starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    return windows(text, starts.tolist(), LENGTH)


def cut(x, y, pieces):
    """The batch as a list of micro-batches."""
    return list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))


def window_of(*targets):
    """A micro-batch of 32 sequences for each number of targets; all places after these are padding, -100."""
    window = []
    for seed, count in enumerate(targets):
        x, y = sample(32, 10 + seed)
        window.append((x, torch.where(torch.arange(y.numel()).view(y.shape) < count, y, -100)))
    return window


def gradient(model):
    """All that stands in .grad, as one vector, on the CPU."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).cpu()


def apart(one, other):
    """‖one − other‖ / ‖other‖."""
    return ((one - other).norm() / other.norm()).item()


def moved_by(kind, vector):
    """How far one step of an optimizer goes with this gradient."""
    parameter = nn.Parameter(torch.zeros_like(vector))
    parameter.grad = vector.clone()
    kind([parameter], lr=1e-3).step()
    return parameter.norm().item()


@functools.cache
def watch(batch_size, pieces, recompute, device):
    """The ledger of a training step on so many sequences, in so many micro-batches."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**vars(BIG) | {"recompute": recompute})).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    window = cut(*(part.to(device) for part in sample(batch_size, 1)), pieces)
    ledger, first = Ledger(model, optimizer), [tuple(part[:1] for part in window[0])]
    for watched, batch in ((contextlib.nullcontext(), first), (ledger, window)):
        with watched:
            accumulate(model, batch)
            optimizer.step()  # the first one makes the optimizer's states: one sequence does
            optimizer.zero_grad()
    return ledger


def peaks(ledger):
    """In MiB, the most that these held at one moment: activations; activations and temporary tensors; all."""
    at_once = max(sample["activations"] + sample["temporary"] for sample in ledger.curve)
    return [bytes_ / MIB for bytes_ in (ledger.peak["activations"], at_once, ledger.peak["total"])]


def what_is_done(comm, pieces):
    """One step on this rank's part of 128 sequences: sequences of each forward, all-reduce, update, as they happen."""
    engine, done = DDP(GPT(SMALL), comm), []
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine.module.register_forward_hook(lambda module, inputs, output: done.append(len(inputs[0])))
    optimizer.register_step_post_hook(lambda *_: done.append("update"))
    comm.observers.append(lambda operation, label, began: done.append(operation) if label != "accumulate" else None)
    x, y = (part.chunk(comm.size)[comm.rank].to(comm.device) for part in sample(128, 1))
    accumulate(engine, cut(x, y, pieces))
    vector = gradient(engine.module)
    optimizer.step()
    return done, vector


class Classifier(nn.Module):
    """A norm between two layers; model(x, y) is the mean loss."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


class Pauses(nn.Module):
    """Three blocks that pretend to compute, so that the picture does not depend on the machine."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(0.006) for _ in range(3)])

    def forward(self, x, y):
        return self.blocks(x).square().mean()


def talk(no_sync, pieces=4):
    """A window on two ranks of a machine of pauses: what both did when. Each block's pass is one event."""

    def step(comm):
        engine = DDP(Pauses(), comm)
        window = [(torch.ones(4, 256), torch.zeros(4, dtype=torch.long))] * pieces
        accumulate(engine, window, no_sync=no_sync)  # warm
        barrier(comm)
        with Timeline(engine) as timeline:
            accumulate(engine, window, no_sync=no_sync)
        computed = sorted(
            (event for event in timeline.events if event.lane == "compute"), key=lambda event: event.start
        )
        passes = [next(its) for _, its in itertools.groupby(computed, lambda event: event.name)]
        talks = [event for event in timeline.events if event.lane == "all-reduce" and event.name != "accumulate"]
        return passes + talks  # "accumulate" counts: scalars

    with slow_link(40e6):
        return [event for events in World(2).run(step) for event in events]


def race(comm, turns=24, patience=4):
    """Seconds of a step by way, for two processes, and those of the wall's clock: each the best of several turns.

    The ways alternate. They stop when none has become faster by 2 % for so many turns: what else the machine does only
    slows one down. Without a GPU the first is the time of the processor, which does not grow while other programs run
    or while it waits. Of two processes it is the slower one's.
    """
    on_gpu = comm.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    torch.set_num_threads(1)
    config = GPTConfig(sequence_length=LENGTH, width=128, layers=1, heads=4)
    alone, engine = GPT(config).to(comm.device), DDP(GPT(config), comm)
    batch = torch.randint(256, (256, LENGTH), generator=torch.Generator().manual_seed(0)).to(comm.device)
    ways = {"1 × 128": (alone, 128, 1), "4 × 32": (alone, 128, 4), "2 × 64": (engine, 128, 1)}
    ways |= {"2 × (2 × 32)": (engine, 128, 2), "2 × 128": (engine, 256, 1)}
    best, wall, better = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, float("inf")), 0
    for turn in range(turns):
        for way, (model, sequences, pieces) in ways.items():
            x = batch[:sequences].chunk(comm.size)[comm.rank] if model is engine else batch[:sequences]
            barrier(comm)
            start, begin = clock(), time.perf_counter()
            if comm.rank == 0 or way not in ("1 × 128", "4 × 32"):
                accumulate(model, cut(x, x, pieces)).item()
                model.zero_grad()
            if on_gpu:
                torch.cuda.synchronize()
            used = torch.tensor([[clock() - start, time.perf_counter() - begin]], device=comm.device)
            seconds, waited = all_gather(used, comm).max(0).values.tolist()
            better = turn if seconds < 0.98 * best[way] else better
            best[way], wall[way] = min(best[way], seconds), min(wall[way], waited)
        if turn - better >= patience:  # on all ranks at once: they have the same seconds
            break
    return best, wall


def with_pytorch(comm):
    """Gradients of a window by PyTorch's DDP, on two ranks: as they should be, and wrong in two ways."""
    model = DistributedDataParallel(GPT(SMALL).to(comm.device))
    mine = window_of(1024, 256, 64, 4)[comm.rank :: comm.size]
    own = sum((y != -100).sum() for _, y in mine)
    total = all_reduce(own, comm)  # of all ranks
    factors = {"as it should be": comm.size / total, "not times the ranks": 1 / total, "own targets only": 1 / own}
    found = {}
    for way, factor in factors.items():
        model.zero_grad()
        for number, (x, y) in enumerate(mine, start=1):
            with model.no_sync() if number < len(mine) else contextlib.nullcontext():
                loss = model(x.to(comm.device), y.to(comm.device)) * (y != -100).sum()
                (loss * factor).backward()
        found[way] = gradient(model)
    return found


def train(batch_size, sequences=128 * 40, device="cpu"):
    """The model, and points (steps so far, loss on unseen text), of a run over so many sequences."""
    torch.manual_seed(0)
    model, unseen = GPT(SMALL).to(device), [part.to(device) for part in sample(256, 0, test=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    points, steps = [], sequences // batch_size
    for step in range(steps + 1):
        if step in (0, 10, 20, 40, 80, 160, 320, 640):
            with torch.no_grad():
                points.append((step, model(*unseen).item()))
        if step < steps:
            x, y = sample(batch_size, step + 1)
            model(x.to(device), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, points


# Pictures.


def draw_weights(targets, weights):
    """How much one token of each micro-batch counts. A bar begins at 1, what it counts in the whole batch."""
    axes = sheet(14, 5.6)
    axes.bar(range(len(targets)), [weight - 1 for weight in weights], 0.6, bottom=1, color=ORANGE)
    for place, weight in enumerate(weights):
        shift, side = ((0, 6), "bottom") if weight > 1 else ((0, -6), "top")
        note(axes, f"{weight:.2g}", (place, weight), shift, "center", va=side, fontsize=FONT + 4, weight="bold")
    axes.axhline(1, color="black", linestyle="dashed", linewidth=2)
    note(axes, "as in one batch", (3.95, 1), (0, -6), "right", va="top")
    at = {place: f"{count} targets" for place, count in enumerate(targets)}
    label_axes(axes, "micro-batch", "weight of one token", at=at, yscale="log", ylim=(0.12, 300), xlim=(-0.6, 4))
    axes.set_yticks([0.1, 1, 10, 100], ["", "1", "10", "100"])
    axes.tick_params(axis="x", labelsize=FONT + 1)
    return axes.figure


def draw_cuts(runs):
    """A batch cut in time and in space, side by side. runs: by title, for each GPU what it does, as `what_is_done`."""
    for axes, (title, gpus) in zip(sheet(16, 6.4, 1, len(runs)), runs.items()):
        parts = [what for done in gpus for what in done if isinstance(what, int)]
        axes.text(0, -1.6, f"one batch of {sum(parts)} sequences", fontsize=FONT)
        for number, part in enumerate(parts):
            _box(axes, 5 * number / len(parts), -1.5, 5 / len(parts), 0.6, str(part), PARTS[number % 4])
        number = 0
        for row, done in enumerate(gpus):
            now = 0.0
            for what in done:
                if isinstance(what, int):
                    _box(axes, now, row, 0.62, 0.8, str(what), PARTS[number % 4])
                    _box(axes, now + 0.62, row, 0.35, 0.8, "+ g" if now else "g", COLORS["gradients"])
                    now, number = now + 1.03, number + 1
                elif what == "update":
                    _box(axes, now, row, 0.8, 0.8, "update", COLORS["optimizer"])
                elif row == 0 < len(gpus) - 1:  # one GPU has nobody to talk to
                    _box(axes, now, 0, 0.75, len(gpus) - 0.2, "all-\nreduce", COLORS["gradients"])
                now += 0.81 * (what == "all_reduce" and len(gpus) > 1)
        axes.set_title(title, fontsize=FONT + 4, fontweight="bold")
        axes.set_yticks([row + 0.4 for row in range(len(gpus))], [f"GPU {row}" for row in range(len(gpus))])
        label_axes(axes, "in this order →", "", at=[], xlim=(-0.02, 5.02), ylim=(4, -2.1))
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0)
    return axes.figure


def _box(axes, left, top, width, height, words, color):
    dark = color in (*PARTS[2:], COLORS["optimizer"])
    box(axes, left, top, width, height, color, words, size=FONT + 1, ink="white" if dark else "black")


def draw_hills(steps):
    """As `draw_steps`, of two. In the second the phases are narrower than their names, so they get one name for all."""
    _, second, _ = draw_steps(steps)
    for text in [text for text in second.texts if not text.get_text().startswith("peak")]:
        text.remove()
    look = {"xycoords": "axes fraction", "ha": "center", "fontsize": FONT}
    second.annotate("four times forward and backward", (0.5, 1.02), **look)
    phases = [sample.phase for sample in [*steps.values()][1]]
    numbers = [sample.number for sample in [*steps.values()][1]]
    for phase in ("forward", "backward", "optimizer"):
        first = phases.index(phase)
        last = next((i for i in range(first, len(phases)) if phases[i] != phase), len(phases) - 1)
        at = ((numbers[first] + numbers[last]) / 2, 0.6)
        words = "optimizer step" if phase == "optimizer" else phase
        second.annotate(words, at, rotation=90, va="center", **look | {"xycoords": second.get_xaxis_transform()})


def draw_race(best):
    """Sequences in a second, by way. best: seconds of a step, as `race` returns them."""
    axes = sheet(14, 5.4)
    sequences = {way: 256 if way == "2 × 128" else 128 for way in best}
    rates = {way: count / best[way] for way, count in sequences.items()}
    words = [f"{1e3 * best[way]:.0f} ms for {count}" for way, count in sequences.items()]
    draw_bars(axes, rates, words, height=0.7, color=[PARTS[2] if way.startswith("2") else GREY for way in best])
    label_axes(axes, "sequences in a second of the processor", "", FONT + 1, xlim=(0, 1.25 * max(rates.values())))
    keys(axes.figure, {"one process": GREY, "two processes": PARTS[2]}, loc="outside upper right", ncols=2)
    return axes.figure


def draw_training(curves):
    """Loss over steps, and over what was read. curves: by batch size, points (steps, loss)."""
    panels = sheet(16, 5.6, 1, 2, sharey=True)
    last = min(points[-1][0] for points in curves.values())
    for (size, points), color, style in zip(curves.items(), (BLUE, ORANGE, "black"), ("o-", "s--", "^:")):
        steps, losses = zip(*points)
        look = {"color": color, "linewidth": 3, "markersize": 9, "label": f"batches of {size}"}
        count = sum(step <= last for step in steps)
        panels[0].plot(steps[:count], losses[:count], style, **look)
        panels[1].plot([step * size / 1000 for step in steps], losses, style, **look)
    for axes, title, words in zip(panels, ("equal steps", "equal reading"), ("steps", "sequences read (thousands)")):
        axes.set_title(title, fontsize=FONT + 2, fontweight="bold")
        label_axes(axes, words, "loss on unseen text\n(nats per byte)" if axes is panels[0] else "")
    panels[0].legend(fontsize=FONT, frameon=False)
    return axes.figure
