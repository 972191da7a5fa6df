"""Where the memory of a large GPT goes on a GPU: what the ledger itemises, beside what the card's allocator says."""

import time
from unittest import mock

import torch
from torch import nn

from minizero import GPT, World
from minizero.memory import CATEGORIES, Ledger
from minizero.ranks.collectives import barrier
from notebooks.tools.card import CUDA, DEVICE, synchronize

POINTS = 300  # of a curve that is kept


def initial_values_by_the_device():
    """Any will do here, and a billion of them from one generator on the CPU take half a minute."""
    return mock.patch.object(nn.init, "normal_", lambda parameter, std=1.0, **_: parameter.data.normal_(std=std))


def steps(comm, config, stage, options):
    """One rank's bytes in the third of its steps, watched, and the seconds of the best of two that nobody watches."""
    with torch.device(comm.device):
        module = GPT(config)
    model = stage(module, comm, **options)
    del module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(config.vocabulary, (1, config.sequence_length + 1), device=comm.device)

    def step():
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(2):
        barrier(comm)
        start = time.perf_counter()
        step()
        synchronize()
        barrier(comm)
        seconds.append(time.perf_counter() - start)
    if CUDA and comm.rank == 0:
        torch.cuda.reset_peak_memory_stats()
    barrier(comm)
    with Ledger(model, optimizer) as ledger:
        step()
    synchronize()
    barrier(comm)
    keys = (*CATEGORIES, "total")
    curve = ledger.curve
    every = max(1, len(curve) // POINTS)  # of so many samples the largest
    kept = [max(curve[i : i + every], key=lambda sample: sample["total"]) for i in range(0, len(curve), every)]
    return {
        "peak": ledger.peak,
        "seconds": min(seconds),
        "curve": {key: [sample[key] for sample in kept] for key in keys} | {"phase": [s.phase for s in kept]},
    }


def measure(config, stage, options, ranks):
    """Rank 0's bytes, the sum of all ranks' peaks, and what the card's allocator had handed out at most."""
    before = torch.cuda.memory_allocated() if CUDA else 0
    with initial_values_by_the_device():
        results = World(ranks, DEVICE, timeout=300).run(steps, config, stage, options)
    together = sum(result["peak"]["total"] for result in results)
    allocated = torch.cuda.max_memory_allocated() - before if CUDA else None
    if CUDA:
        torch.cuda.empty_cache()
    return results[0] | {"all ranks": together, "allocated": allocated}
