"""Schedules of equal stages, step by step; groups, pictures and bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minizero.schedules import Schedule, Stage, Step, fit, group
from minizero.schedules.rules import binomial, every_k, optimal_schedule, recursive_halving, sqrt_n
from tests.support.interpreter import UNIFORM, check

# Uniform chains.


SHOWN = {  # of 64 stages: slots and advances
    "sqrt": (sqrt_n(64), 14, 112),
    "binomial": (binomial(64, 10), 10, 116),
    "everything": (every_k(64, 64), 63, 63),
    "every first": (every_k(64, 1), 63, 63),
    "halving": (recursive_halving(64), 6, 192),  # log₂ n, and ½ n log₂ n
}


@pytest.mark.parametrize("name", SHOWN)
def test_64_stages(name):
    schedule, slots, advances = SHOWN[name]
    check(schedule)
    assert (schedule.slots, schedule.advances) == (slots, advances)


@pytest.mark.accuracy
@given(st.integers(1, 200), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_uniform_schedules_are_legal_and_within_their_bounds(n, k):
    every, halving = every_k(n, k), recursive_halving(n)
    for schedule in (every, halving, sqrt_n(n), binomial(n, k)):
        check(schedule)
    # The starts of the segments, and inside the one at work all but its first and its last.
    assert every.slots <= max(-(-n // k) + max(min(k, n) - 2, 0), 1)
    assert every.advances <= 2 * n
    assert halving.slots <= max(math.ceil(math.log2(n)), 1)
    assert halving.advances <= n * math.ceil(math.log2(n)) / 2 + n


def test_five_nodes_that_keep_1_3_and_5():
    """Of five nodes the first, third and fifth stay (the fifth is used straight away); 2 and 4 are computed again."""
    schedule = every_k(5, 2)
    assert schedule.steps == [
        *[Step("keep", 0), Step("forward", 0), Step("forward", 1), Step("keep", 2)],
        *[Step("forward", 2), Step("forward", 3), Step("backward", 4)],
        *[Step("forward", 2), Step("backward", 3), Step("backward", 2), Step("drop", 2)],
        *[Step("forward", 0), Step("backward", 1), Step("backward", 0), Step("drop", 0)],
    ]


def test_root_n_is_rounded_to_the_nearest():
    assert [sqrt_n(n).steps == every_k(n, k).steps for n, k in ((6, 2), (7, 3), (12, 3), (13, 4))] == [True] * 4


def test_group():
    stages = [Stage(1, 2, 4, 10), Stage(3, 4, 5, 20), Stage(5, 6, 7, 30, output=8)]
    assert group(stages, 2) == [Stage(4, 6, 4, 10 + 20 + 5, 7), Stage(5, 6, 7, 30, 8)]
    assert group(stages, 1) == [Stage(1, 2, 4, 10, 5), Stage(3, 4, 5, 20, 7), Stage(5, 6, 7, 30, 8)]
    assert group(stages, 5) == [Stage(9, 12, 4, 60 + 5 + 7, 8)]
    assert group([UNIFORM] * 3, 2) == [Stage(2, 4, 1, 1, 1), Stage(1, 2, 1, 0, 1)]
    # √n regions of √n stages: one more forward of each stage but the last region's.
    regions = group([UNIFORM] * 64, 8)
    schedule = optimal_schedule(regions, 1000)
    assert schedule.time == 64 * 3 + 56 and schedule.peak == 8 + 7 + 3


def test_the_picture_shows_every_step():
    from matplotlib.figure import Figure

    schedule = every_k(5, 2)
    axes = schedule.plot(Figure().add_subplot())
    boxes = {container.get_label(): [patch.get_bbox() for patch in container] for container in axes.containers}
    cells = {label: [(box.x0, box.x1, round((box.y0 + box.y1) / 2)) for box in found] for label, found in boxes.items()}
    assert cells["input kept"] == [(2, 8, 2), (0, 11, 0)]
    assert cells["forward without tape"] == [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 4, 3), (5, 6, 2), (8, 9, 0)]
    taped = [(4, 5, 4), (6, 7, 3), (7, 8, 2), (9, 10, 1), (10, 11, 0)]
    assert cells["forward with tape, and backward"] == taped
    assert axes.get_title() == "5 stages: 2 kept at most, 6 forwards without a tape"
    never_dropped = Schedule([Step("keep", 0), Step("backward", 0)], [UNIFORM]).plot(Figure().add_subplot())
    (bar,) = never_dropped.containers[0]
    assert (bar.get_bbox().x0, bar.get_bbox().x1) == (0, 1)


# Bad input.


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Stage(-1, 2, 1, 0), "forward must be a cost of at least 0, not -1"),
        (lambda: Stage(1, 2, 1, -0.5), "tape must be"),
        (lambda: Stage(1, 2, float("nan"), 0), "boundary must be"),
        (lambda: Stage(1, 2, 1, 0, output=float("inf")), "output must be"),
        (lambda: optimal_schedule([], 10), "at least one stage"),
        (lambda: group([], 2), "at least one stage"),
        (lambda: group([UNIFORM], 0), "at least 1"),
        (lambda: every_k(0, 1), "n must be at least 1"),
        (lambda: every_k(4, 0), "k must be at least 1"),
        (lambda: sqrt_n(0), "n must be at least 1"),
        (lambda: sqrt_n(-3), "sqrt_n: n must be at least 1"),
        (lambda: recursive_halving(-3), "n must be at least 1"),
        (lambda: binomial(4, 0), "slots must be at least 1"),
        (lambda: optimal_schedule([UNIFORM] * 2, 4), "budget of 4; the least feasible is 5"),
        (lambda: optimal_schedule([UNIFORM], 3), "least feasible is 4"),
        (lambda: optimal_schedule([UNIFORM] * 2, float("nan")), "budget of nan"),
        (lambda: sqrt_n(9).on([UNIFORM] * 8), "for 9 stages, not 8"),
        (lambda: fit(nn.Sequential(), torch.ones(1), 100), "at least one stage"),
        (lambda: Stage("1", 2, 1, 0), TypeError),
        (lambda: every_k(4.0, 2), TypeError),
        (lambda: binomial(4, 2.5), TypeError),
        (lambda: fit(nn.Linear(2, 2), torch.ones(1, 2), 100), TypeError),
        (lambda: fit(nn.Sequential(nn.LSTM(2, 2)), torch.ones(1, 2), 100), TypeError),
        (lambda: fit([torch.relu], [1.0], 100), TypeError),
        (lambda: optimal_schedule([Stage(1, 2, 1, 0)], "5"), TypeError),
    ],
)
def test_bad_values_and_types_are_named(call, words):
    kind, words = (TypeError, "must") if words is TypeError else (ValueError, words)
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize(
    "steps, words",
    [
        ("b0 b1", "step 0, backward 0"),
        ("k0 f0 f1 b1", "step 3, backward 1"),  # its input is gone
        ("k0 k1", "step 1, keep 1"),
        ("k0 k0", "step 1, keep 0"),
        ("f0 b1 b0", "step 2, backward 0"),  # the chain's own input was not kept
        ("k0 f0 b1 d0 b0", "step 4, backward 0"),
        ("k0 d1", "step 1, drop 1"),
        ("k0 f0 b1", "before stage 0's backward"),
        ("k0 f0 b1 b0 f0", "step 4, forward 0"),
        ("k0 f0 k1 f0 b1 f1", "step 5, forward 1"),  # through already
        ("k0 f0 b1 b0 d0 k0", "step 5, keep 0"),
        ("k0 f0 f1 k2 f0 b2 b1", "step 6, backward 1"),  # its input was running, but a backward has come between
    ],
)
def test_a_step_without_its_input_is_named(steps, words):
    names = {"k": "keep", "f": "forward", "d": "drop", "b": "backward"}
    with pytest.raises(ValueError, match=words):
        Schedule([Step(names[step[0]], int(step[1])) for step in steps.split()], [UNIFORM] * (3 if "2" in steps else 2))
