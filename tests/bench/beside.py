"""What `python -m tests.bench` measures: (size, {contender: its seconds, and peak in bytes})."""

import copy
import math
import random
import time
from functools import partial

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as their_checkpoint

from minizero import DDP, GPT, GPTConfig, Zero3, all_reduce, barrier
from minizero.memory import Ledger
from minizero.models.gpt import RECOMPUTE
from minizero.recompute import by_function, by_hooks, checkpoint


def measured(steps, limit, comm=None):
    """{contender: seconds}, the best of all rounds in `limit` seconds, and at least of three.

    steps: {contender: function}. They take turns, in another order each round: what ran before leaves its data in the
    caches. In one process the time is the processor's; of ranks it is the clock's, and the slowest counts.
    """
    best, order, shuffle = dict.fromkeys(steps, math.inf), list(steps), random.Random(0).shuffle  # same on all ranks
    clock = time.perf_counter if comm else time.process_time
    spent, rounds = 0.0, 0
    while spent < limit or rounds < 3:
        shuffle(order)
        for name in order:
            if comm:
                barrier(comm)
            start = clock()
            steps[name]()
            seconds = clock() - start
            if comm:
                seconds = all_reduce(torch.tensor(seconds), comm, "max").item()
            best[name], spent = min(best[name], seconds), spent + seconds
        rounds += 1
    return best


def with_peaks(steps, limit, comm=None):
    """{contender: (seconds, peak in bytes)}."""
    best, held = measured(steps, limit, comm), {}
    for name, step in steps.items():
        with Ledger() as watched:
            step()
        held[name] = watched.peak["total"]
    return {name: (best[name], held[name]) for name in steps}


def step_of(model, *batch):
    """A training step as a function without arguments. It leaves no gradients."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engines(limit, comm):
    """On one of two ranks: a training step of a GPT."""
    mesh = init_device_mesh("cpu", (comm.size,))
    batch = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(comm.rank))
    rows = []
    for width in (128, 256, 384):
        plain = GPT(GPTConfig(width=width))
        theirs = copy.deepcopy(plain)
        for block in theirs.blocks:
            fully_shard(block, mesh=mesh)
        for models in (
            {"DDP": DDP(copy.deepcopy(plain), comm), "PyTorch": DistributedDataParallel(copy.deepcopy(plain))},
            {"Zero3": Zero3(plain, comm), "fully_shard": fully_shard(theirs, mesh=mesh)},
        ):
            steps = {name: step_of(model, *batch) for name, model in models.items()}
            rows.append((f"{'/'.join(models)}, width {width}", with_peaks(steps, limit, comm)))
    return rows


def recompute(limit):
    """Forward and backward of a GPT whose blocks run again."""
    ways = {"checkpoint": checkpoint, "by_function": by_function, "by_hooks": by_hooks}
    ways |= {f"PyTorch, use_reentrant={x}": partial(their_checkpoint, use_reentrant=x) for x in (True, False)}
    ways |= {"none": lambda fn, *arguments: fn(*arguments)}
    for width in (64, 128):
        model, batch = GPT(GPTConfig(width=width, recompute="full")), torch.randint(256, (2, 4, 64))

        def step(way, model=model, batch=batch):
            RECOMPUTE["full"] = way
            model(*batch).backward()
            model.zero_grad()
            RECOMPUTE["full"] = checkpoint

        yield f"width {width}", with_peaks({name: partial(step, way) for name, way in ways.items()}, limit)


def ledger(limit):
    """A training step of a GPT, and the same step watched."""
    for batch, width in ((2, 32), (2, 128), (16, 128)):
        model = GPT(GPTConfig(width=width))
        step = step_of(model, *torch.randint(256, (2, batch, 64)))

        def watched(watcher, step=step):
            with watcher():
                step()

        steps = {"nobody": step, "Ledger": partial(watched, Ledger), "MemTracker": partial(watched, MemTracker)}
        yield f"width {width}, batch {batch}", {name: [best] for name, best in measured(steps, limit).items()}
