"""One step of all ranks for Perfetto, ui.perfetto.dev: who computes, who sends, who waits.

Clocks of two hosts differ. So each rank counts from a barrier before the step, which all leave within a message's time.
"""

import contextlib
import json
import time
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from minizero.engines.any_model.engine import AnyModel
from minizero.engines.timeline import Timeline
from minizero.pictures.timeline import Event
from minizero.ranks.collectives import all_gather, all_reduce, barrier
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
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(comm.device)
    longest = int(all_reduce(torch.tensor(len(text), device=comm.device), comm, "max"))
    texts = all_gather(F.pad(text, (0, longest - len(text)), value=ord(" "))[None], comm)
    everyones += (Event(*event) for line in texts.cpu().numpy() for event in json.loads(bytes(line)))
