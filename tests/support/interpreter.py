"""Follows a schedule step by step, as an executor would, and keeps its own account; and the closed form."""

import math

import pytest

from minizero.schedules import Stage

UNIFORM = Stage(1, 2, boundary=1, tape=0)


def closed_form(n, s):
    """The advances t(n, s) = r·n - C(s+r, r-1) of Griewank and Walther, 2000."""
    r = next(r for r in range(n + 1) if math.comb(s + r, s) >= n)
    return r * n - math.comb(s + r, r - 1) if r else 0


def output_sizes(stages):
    after = [*(stage.boundary for stage in stages[1:]), stages[-1].boundary]
    return [after[i] if stage.output is None else stage.output for i, stage in enumerate(stages)]


def interpret(steps, stages):
    """Follows the steps as an executor would; returns advances, slots, time and peak, or fails on a wrong step."""
    out, size = output_sizes(stages), [stage.boundary for stage in stages]
    kept, running, left = set(), 0, list(range(len(stages)))
    advances, slots, spent, peak = 0, 0, 0, 0
    for action, i in steps:
        if action == "keep":
            assert running == i and i not in kept
            kept.add(i)
            slots = max(slots, len(kept))
        elif action == "drop":
            kept.remove(i)
        else:
            assert running == i or i in kept
            alive = sum(size[k] for k in kept | {i}) + out[i]
            spent += stages[i].forward
            if action == "forward":
                advances, running = advances + 1, i + 1
                peak = max(peak, alive + out[left[-1]])
            else:
                assert action == "backward" and left.pop() == i
                running = None
                spent += stages[i].backward
                peak = max(peak, alive + stages[i].tape + size[i] + out[i])
    assert not left and not kept
    return advances, slots, spent, peak


def check(schedule, stages=None):
    """The schedule's own account of itself is the interpreter's."""
    claimed = schedule.advances, schedule.slots, schedule.time, schedule.peak
    assert interpret(schedule.steps, stages or schedule.stages) == pytest.approx(claimed, rel=1e-12)
