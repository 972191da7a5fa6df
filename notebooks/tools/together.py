"""What notebook 09 measures: one step of a GPT with any set of techniques, without numbers or on real ranks."""

import contextlib
import dataclasses
import functools
import io
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional as F

from minizero import GPT
from minizero.memory import Ledger
from minizero.pictures import draw_parts
from minizero.pictures.style import draw_bars, label_axes, new_axes, note
from minizero.ranks.one_of_many import one_of_many
from minizero.xray import Plan
from minizero.xray.case import Case
from minizero.xray.fake import Copier, pretend
from minizero.xray.step import measure
from notebooks.tools.zero import table

GIB = 2**30
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "total", "host")


def gpt(config, fused=False):
    """A GPT; with fused=True its attention is PyTorch's own, which keeps no scores."""
    model = GPT(dataclasses.replace(config, attention="tiled") if fused else config)
    for block in model.blocks:
        if fused:
            block.attention.from_flash = attention
    return model


def attention(q, k, v, *, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@functools.cache
def case(config, batch, fused):
    """What the X-ray needs of a GPT: the model and its inputs, on a device without numbers."""
    with torch.device("meta"):
        return Case(gpt(config, fused), torch.zeros(2, batch, config.sequence_length, dtype=torch.long).unbind())


def xray_of(config, batch, fused=False, **plan):
    """The figures of one step on one rank of four, unless `ranks` says other."""
    return case(config, batch, fused).run(Plan(**{"ranks": 4} | plan))


@functools.cache
def watch(case, wrap, train):
    """The ledger of the second step of one rank of four, without numbers, and the bytes that it sends.

    wrap(model, comm) returns an engine, train(engine, batch, optimizer) runs a step.
    """
    with pretend() as mode:
        comm = one_of_many(4)
        model, batch = Copier(mode).copy((case.model, case.inputs))
        engine = wrap(model, comm)
        optimizer = torch.optim.AdamW(engine.parameters())
        train(engine, [tensor.clone() for tensor in batch], optimizer)  # makes states; learns what to gather ahead
        sent = comm.bytes_sent
        with Ledger(engine, optimizer) as ledger:
            train(engine, [tensor.clone() for tensor in batch], optimizer)
    return ledger, comm.bytes_sent - sent


def really(comm, config, batch, fused=False, **plan):
    """Two steps on a real rank: the loss of the second, its peak in bytes, and the bytes that it sends."""
    losses, module = [], gpt(config, fused).to(comm.device)
    module.register_forward_hook(lambda module, inputs, loss: losses.append(loss.item()))
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = torch.randint(config.vocabulary, (2, batch, config.sequence_length), generator=generator)
    plan = Plan(**{"ranks": comm.size} | plan)
    found = measure(module, tokens.to(comm.device).unbind(), plan, torch.optim.AdamW, comm)
    last = losses[-plan.micro_batches :]
    return sum(last) / len(last), found.ledger.peak["total"], found.sent


def matrix(rows):
    """The largest amount of each category in percent of the first row's, and what changed by a tenth or more.

    rows: peaks by name. `host` is in percent of the first row's total.
    """
    first, before, lines = next(iter(rows.values())), None, []
    for name, peak in rows.items():
        line = [name]
        for category in CATEGORIES:
            share = 100 * peak[category] / first["total" if category == "host" else category]
            mark = mark_of(peak[category], before[category]) if before else ""
            line.append(f"{mark} {share:.0f} %")
        lines.append(line)
        before = peak
    return table(["most of each in a step", *CATEGORIES], lines)


def mark_of(after, before):
    """▼ if a tenth or more is gone, ▲ if a tenth or more has come."""
    return "▼" if after < 0.9 * before else "▲" if after > 1.1 * before else ""


def draw_ladder(steps, usable):
    """A bar for each step: what is held at its peak, messages under way counted as temporary.

    steps: X-rays by name. usable: bytes of a card, a line behind the bars.
    """
    bars = {}
    for name, step in steps.items():
        parts = dict(step.parts)
        parts["temporary"] = parts.get("temporary", 0) + parts.pop("communication", 0)
        bars[name.replace("Attention", "-\nAttention").replace("micro-", "micro-\n")] = parts
    axes = draw_parts(bars, new_axes(17, 7.5), unit=(GIB, "GiB on a card, at the peak"), limit=usable, smallest=0.03)
    axes.lines[0].set_zorder(0)
    note(axes, f"{usable / GIB:.1f} GiB may be used", (len(bars) - 0.55, usable / GIB), (0, 6), "right")


def most_layers(fits, guess):
    """The largest number of layers that fits: `fits(layers)` runs a step. Every answer is a run: n fits, n + 1 not."""
    layers = max(1, guess)
    while not fits(layers):
        layers -= 1
    while fits(layers + 1):
        layers += 1
    return layers


def draw_largest(found):
    """A bar for each name: how many billion parameters fit. found: parameters and layers by name."""
    axes = new_axes(14, 5)
    sizes = {name: parameters / 1e9 for name, (parameters, _) in found.items()}
    ends = [f"{size:.1f} billion, {layers} layers" for size, (_, layers) in zip(sizes.values(), found.values())]
    draw_bars(axes, sizes, ends, color="#0072B2")
    words = "parameters of the largest model that fits, in billions (X-ray)"
    label_axes(axes, words, "", xlim=(0, 1.35 * max(sizes.values())))


@contextlib.contextmanager
def folder_of(name, text):
    """A file of such a name and text, for the time of the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8")
        yield path


def text_of(show):
    """What `show(console)` prints, at 100 columns."""
    show(console := Console(width=100, file=io.StringIO(), force_jupyter=False, force_terminal=False))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
