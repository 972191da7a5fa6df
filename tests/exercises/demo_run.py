"""What a wrong answer does to training (demo.py is the command).

A GPT is trained under every stage, once as it should be and once with the mistake inside. Tiled attention, recomputed
blocks and two micro-batches let most of the package take part. The optimizer is SGD, since Adam hides a gradient that
is only too large. One picture shows the losses, and what rank 0 holds during the last step.
"""

import contextlib
from typing import Any

import torch
from matplotlib.figure import Figure

from minizero import DDP, GPT, GPTConfig, RankFailed, World, Zero1, Zero2, Zero3
from minizero.accumulate import accumulate
from minizero.memory import Ledger
from minizero.pictures import FONT, MIB
from tests.exercises.breaking import broken

STAGES = (DDP, Zero1, Zero2, Zero3)
CONFIG = GPTConfig(vocabulary=64, sequence_length=32, width=64, layers=3, heads=2, attention="tiled", recompute="full")
RIGHT: dict[str, Any] = {"color": "#8A8A8A", "linewidth": 6}
WRONG: dict[str, Any] = {"color": "#D55E00", "linewidth": 2.5, "linestyle": "dashed"}


def train(comm, stage, steps):
    """The losses; and of the last step, in bytes: held after each allocation and free, held before zero_grad, sent."""
    model = stage(GPT(CONFIG), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ledger = Ledger(model, optimizer)
    losses, own = [], []  # this rank's own, since the mean over ranks might be what is broken
    model.register_forward_hook(lambda _, __, loss: own.append(loss.item()))
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        ramps = torch.randint(32, (2, 2, 1), generator=generator) + torch.arange(33)  # they can be learnt
        sent = comm.bytes_sent
        last = step == steps - 1
        with ledger if last else contextlib.nullcontext():
            accumulate(model, [(ramp[:, :-1], ramp[:, 1:]) for ramp in ramps])
            losses.append(sum(own) / len(own))
            own.clear()
            optimizer.step()
            before = ledger.current["total"] if last else 0
            optimizer.zero_grad()
    held = [sample["total"] for sample in ledger.curve]
    return losses, held, before, comm.bytes_sent - sent


def run(stage, steps):
    """What rank 0 saw. If the training did not end, the reason in words."""
    try:
        ranks = World(4, "cpu", timeout=30).run(train, stage, steps)
    except RankFailed as error:
        return str(error).splitlines()[0]
    losses = torch.tensor([found[0] for found in ranks]).mean(0).tolist()
    return losses, *ranks[0][1:]


def draw(name, found):
    """A column for each stage: losses above, memory below. Both show right and wrong in one plot."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    for column, (stage, results) in enumerate(found.items()):
        upper, lower = figure.add_subplot(2, 4, column + 1), figure.add_subplot(2, 4, column + 5)
        upper.set_title(stage, fontsize=FONT, fontweight="bold")
        for result, look, label in zip(results, (RIGHT, WRONG), ("as it should be", name)):
            if isinstance(result, str):
                upper.text(
                    0.5, 0.5, "does not end\n(see the text)", transform=upper.transAxes, ha="center", fontsize=FONT
                )
                continue
            losses, held, *_ = result
            upper.plot(range(1, len(losses) + 1), losses, label=label, **look)
            lower.plot([i / len(held) for i in range(len(held))], [total / MIB for total in held], **look)
        upper.set(xlabel="step", ylabel="loss (nats per token)" if column == 0 else "", yscale="log")
        lower.set(xlabel="share of the last step", ylabel="held by rank 0 (MiB)" if column == 0 else "", ylim=(0, None))
        if column == 0:
            upper.legend(fontsize=FONT - 3, frameon=False)
    return figure


def show(options, console):
    """Train, print and draw. `ValueError` for a mistake that nobody knows."""
    with broken(options.name) as targets:
        wrong = {stage.__name__: run(stage, options.steps) for stage in STAGES}
    found = {stage.__name__: (run(stage, options.steps), wrong[stage.__name__]) for stage in STAGES}
    console.print(f"{options.name}, in {', '.join(targets)}", highlight=False)
    for stage, (right, mistaken) in found.items():
        if isinstance(mistaken, str):
            console.print(f"{stage:6} {mistaken}", highlight=False, soft_wrap=True)
            continue
        for label, (losses, held, before, sent) in (("right", right), ("wrong", mistaken)):
            words = f"peak {max(held) / MIB:.2f}, before zero_grad {before / MIB:.2f}, sent {sent / MIB:.2f} MiB"
            console.print(f"{stage:6} {label}: loss {losses[-1]:.3f}, {words}", highlight=False)
    if all((right[0], *right[2:]) == (mistaken[0], *mistaken[2:]) for right, mistaken in found.values()):
        console.print("No difference: this training does not use it, or not so that it matters.")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"broken-{options.name.replace('/', '-')}.png"
    draw(options.name, found).savefig(path, dpi=100)
    console.print(f"wrote {path}")
