"""Where the memory of a real run went: reads a memory snapshot that PyTorch has recorded on a GPU.

    torch.cuda.memory._record_memory_history()        before the model is built
    torch.cuda.memory._dump_snapshot("oom.pickle")    after three steps, or in `except torch.OutOfMemoryError:`

The file has the stack of each allocation, which is the code that asked for it, and no word about what it is for. So the
category is guessed: from the phase of the step that the stack shows, and from how long the allocation lives.

born in      what stands on the stack                                              if it outlives that phase
building     a module is made or moved: __init__, from_pretrained, _apply          parameters (or buffers)
forward      a module is called, or code that follows, such as the loss            activations
backward     no script: autograd has a thread of its own for a GPU                 gradients
optimizer    a file of torch/optim                                                 optimizer
between      anything else                                                         temporary

What dies in its phase is temporary. What is older than the record has no stack, and is called "older".
"""

import bisect
import collections
import itertools
import pickle
import re
from pathlib import Path, PureWindowsPath
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from minizero.cli import write_files
from minizero.memory.snapshot import LAST
from minizero.xray.report import LOOK, NUMBERS, SHOWN, printer, size

Event = dict[str, Any]  # and a frame of a stack, a segment, a block

BORN = {"building": "parameters", "forward": "activations", "backward": "gradients", "between": "temporary"}
PYTHON = re.compile(r"\.py$|<ipython")  # between these frames stand those of C++
BUILDING = {"__init__", "from_pretrained", "_apply"}
BACKWARD = {"_engine_run_backward", "_make_grads"}  # the part of loss.backward() that runs in the script's own thread
SCRIPT = {"<module>", "_bootstrap"}  # where a script begins, and a thread or process that it has started
OPTIMIZER = re.compile(r"torch[/\\]optim[/\\]")
LIBRARY = re.compile(r"(packages|pytorch)[/\\]torch[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\](?!(site|dist)-packages)")
WORKSPACE = re.compile(r"Workspace|B[Ll][Aa][Ss]Handle")  # in which cuBLAS computes, and which PyTorch keeps
ALLOCATES = {"alloc": 1, "free_completed": -1}  # bytes
RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class PlainData(pickle.Unpickler):
    """Reads lists, dicts, numbers and text. A pickle that asks for anything else could run a stranger's code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot is plain data")


def read(file: Path) -> "Recorded":
    """What PyTorch has recorded in a file. `ValueError` if it is no such record."""
    with file.open("rb") as opened:
        try:
            return Recorded(PlainData(opened).load(), file.stem)
        except Exception as error:  # a stranger's bytes may raise any
            why = f"{file} is no record of a GPU: {type(error).__name__}: {error}"
            raise ValueError(f"{why}: give what torch.cuda.memory._dump_snapshot has written") from error


def phase_of(frames: list[Event], before: str) -> str:
    """The phase of a step in which an event with these frames lies. before: the phase of the last event."""
    names = {frame["name"] for frame in frames}
    if names & BACKWARD or not names & SCRIPT:
        return "backward"
    stack = [frame for frame in frames if PYTHON.search(frame["filename"])]
    for frame in stack:
        if frame["name"] == "_call_impl":  # of nn.Module
            return "forward"
        if OPTIMIZER.search(frame["filename"]):  # or it has called a closure, which computes the loss
            return "forward" if before == "forward" and frame is not stack[0] else "optimizer"
    return "building" if names & BUILDING else "forward" if before == "forward" else "between"


def phases_of(trace: list[Event]) -> list[str]:
    """The phase of each event. A free without a stack may be the first event of the next phase: it counts as that."""
    phases: list[str] = []
    phase = "between"
    for at, event in enumerate(trace):
        if event["action"] == "alloc" or event.get("frames"):
            phase = phase_of(event.get("frames", []), phase)
            phases += [phase] * (at + 1 - len(phases))
    return phases + [phase] * (len(trace) - len(phases))


def line_of(frames: list[Event]) -> str:
    """The user's innermost line; of a backward, which has none, the operation that goes backwards."""
    for frame in frames:
        if PYTHON.search(frame["filename"]) and not LIBRARY.search(frame["filename"]):
            return f"{PureWindowsPath(frame['filename']).name}:{frame['line']}"  # reads both kinds of path
    nodes = (found[1] for frame in frames if (found := re.search(r"(\w+)Backward\d*::apply", frame["name"])))
    return f"backward of {node}" if (node := next(nodes, "")) else ""


def older(trace: list[Event], segments: list[Event]) -> list[Event]:
    """Events that allocate what is older than a trace: going backwards from what is held in the end, what is left."""
    held: dict[int, Event] = {}
    for part in segments:
        address = part["address"]
        for block in part["blocks"]:
            if block["state"] != "inactive":
                asked, frames = block.get("requested_size", block["size"]), block.get("frames", [])
                held[address] = {"addr": address, "size": asked, "stream": 0, "frames": frames}
            address += block["size"]
    for event in reversed(trace):
        if event["action"] == "free_completed":
            held[event["addr"]] = event | {"frames": []}
        elif event["action"] == "alloc":
            held.pop(event["addr"], None)
    return [event | {"action": "alloc"} for event in held.values()]


def deaths(trace: list[Event]) -> dict[int, int]:
    """Where each allocation is freed, by its place in a trace; what is never freed dies at the trace's end."""
    alive, dies = dict[int, int](), dict[int, int]()  # alive: by address
    for at, event in enumerate(trace):
        if event["action"] == "alloc":
            alive[event["addr"]], dies[at] = at, len(trace)
        elif event["action"] == "free_completed":
            dies[alive.pop(event["addr"])] = at
    return dies


class Recorded:
    """What a snapshot tells of one device: of one that ran out of memory, else of the one with most events.

    trace: its events; first those that allocate what is older. turns: where a phase ends, or is broken off by an error.
    dies, categories: where each allocation is freed, and what it is for, by its place in the trace. moment: where
    memory ran out last, else the peak. held: the allocations that are alive then.
    """

    def __init__(self, snapshot: Event, name: str) -> None:
        self.snapshot, self.name, traces = snapshot, name, snapshot["device_traces"] or [[]]
        if any("category" in event for trace in traces for event in trace):
            raise ValueError("it has categories already, and pytorch.org/memory_viz shows them in colour")
        errors = [[at for at, event in enumerate(trace) if event["action"] == "oom"] for trace in traces]
        self.device = max(range(len(traces)), key=lambda device: (bool(errors[device]), len(traces[device])))
        self.segments = [part for part in snapshot["segments"] if part.get("device", 0) == self.device]
        before = older(traces[self.device], self.segments)
        self.trace = [*before, *traces[self.device]]
        # PyTorch may have dropped an event, and kept its stack in a block.
        known = (phase_of(event["frames"], "") if event["frames"] else "older" for event in before)
        phases = self.phases = [*known, *phases_of(traces[self.device]), "the end"]
        self.errors = [len(before) + at for at in errors[self.device]]
        if not any(event.get("frames") for event in self.trace):
            raise ValueError("no allocation in it has a stack")
        self.turns = [at for at in range(1, len(phases)) if phases[at] != phases[at - 1] or at in self.errors]
        totals = [*itertools.accumulate(ALLOCATES.get(event["action"], 0) * event["size"] for event in self.trace)]
        self.moment, self.dies = (self.errors or [totals.index(max(totals))])[-1], deaths(self.trace)
        self.categories = {born: self.category_of(born) for born in self.dies}
        self.held = [born for born, dies in self.dies.items() if born <= self.moment < dies]

    def category_of(self, born: int) -> str:
        """What an allocation is for, as far as its stack and its life tell."""
        if any(WORKSPACE.search(frame["name"]) for frame in self.trace[born].get("frames", [])):
            return "buffers"
        if self.dies[born] < self.turns[bisect.bisect(self.turns, born)]:
            return "temporary"
        return BORN.get(self.phases[born], self.phases[born])

    def left_over(self) -> list[tuple[int, int, str]]:
        """What two or more earlier steps have left at the moment: bytes, steps, and the line. The largest is first."""
        forwards = [at for at in self.turns if self.phases[at - 1] != self.phases[at] == "forward"]
        left: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for born in self.held:
            step = bisect.bisect(forwards, born)
            if self.phases[born] != "older" and step < bisect.bisect(forwards, self.moment):
                left[line_of(self.trace[born].get("frames", []))][step] += self.trace[born]["size"]
        return sorted([(steps.total(), len(steps), line) for line, steps in left.items() if len(steps) > 1])[::-1]

    def save(self, folder: Path) -> list[Path]:
        """Write the same snapshot into `folder`, with the categories in it; returns its path, in a list."""
        told = {born: {"category": category} for born, category in self.categories.items()}
        traces = [*self.snapshot["device_traces"]]
        traces[self.device] = [*(event | told.get(at, {}) for at, event in enumerate(self.trace)), LAST]
        whole = pickle.dumps(self.snapshot | {"device_traces": traces}, protocol=4)
        return write_files({f"{self.name}_by_category.pickle": whole}, folder)

    def show(self, console: Console) -> None:
        """Print who holds the memory at the moment, what earlier steps have left, and what is reserved beside it."""
        write, held = printer(console), collections.Counter[str]()
        rows: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        for born in self.held:
            event, category = self.trace[born], self.categories[born]
            held[category] += event["size"]
            rows[category, line_of(event.get("frames", []))].append(event["size"])
        total, last, phase = held.total(), self.trace[self.moment], self.phases[self.moment]
        asked = f", {size(last['size'])} asked for, {size(last['device_free'])} free" if self.errors else ""
        parts = ", ".join(f"{category} {size(part)}" for category, part in held.most_common())
        head = f"{'Out of memory' if asked else 'Peak'} in {phase}, on device {self.device}: {size(total)} allocated"
        write(f"{head}{asked}\nGuessed from stacks: {parts}\n\nWho holds it, guessed from stacks")
        table = Table(Column("", **NUMBERS), "category", "line", Column("pieces", **NUMBERS), **LOOK)
        for row, sizes in sorted(rows.items(), key=lambda row: -sum(row[1]))[:SHOWN]:
            table.add_row(size(sum(sizes)), *row, f"{len(sizes):,}")
        write(table)
        for count, steps, line in self.left_over()[:3]:
            write(f"Grows: {steps} earlier steps have left {size(count)} in {line}")
        later = sum(RESERVES.get(event["action"], 0) * event["size"] for event in self.trace[self.moment + 1 :])
        reserved = sum(part["total_size"] for part in self.segments) - later
        write(f"Reserved by the allocator: {size(reserved)}. Of these {size(reserved - total)} are not allocated.")
        if held["older"] > total / 10:
            call = "Call torch.cuda.memory._record_memory_history() before the model is built."
            write(f"{held['older'] / total:.0%} is older than the record, and nothing tells what it is for. {call}")
