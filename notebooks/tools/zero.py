"""What notebooks 02 to 02c and 04b measure, and how they print: a training step of an engine, the messages of ranks."""

import contextlib
import difflib
import inspect
import threading
import time
from unittest import mock

import torch
from IPython.display import Markdown
from torch import nn

from minizero import GPT, World, Zero3, barrier
from minizero.engines.timeline import Timeline
from minizero.memory import Ledger
from minizero.memory.tape import columns
from minizero.models.text import TEXT, read_text, windows
from minizero.ranks.threads import ThreadTransport
from notebooks.tools.zero_pictures import drawn

STATES = ("parameters", "gradients", "optimizer")


def one_step(comm, stage, config, shape=(2, 64), steps=3, ledger=True, **options):
    """Train a GPT with AdamW under a stage; returns a dictionary about the last step.

    shape: (sequences, tokens in each), on every rank. options: the engine's. In bytes: `held` after the optimizer's
    step, before zero_grad(), and `peak`, both by category; `states` held; `sent`; `curve`, as lists by category.
    Besides, `seconds`, and the `losses` of all steps.
    A ledger slows the step that it watches: without one there are seconds and bytes sent only.
    """
    engine = stage(GPT(config), comm, **options)
    optimizer = torch.optim.AdamW(engine.parameters())
    generator = torch.Generator().manual_seed(comm.rank)
    losses = []
    for step in range(steps):
        x, y = torch.randint(config.vocabulary, (2, *shape), generator=generator).to(comm.device)
        sent, began = comm.bytes_sent, time.perf_counter()
        watched = Ledger(engine, optimizer) if ledger and step == steps - 1 else contextlib.nullcontext()
        with watched:
            loss = engine(x, y)
            loss.backward()
            optimizer.step()
            held = watched.current if isinstance(watched, Ledger) else {}
        losses.append(loss.item())
        seconds, sent = time.perf_counter() - began, comm.bytes_sent - sent
        optimizer.zero_grad()
    found = {"sent": sent, "seconds": seconds, "losses": losses, "held": held}
    if isinstance(watched, Ledger):
        curve = columns(watched.curve)
        del curve["operator"]
        found |= {"peak": watched.peak, "states": sum(held[state] for state in STATES), "curve": curve}
    return found


def traveled(comm, stage, config, shape=(2, 64)):
    """What a rank sends in a training step, by phase and collective: {("backward", "reduce_scatter"): 1.0, …}.

    In messages of the size that a ring sends of all parameters: (N - 1)/N of 4Ψ bytes. So a number is how often the
    model travels. Each engine gathers when it needs to, and not ahead.
    """
    engine = stage(GPT(config), comm, **({"prefetch": 0} if stage is Zero3 else {}))
    optimizer = torch.optim.AdamW(engine.parameters())
    once = 4 * config.count_parameters()[0] * (comm.size - 1) / comm.size
    phase, sent, found = "", 0, {}

    def note(operation, label, began):
        nonlocal sent
        found[phase, operation] = found.get((phase, operation), 0) + (comm.bytes_sent - sent) / once
        sent = comm.bytes_sent

    comm.observers.append(note)
    x, y = torch.zeros((2, *shape), dtype=torch.long, device=comm.device)
    for _ in range(2):  # the second step begins as each later one does
        found.clear()
        phase = "forward"
        loss = engine(x, y)
        phase = "backward"
        loss.backward()
        phase = "step"
        optimizer.step()
        optimizer.zero_grad()
    return found


def batch(comm, step, sequences=8, tokens=64):
    """x and y of this rank: its part of the sequences of a step, which are the same on any number of ranks."""
    text = read_text(TEXT, tokens)
    starts = torch.randint(len(text) - tokens, (sequences,), generator=torch.Generator().manual_seed(step))
    return windows(text, starts.chunk(comm.size)[comm.rank].tolist(), tokens)


@contextlib.contextmanager
def each_message(call):
    """While the block runs, `call(rank, other rank, bytes)` follows each message between two ranks of a World.

    It runs in the sender's thread. A rank has one link: its messages, also of its other threads, follow each other.
    """
    real, links = ThreadTransport.transfer, {}

    def transfer(self, outgoing, dst, incoming, src):
        real(self, outgoing, dst, incoming, src)
        if outgoing is not None:
            with links.setdefault(self.world_rank, threading.Lock()):
                call(self.world_rank, self.ranks[dst], outgoing.nbytes)

    with mock.patch.object(ThreadTransport, "transfer", transfer):
        yield


def slow_link(bytes_per_second):
    """A substitute for a network: each message keeps its sender's link busy for bytes / bytes_per_second."""
    return each_message(lambda rank, other, size: time.sleep(size / bytes_per_second))


def sent_between(machine, size, fn, *args, **options):
    """What rank 0 returns of two steps of `fn`, such as `one_step`, and what they send between machines in a step.

    machine: how many ranks stand in one. size: ranks in all. The bytes are those of all ranks: a run of two steps less
    a run of one.
    """
    crossed, total = [], []

    def count(rank, other, sent):
        if rank // machine != other // machine:
            crossed.append(sent)

    for steps in (1, 2):
        crossed.clear()
        with each_message(count):
            found = World(size).run(fn, *args, steps=steps, ledger=steps == 2, **options)[0]
        total.append(sum(crossed))
    return found, total[1] - total[0]


def places(kept, rank):
    """Of the toy of notebook 02: which of the eight places each tensor holds that a rank keeps (w, g, m, v)."""
    names = ("parameters w", "gradients g", "optimizer m", "optimizer v")
    own = range(2 * rank, 2 * rank + 2)
    return {name: range(8) if len(tensor) == 8 else own for name, tensor in zip(names, kept)}


def code(stage, name):
    """The lines of a stage's own method, without comments. No lines if it has no such method."""
    lines = inspect.getsource(stage.__dict__[name]).splitlines() if name in stage.__dict__ else []
    return [line.split("  #")[0] for line in lines if line.strip()[:1] not in ("#", '"')]


def changes(one, other, *names):
    """What another stage does differently: the lines of code that differ in its methods of these names."""
    text = ""
    for name in names:
        lines = list(difflib.unified_diff(code(one, name), code(other, name), lineterm="", n=2))[2:]
        if lines:
            text += "\n".join([f"{name}:", *(line for line in lines if not line.startswith("@@"))]) + "\n\n"
    return f"- {one.__name__}\n+ {other.__name__}\n\n" + text.rstrip()


def table(head, rows):
    """A table: the first column to the left, the others to the right. Numbers get two decimals."""
    cells = [[f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *cells]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


# A machine whose times are known: its computation and its network are pauses, so that the picture shows who waits.


class Pause(torch.autograd.Function):
    """The identity, after a pause in forward, and twice as long a one in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Three layers, each of which pretends to compute for `seconds` / 3 in forward, and twice as long in backward."""

    def __init__(self, seconds, width=256):
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList([nn.Parameter(torch.eye(width)) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = Pause.apply(x @ layer, self.seconds / 3)  # so backward computes before the layer has its gradient
        return x


BLOCK_BYTES = 3 * 256 * 256 * 4


def pretend(**options):
    """Train four blocks under stage 3 on two ranks of a machine of pauses; returns what rank 0 saw.

    A block's forward takes 40 ms. Its all-gather keeps a rank's link busy for 20 ms, and so does its reduce-scatter.
    Of the faster of two steps: `events` (`Timeline`), `seconds`, bytes `sent`. Of another: the most bytes of
    `parameters` at one moment. `losses` of all steps.
    """
    with slow_link(BLOCK_BYTES / 2 / 0.02):  # of two ranks each sends half
        return World(2).run(_pretend, options)[0]


def _pretend(comm, options):
    model = nn.Sequential(*[Block(0.04) for _ in range(4)])
    engine = Zero3(model, comm, units=list(model), **options)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-3)
    losses = []

    def step():
        loss = engine(torch.ones(4, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step()  # a rank learns here in which order it uses the blocks
    with Ledger(engine, optimizer) as ledger:
        step()
    best = {"seconds": float("inf")}
    for _ in range(2):  # the faster step counts: other work on the machine only slows one down
        barrier(comm)
        sent = comm.bytes_sent
        with Timeline(engine, optimizer) as timeline:
            step()
        events = drawn(timeline.events)
        seconds = max(event.end for event in events) - min(event.start for event in events)
        if seconds < best["seconds"]:
            best = {"events": events, "seconds": seconds, "sent": comm.bytes_sent - sent}
    return best | {"losses": losses, "parameters": ledger.peak["parameters"]}
