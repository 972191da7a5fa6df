"""One step of all ranks for Perfetto, ui.perfetto.dev: who computes, who sends, who waits.

Clocks of two hosts differ. So each rank counts from a barrier before the step, which all leave within a message's time.
"""

import contextlib
import json
import time
from collections.abc import Iterator

import torch

from minizero.engines.any_model.engine import AnyModel
from minizero.engines.timeline import Timeline
from minizero.pictures.timeline import Event
from minizero.ranks.agreement import words_of_all
from minizero.ranks.collectives import barrier
from minizero.ranks.comm import Comm


@contextlib.contextmanager
def recorded(model: AnyModel, optimizer: torch.optim.Optimizer, comm: Comm) -> Iterator[list[Event]]:
    """A list that has the events of all ranks once the block is over. A collective."""
    everyones: list[Event] = []
    barrier(comm)
    start = time.perf_counter()
    with Timeline(model, optimizer) as timeline:
        yield everyones
    mine = [(event.rank, event.lane, event.name, event.start - start, event.end - start) for event in timeline.events]
    everyones += (
        Event(*event) for words in words_of_all(comm, "trace", json.dumps(mine)) for event in json.loads(words)
    )
