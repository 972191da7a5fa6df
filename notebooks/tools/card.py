"""A GPU: time and memory on it, and what was once recorded on one that is not here.

    figures(part, measure)      measured now if there is a GPU, else recorded: whose, and the figures
    recorded(part)              what `make gpu` left in notebooks/results/<card>/results.json

A notebook never stops here. What is missing, cut or too large is a sentence, and `figures` is None.
Without a GPU the same code runs on the CPU, so that it can be tried: time then comes from the processor's clock and
memory from the ledger.
"""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch

import flash  # noqa: F401  before anything imports Triton: without a GPU it has to be the interpreter
from minizero.memory import Ledger

CUDA = torch.cuda.is_available()
DEVICE = "cuda:0" if CUDA else "cpu"  # one card: a `World` would spread its ranks over "cuda"
MIB, GIB = 2**20, 2**30
RESULTS = Path(__file__).parents[1] / "results"


class Run(NamedTuple):
    """Figures of a part of `make gpu`, and whose they are."""

    card: str  # "NVIDIA H200, recorded 2026-11-27", or this machine's
    figures: dict


def figures(part, measure=None, needs=()):
    """This GPU's figures of a part, by `measure()`; without a GPU the recorded ones; None if there are neither."""
    if CUDA and measure is not None:
        run = attempt(f"{part} on this GPU", lambda: Run(f"{card()}, measured now", measure()))
        if run is not None:
            return run
        print("The figures of a recorded run stand in for it.")
    return recorded(part, needs=needs)


def recorded(part, name=None, needs=()):
    """A part of a recorded run: of the card whose folder is `name`, or else of the newest; None without.

    needs: names of figures. A run without them, such as one that was cut off, does not count.
    """
    runs = []
    for path in sorted(RESULTS.glob(f"{name or '*'}/results.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if "parts" not in data or part not in data["parts"]:  # another run, or another part of it
                continue
            machine, found = data["machine"], dict(data["parts"][part]["figures"])
            run = Run(f"{machine['card']}, recorded {machine['date']}", found)
            if found and found.keys() >= set(needs):
                runs.append((str(machine["date"]), run))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            print(f"notebooks/results/{path.parent.name}/results.json is left out, it cannot be read: {error!r}")
    if not runs:
        print(f"No run recorded on {name or 'a GPU'} has what is asked for of {part!r}. `make gpu` records on a GPU.")
        return None
    return max(runs, key=lambda run: run[0])[1]


def synchronize():
    """Wait until the device has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()


def seconds(function, repetitions):
    """Of one call, on average over some in a row."""
    if not CUDA:
        start = time.perf_counter()
        for _ in range(repetitions):
            function()
        return (time.perf_counter() - start) / repetitions
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repetitions


def repetitions_for(function):
    """How many calls take about 30 ms. The first call, which may compile, does not count."""
    function()
    synchronize()
    return max(3, min(100, math.ceil(0.03 / max(1e-5, seconds(function, 2))))) if CUDA else 1


def attempt(name, function):
    """What `function()` returns; None, and a line that says why, where this one cannot: no kernel, no memory."""
    try:
        return function()
    except Exception as error:  # of whatever kind: the others are measured all the same
        print(f"    {name}: {(str(error).splitlines() or [repr(error)])[0][:150]}", flush=True)
    with contextlib.suppress(RuntimeError):  # of a card that is gone
        torch.cuda.empty_cache()
    return None


def best_times(functions, rounds):
    """{name: seconds of a call}, the best of several rounds in which all take turns."""
    repetitions = {name: attempt(name, lambda f=function: repetitions_for(f)) for name, function in functions.items()}
    best = {name: math.inf for name, count in repetitions.items() if count}
    for _ in range(rounds):
        for name in best:
            spent = attempt(name, lambda name=name: seconds(functions[name], repetitions[name]))
            best[name] = min(best[name], spent or math.inf)
    return {name: time for name, time in best.items() if time < math.inf}


def most_bytes(function):
    """What `function()` returns, and the most bytes that were taken meanwhile beyond those before."""
    if not CUDA:
        with Ledger() as ledger:
            result = function()
        return result, ledger.peak["total"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def matmul_rate(dtype, size=8192, rounds=5):
    """The most operations a second that a large square matmul reaches."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    return 2 * size**3 / best_times({"matmul": lambda: a @ b}, rounds)["matmul"]


def copy_bandwidth(elements=2**30, rounds=5):
    """The most bytes a second, read and written counted, that a copy within the device's memory reaches."""
    a, b = (torch.empty(elements, device=DEVICE).uniform_() for _ in range(2))
    return 2 * a.nbytes / best_times({"copy": lambda: a.copy_(b)}, rounds)["copy"]


def card():
    """The device's name."""
    return torch.cuda.get_device_name() if CUDA else "CPU"


def machine():
    """What the figures were measured on, with the card's clocks as they were found."""
    found = {"card": card(), "date": str(datetime.date.today()), "cores": os.cpu_count()}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")  # not imported: `flash` says how it starts
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        found |= {"memory": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        wanted = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
        try:
            command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader", f"-i=GPU-{properties.uuid}"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            found["as found"] = dict(zip(wanted.split(","), answer.splitlines()[0].split(", ")))
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            found["as found"] = f"nvidia-smi: {error}"
    return found
