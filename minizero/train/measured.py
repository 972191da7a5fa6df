"""What the main job measures while it trains: bytes held, bytes sent, seconds; and for `--trace` who waits for whom.

A ledger slows the steps that it watches, and on one machine it slows the other ranks, too. So it watches every other
step, on one rank at a time, and the steps between give the time.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from minizero.engines.any_model.engine import AnyModel
from minizero.engines.timeline import Timeline
from minizero.memory import CATEGORIES, Ledger
from minizero.pictures.timeline import Event
from minizero.ranks.agreement import words_of_all
from minizero.ranks.collectives import barrier
from minizero.ranks.comm import Comm

KEYS = (*CATEGORIES, "total")


class Measured:
    """Around the steps of a run. After a step: `seconds` and `sent` of it, `ledger` of the last one watched."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, steps: int) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.always = steps < 2 * comm.size  # too few steps for the ranks to take turns
        self.seconds, self.sent = 0.0, 0
        self.unwatched: list[float] = []  # seconds of the steps that no ledger watched
        self.ledger: Any = None  # a `Ledger`, of the step that runs, or of the last one watched
        self.persistent: dict[str, int] = {}

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step. The step must wait for a GPU itself."""
        sent, start = self.comm.bytes_sent, time.perf_counter()
        if self.watches(number):
            with Ledger(self.model, self.optimizer) as self.ledger:
                yield
        else:
            yield
        self.seconds, self.sent = time.perf_counter() - start, self.comm.bytes_sent - sent
        if number % 2 == 1 and not self.watches(number):
            self.unwatched.append(self.seconds)

    def watches(self, number: int) -> bool:
        """Is it this rank's turn?"""
        return self.always or number % (2 * self.comm.size) == 2 * self.comm.rank

    def steps(self, number: int) -> None:
        """To be called between optimizer.step() and zero_grad(), when only what lasts is held, and gradients."""
        if self.watches(number) and self.ledger is not None:
            self.persistent = self.ledger.current

    def results(self) -> dict[str, Any]:
        """As `report` describes them. Collective."""
        both = {"persistent": self.persistent, "peak": self.ledger.peak}
        mine = {name: {key: held[key] for key in KEYS} for name, held in both.items()}
        curve = self.ledger.curve
        return {
            "step_seconds": median(self.unwatched) if self.unwatched else None,
            "bytes_sent": self.sent,
            "ranks": [*map(json.loads, words_of_all(self.comm, "measured", json.dumps(mine)))],
            "curve": {"phase": [sample.phase for sample in curve], "number": [sample.number for sample in curve]}
            | {key: [sample[key] for sample in curve] for key in KEYS},
        }


@contextlib.contextmanager
def recorded(model: AnyModel, optimizer: torch.optim.Optimizer, comm: Comm) -> Iterator[list[Event]]:
    """For Perfetto, ui.perfetto.dev: a list that has all ranks' events once the block is over. A collective.

    Clocks of two hosts differ. So each rank counts from a barrier, which all leave within a message's time.
    """
    everyones: list[Event] = []
    barrier(comm)
    start = time.perf_counter()
    with Timeline(model, optimizer) as timeline:
        yield everyones
    mine = [(event.rank, event.lane, event.name, event.start - start, event.end - start) for event in timeline.events]
    everyones += (
        Event(*event) for words in words_of_all(comm, "trace", json.dumps(mine)) for event in json.loads(words)
    )
