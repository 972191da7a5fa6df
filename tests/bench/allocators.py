"""What others count beside the ledger: PyTorch's allocator, the operating system, a GPU's caching allocator.

    ledger      the tensors that operators return
    profiler    + scratch: what an operator allocates and frees inside itself
    process     + libraries that allocate by themselves, Python, what the C library keeps in reserve
    GPU         blocks of 512 bytes and more, and the reserve of its caching allocator

Every figure is in bytes above those at the beginning of a step. A step is a function without arguments. It leaves
memory as it found it. It has run before, so that the optimizer's states exist and libraries have warmed up.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from minizero.memory.operators import IN_PARTS, Watcher, learn, outputs_of

Step = Callable[[], Any]
RESET = "/proc/self/clear_refs"  # where Linux takes the order to forget a process's highest memory


class Profiled(NamedTuple):
    """One step as PyTorch's profiler saw it, in bytes."""

    peak: int
    visible: int  # the most that was alive between operators, which is all that a ledger can see
    operator: str  # the one that ran at the peak; empty if none ran
    scratch: dict[str, int]  # by operator, the largest first: the most that one call took and gave back


class _Named(Watcher):
    """Marks in the profile where each operator that a ledger sees begins and ends; not the operators inside it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (outputs_of.get(id(func)) or learn(func)) is IN_PARTS:
            return self.run_in_parts(func, args, kwargs)
        with record_function(f"operator {func}"):
            return func(*args, **kwargs or {})


def profile_step(step: Step) -> Profiled:
    """Run `step` twice under the profiler, and measure the second.

    The second frees only what the profiler has seen being made: in the first, or in the second itself.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler, _Named():
        step()
        with record_function("measured step"):
            step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = [event for event in events if event.name() == "[memory]"]
    # Where a GPU is used, its memory is what counts. A CPU's number is 0, any GPU's is higher.
    device = max((event.device_type() for event in memory), key=lambda kind: kind.value, default=None)
    happened = [(event.start_ns(), "", event.nbytes()) for event in memory if event.device_type() == device]
    for event in events:
        if event.name().startswith("operator ") or event.name() == "measured step":
            name = event.name().removeprefix("operator ")
            happened += [(event.start_ns(), name, 0), (event.start_ns() + event.duration_ns(), f"end of {name}", 0)]
    return read_profile(sorted(happened))


def read_profile(happened: list[tuple[int, str, int]]) -> Profiled:
    """Replay a profile. happened, in order: (nanoseconds, name of what begins or ends or "", change in bytes)."""
    names = [name for _, name, _ in happened]
    inside = happened[names.index("measured step") + 1 : names.index("end of measured step")]
    level = peak = visible = 0  # bytes now; their highest; their highest between operators
    entered = highest = 0  # of the operator that runs: bytes when it began, and their highest since
    operator = at_peak = ""  # the operator that runs, and the one that ran at the peak
    scratch: dict[str, int] = {}
    for _, name, change in inside:
        level += change
        if level > peak:
            peak, at_peak = level, operator
        highest = max(highest, level)
        if name.startswith("end of "):  # what it gave back: more than it found, and more than it leaves
            taken = highest - max(entered, level)
            if taken > scratch.get(operator, 0):
                scratch[operator] = taken
            operator = ""
        elif name:
            operator, entered, highest = name, level, level
        if not operator:
            visible = max(visible, level)
    return Profiled(peak, visible, at_peak, dict(sorted(scratch.items(), key=lambda item: -item[1])))


def return_memory_at_once() -> bool:
    """From now on, make the C library give freed memory back to the system. False if it is not glibc.

    Call it before a model is built: what is in reserve by then stays there. Call it in a process of its own: every
    allocation of 64 KiB or more becomes a call of the system, which is slow.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # malloc.h
    try:
        return all(map(library.mallopt, (mmap_threshold, trim_threshold, top_pad), (2**16, 0, 0)))
    except AttributeError:  # another C library
        return False


def process_peak(step: Step) -> int | None:
    """The most by which this process's resident memory rose while `step` ran. None if the system does not say.

    Without `return_memory_at_once` the start contains a reserve, and the step may use that unnoticed.
    """
    try:
        Path(RESET).write_text("5")  # sets the highest memory to the current one
        start = _resident("VmRSS")
        step()
        return _resident("VmHWM") - start
    except OSError:  # not Linux, or forbidden
        return None


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def cuda_peak(step: Step, device: torch.device) -> tuple[int, int]:
    """The most that a GPU's allocator handed out, and the most that it reserved, while `step` ran; above the start."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return most[0] - allocated, most[1] - reserved


def compare(ledger: Ledger, step: Step, device: torch.device) -> dict[str, Any]:
    """One step as everybody counts it, in bytes above its start. `ledger` has watched one call of `step`.

    `ledger`: its peak. `profiler` (the peak), `visible`, `operator`, `scratch`: see `Profiled`.
    `process`: see `process_peak`; None on a GPU. `allocated`, `reserved`: see `cuda_peak`; None on a CPU.
    """
    found: dict[str, Any] = {"ledger": ledger.peak["total"] - ledger.curve[0]["total"]}
    found["process"] = process_peak(step) if device.type == "cpu" else None
    found["allocated"], found["reserved"] = cuda_peak(step, device) if device.type == "cuda" else (None, None)
    profiled = profile_step(step)._asdict()  # last, because it leaves much in memory
    return found | {"profiler": profiled.pop("peak"), **profiled}


def the_demo() -> dict[str, Any]:
    """A step of the demo's GPT, as everybody counts it. To be called in a process of its own."""
    return_memory_at_once()  # before anything large exists
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.zeros(2, 2, 64, dtype=torch.long, device=device)

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Ledger(model, optimizer) as ledger:
        step()
    return compare(ledger, step, device)
