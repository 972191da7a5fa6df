"""The loop, and what one run of it returns.

It is the one that every PyTorch user knows. Only the line that wraps the model differs between the stages.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minizero import checkpoint
from minizero.engines import STAGES
from minizero.memory import predict, predict_sent
from minizero.models.gpt import GPT, GPTConfig
from minizero.models.text import windows
from minizero.ranks.collectives import all_reduce
from minizero.ranks.comm import Comm
from minizero.train.measured import Measured, recorded


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run; `batch_size` sequences per rank. trace: record its last step.

    save, resume: folders of a checkpoint. save_every: steps after which it is written anew; at the end it is, too.
    """

    config: GPTConfig
    steps: int
    batch_size: int
    learning_rate: float
    dtype: torch.dtype
    save: Path | None = None
    resume: Path | None = None
    save_every: int = 10
    trace: bool = False


def batches(text: torch.Tensor, job: Job, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each step's batch: x and y, (batch_size, sequence_length), y one byte ahead of x."""
    length = job.config.sequence_length
    generator = torch.Generator().manual_seed(job.config.seed)  # every rank draws the same, and takes its part
    while True:
        starts = torch.randint(len(text) - length, (world_size, job.batch_size), generator=generator)[rank]
        yield windows(text, starts.tolist(), length)


def train(comm: Comm, stage: int, text: torch.Tensor, job: Job, show: Callable[..., None]) -> dict[str, Any]:
    """Train under one stage, and measure: returns a run as `report` describes it."""
    model = STAGES[stage](GPT(job.config), comm, dtype=None if job.dtype == torch.float32 else job.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    first = checkpoint.load(job.resume, model, optimizer) if job.resume is not None else 0
    for group in optimizer.param_groups:
        group["lr"] = job.learning_rate  # load() brings the one that was saved; this run's options hold
    last = first + job.steps
    measured, losses = Measured(model, optimizer, comm, job.steps), []
    # The batches before `first` are drawn again and dropped: a resumed run sees those that one long run would.
    todo = itertools.islice(batches(text, job, comm.rank, comm.size), first, last)
    for step, (x, y) in enumerate(todo):
        last_one = job.trace and step == job.steps - 1
        watch: Any = recorded(model, optimizer, comm) if last_one else contextlib.nullcontext([])
        with watch as events, measured.step(step):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            measured.steps(step)
            optimizer.zero_grad()
            loss.item()  # waits until a GPU has done the step

        losses.append(all_reduce(loss.detach(), comm, "mean").item())
        if comm.rank == 0:
            tokens = comm.size * job.batch_size * job.config.sequence_length
            show(step + 1, losses[-1], tokens / measured.seconds, measured.ledger.peak["total"])
        if job.save is not None and ((step + 1) % job.save_every == 0 or step + 1 == job.steps):
            checkpoint.save(job.save, model, optimizer, first + step + 1)
    total, root = job.config.count_parameters()
    sent = predict_sent(total, comm.size, stage, n_root=root, bytes_each=job.dtype.itemsize)
    return {
        "stage": stage,
        "name": STAGES[stage].__name__,
        "steps_before": first,
        "losses": losses,
        "bytes_sent_formula": sent,
        "events": events,
        "predicted": predict(total, comm.size, stage, dtype=job.dtype),
    } | measured.results()
