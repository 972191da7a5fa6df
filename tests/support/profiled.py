"""What an allocator hands out in a step, as PyTorch's profiler counts it: no ledger takes part."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def profiled(build: Callable[[], Callable[[], Any]]) -> tuple[int, int]:
    """Bytes at the beginning of a second step, and the most in it, above those before `build()`, which returns a step.

    Scratch inside operators is counted, too. Where a GPU is used, its memory is what counts.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step = build()
        step()  # what the second step frees was made under the profiler's eyes
        with record_function("here"):
            step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in events if event.name() == "here")
    memory = [event for event in events if event.name() == "[memory]"]
    device = max(event.device_type().value for event in memory)  # a CPU's number is 0
    start = level = most = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        level += event.nbytes() if event.device_type().value == device else 0
        if event.start_ns() < begin:
            start = most = level
        most = max(most, level)
    return start, most
