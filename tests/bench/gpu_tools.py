"""What the GPU benchmarks share: time, memory, and a report that keeps every figure as soon as it is there.

On a machine without a GPU the same code runs on the CPU, so that a benchmark can be tried out: time then comes from
the processor's clock and memory from the ledger.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import flash  # noqa: F401  before anything imports Triton: without a GPU it has to be the interpreter
from minizero.memory import Ledger

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MIB, GIB = 2**20, 2**30


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


def repetitions_for(function, wanted=0.03):
    """How many calls take about `wanted` seconds. The first call, which may compile, does not count."""
    function()
    synchronize()
    return max(3, min(100, math.ceil(wanted / max(1e-5, seconds(function, 2))))) if CUDA else 1


def attempt(name, function):
    """What `function()` returns; None, and a line that says why, where this one cannot: no kernel, no memory."""
    try:
        return function()
    except Exception as error:  # of whatever kind: the others are measured all the same
        print(f"    {name}: {(str(error).splitlines() or [repr(error)])[0][:150]}", flush=True)
    if CUDA:
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
    found = {"card": card(), "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")  # not imported: `flash` says how it starts
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        found |= {"memory": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        wanted = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
        try:
            command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            found["as found"] = dict(zip(wanted.split(","), answer.splitlines()[0].split(", ")))
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            found["as found"] = f"nvidia-smi: {error}"
    return found


class Report:
    """The figures of one part, in folder/results.json beside the others'. What is there is not measured again."""

    def __init__(self, folder, part):
        self.path, self.part = Path(folder) / "results.json", part
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.data = json.loads(self.path.read_text()) if self.path.exists() else {"parts": {}}
        self.mine = self.data["parts"].setdefault(part, {"done": False, "figures": {}})
        self.figures = self.mine["figures"]
        self.missing = []

    def measure(self, name, function):
        """The figure of this name: the one that is there, or else what `function()` returns; None where it cannot."""
        if name not in self.figures:
            start = time.perf_counter()
            value = attempt(name, function)
            if value is None:
                self.missing.append(name)
                return None
            self.figures[name] = value
            self.save()
            print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
        return self.figures[name]

    def finish(self, **more):
        """Next time this part is skipped, unless something could not be measured."""
        self.mine |= {"done": not self.missing, "missing": self.missing} | more
        self.save()

    def save(self):
        """In one step: what is cut off leaves the old file."""
        self.data["machine"] = self.data.get("machine") or machine()
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)


def picture(path, draw, *arguments):
    """Save the figure that `draw` returns as a PNG. A line that says so where there is no matplotlib."""
    try:
        draw(*arguments).savefig(path, dpi=110)
    except ImportError as error:
        print(f"    {path.name} is not drawn: {error}")


def main(part, description, run):
    """The command line of one part: `run(report, tiny)` measures, draws, and returns the lines of its short table."""
    name = sys.modules["__main__"].__spec__.name
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--output", type=Path, default=Path("results") / "gpu", help="folder (default: results/gpu)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU too: does it run?")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        sys.exit(f"{parser.prog}: this needs a CUDA GPU, and PyTorch finds none here: --tiny tries it on the CPU")
    report = Report(arguments.output, part)
    report.finish(headlines=run(report, arguments.tiny))
