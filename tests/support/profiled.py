"""What an allocator hands out in a step, as PyTorch's profiler counts it: no ledger takes part."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from minizero.memory.operators import IN_PARTS, Watcher, learn, outputs_of

Build = Callable[[], Callable[[], Any]]


def profiled(build: Build) -> tuple[int, int]:
    """Bytes at the beginning of a second step, and the most in it, above those before `build()`, which returns a step.

    Scratch inside operators is counted, too. Where a GPU is used, its memory is what counts.
    """
    start = level = most = 0
    for _, name, change in _events_of(build):
        level += change
        if name == "second step":
            start = most = level
        most = max(most, level)
    return start, most


def between_operators(build: Build) -> tuple[int, int]:
    """The same, but the most between two operators, which is all that a ledger can see."""
    start = level = most = 0
    inside = False
    with _Marks():
        events = _events_of(build)
    for _, name, change in events:
        level += change
        if name == "second step":
            start = most = level
        elif name:
            inside = name == "operator"
        most = most if inside else max(most, level)
    return start, most


class _Marks(Watcher):
    """Marks in the profile where each operator that a ledger sees begins and ends; not the operators inside it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (outputs_of.get(id(func)) or learn(func)) is IN_PARTS:
            return self.run_in_parts(func, args, kwargs)
        with record_function("operator"):
            return func(*args, **kwargs or {})


def _events_of(build: Build) -> list[tuple[int, str, int]]:
    """In order: (nanoseconds, name of what begins or ends or "", change in bytes)."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step = build()
        step()  # what the second step frees was made under the profiler's eyes
        with record_function("second step"):
            step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = [event for event in events if event.name() == "[memory]"]
    device = max(event.device_type().value for event in memory)  # a CPU's number is 0
    found = [(event.start_ns(), "", event.nbytes()) for event in memory if event.device_type().value == device]
    for event in events:
        if event.name() in ("operator", "second step"):
            end = event.start_ns() + event.duration_ns()
            found += [(event.start_ns(), event.name(), 0), (end, f"end of {event.name()}", 0)]
    return sorted(found)
