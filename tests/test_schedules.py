"""Schedules: against the closed form, against brute force, and replayed step by step by an interpreter of their own."""

import heapq
import itertools
import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minizero.optimal import fastest_within, least_budget
from minizero.profile_chain import measure_chain
from minizero.schedules import (
    Schedule,
    Stage,
    Step,
    binomial,
    every_k,
    fit,
    group,
    optimal_schedule,
    recursive_halving,
    sqrt_n,
)

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


def brute_force(stages, budget):
    """The least time of any persistent schedule: Dijkstra's search over (kept inputs, running input, stages left)."""
    out, size, n = output_sizes(stages), [stage.boundary for stage in stages], len(stages)
    best, queue = {(frozenset(), 0, n): 0}, [(0, 0, (frozenset(), 0, n))]
    number = itertools.count(1)  # so that no two entries of the queue are equal
    while queue:
        spent, _, state = heapq.heappop(queue)
        kept, running, end = state
        if end == 0:
            return spent
        if spent > best[state]:
            continue
        nexts = []
        if running is not None and running < end and running not in kept:
            nexts.append((0, (kept | {running}, running, end)))
        for i in kept | ({running} if running is not None else set()):
            if i >= end:
                continue
            alive = sum(size[k] for k in kept | {i}) + out[i]
            if i < end - 1 and alive + out[end - 1] <= budget:
                nexts.append((stages[i].forward, (kept, i + 1, end)))
            if i == end - 1 and alive + stages[i].tape + size[i] + out[i] <= budget:
                # Persistent: what is kept goes at its own backward, and neither sooner nor later.
                nexts.append((stages[i].forward + stages[i].backward, (kept - {i}, None, i)))
        for cost, following in nexts:
            if spent + cost < best.get(following, math.inf):
                best[following] = spent + cost
                heapq.heappush(queue, (spent + cost, next(number), following))
    return None


def random_chain(rng, n, largest=9):
    """Small whole numbers: sums are exact, and different sets of kept inputs often come to the same size."""
    last = rng.choice([None, rng.randint(0, largest)])
    return [Stage(*(rng.randint(0, largest) for _ in range(4)), output=last if i == n - 1 else None) for i in range(n)]


def least_feasible(stages):
    with pytest.raises(ValueError, match="least feasible") as error:
        optimal_schedule(stages, -1)
    return int(str(error.value).split()[-1])


def check(schedule, stages=None):
    """The schedule's own account of itself is the interpreter's."""
    claimed = schedule.advances, schedule.slots, schedule.time, schedule.peak
    assert interpret(schedule.steps, stages or schedule.stages) == pytest.approx(claimed, rel=1e-12)


# Uniform chains.


def test_binomial_and_dynamic_programme_are_the_closed_form():
    for n in range(1, 65):
        for slots in range(1, 21):
            schedule, fitted = binomial(n, slots), optimal_schedule([UNIFORM] * n, slots + 4)
            expected = closed_form(n, slots)
            assert schedule.advances == expected, f"binomial({n}, {slots})"
            assert fitted.advances == expected and fitted.peak <= slots + 4, f"optimal({n}, {slots} + 4)"
            assert schedule.slots <= slots and schedule.time == expected + 3 * n
            check(schedule)


@pytest.mark.parametrize("n", [2, 3, 7, 16, 33, 64])
def test_dynamic_programme_without_the_formula_is_the_closed_form(n):
    # One backward of another cost aside, uniform chains would not go through the programme at all.
    for slots in (1, 2, 3, 5, 10, 20):
        stages = [UNIFORM] * n
        least, thriftiest = least_budget(stages)
        assert least == 5 and thriftiest.peak == 5
        assert fastest_within(stages, slots + 4, thriftiest).advances == closed_form(n, slots)


def test_64_stages():
    shown = {
        "sqrt": sqrt_n(64),
        "binomial": binomial(64, 10),
        "everything": every_k(64, 64),
        "every first": every_k(64, 1),
        "halving": recursive_halving(64),
    }
    for schedule in shown.values():
        check(schedule)
    figures = {name: (schedule.slots, schedule.advances) for name, schedule in shown.items()}
    assert figures == {
        "sqrt": (14, 112),
        "binomial": (10, 116),
        "everything": (63, 63),
        "every first": (63, 63),
        "halving": (6, 192),  # log₂ n, and ½ n log₂ n
    }


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


# Chains whose stages differ.


def compare_with_brute_force(seed, n):
    rng = random.Random(seed)
    stages = random_chain(rng, n)
    least = least_feasible(stages)
    assert brute_force(stages, least - 1) is None, f"{least} is not the least budget of {stages}"
    most = optimal_schedule(stages, 10**6).peak
    for budget in sorted({least, *(rng.randint(least, max(least, int(most))) for _ in range(4)), 10**6}):
        schedule = optimal_schedule(stages, budget)
        check(schedule, stages)
        assert schedule.peak <= budget
        assert schedule.time == brute_force(stages, budget), f"budget {budget} of {stages}"


@pytest.mark.parametrize("n", range(1, 7))
def test_dynamic_programme_is_brute_force(n):
    for seed in range(12):
        compare_with_brute_force(100 * n + seed, n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 8])
def test_dynamic_programme_is_brute_force_on_longer_chains(n):
    for seed in range(20):
        compare_with_brute_force(100 * n + seed, n)


def test_sizes_are_rounded_up_never_down():
    """Sizes of no common unit, more of them than the exact table takes: at every budget the peak stays below."""
    rng = random.Random(5)
    stages = [Stage(*(rng.uniform(1, 10) for _ in range(2)), *(rng.uniform(1e6, 2e6),) * 2) for _ in range(25)]
    stages[15] = Stage(1, 2, 1.23456e6, 2.34567e7)  # decides what the least budget is, with the chain's input beside it
    with pytest.raises(ValueError) as error:
        optimal_schedule(stages, 0)
    least, last = float(str(error.value).split()[-1]), math.inf
    for factor in (1, 1.01, 1.1, 2, 10):
        schedule = optimal_schedule(stages, factor * least)
        check(schedule)
        assert schedule.peak <= factor * least and schedule.time <= last
        last = schedule.time
    # With the least budget there is still a choice where memory is not scarce.
    assert optimal_schedule(stages, least).time < least_budget(stages)[1].time
    everything = sum(2 * stage.forward + stage.backward for stage in stages) - stages[-1].forward
    assert last == pytest.approx(everything)  # ten times the least is enough to run each but the last just twice


@pytest.mark.parametrize("unit", [1, 10**5])  # few different sums, for an exact table; too many, for a grid
def test_optimal_is_no_slower_than_any_schedule_of_its_size(unit):
    rng = random.Random(6)
    for n in (15, 30):
        stages = random_chain(rng, n, largest=20 * unit)
        for schedule in (every_k(n, 3), sqrt_n(n), recursive_halving(n), binomial(n, 5), every_k(n, n)):
            other = schedule.on(stages)
            check(other, stages)
            best = optimal_schedule(stages, other.peak)
            assert best.peak <= other.peak and best.time <= other.time


def test_the_programme_is_fast_enough():
    rng = random.Random(7)
    measured = [
        Stage(rng.random(), rng.random(), rng.randint(10**5, 10**7), rng.randint(10**5, 10**8)) for _ in "a" * 100
    ]
    start = time.process_time()
    assert optimal_schedule([UNIFORM] * 1000, 14).advances == closed_form(1000, 10)
    middle = time.process_time()
    optimal_schedule(measured, 2 * sum(stage.tape for stage in measured) / 20)
    end = time.process_time()
    assert middle - start < 5 and end - middle < 5


def test_sizes_need_not_be_whole_numbers():
    stages = [Stage(1, 2, boundary=0.1, tape=0)] * 20
    for slots in range(1, 19):
        schedule = optimal_schedule(stages, 0.1 * (slots + 4) + 1e-15)
        assert schedule.slots == slots and schedule.advances == closed_form(20, slots)
    assert optimal_schedule(stages, math.inf).slots == 19
    assert optimal_schedule([Stage(1, 2, boundary=0, tape=0)] * 20, 0).slots == 19


def test_the_last_output_counts():
    stages = [UNIFORM, Stage(1, 2, boundary=1, tape=0, output=10)]
    # In its backward: both inputs, the output, its gradient, the gradient of the input.
    assert optimal_schedule(stages, 100).peak == 2 + 10 + 10 + 1
    with pytest.raises(ValueError, match="budget of 22; the least feasible is 23"):
        optimal_schedule(stages, 22)
    # In the last advance, two inputs and the gradient that waits are less.
    assert optimal_schedule(stages, 100).curve[0] == 2 + 10


def test_group():
    stages = [Stage(1, 2, 4, 10), Stage(3, 4, 5, 20), Stage(5, 6, 7, 30, output=8)]
    assert group(stages, 2) == [Stage(4, 6, 4, 10 + 20 + 5, 7), Stage(5, 6, 7, 30, 8)]
    assert group(stages, 5) == [Stage(9, 12, 4, 60 + 5 + 7, 8)]
    assert group([UNIFORM] * 3, 2) == [Stage(2, 4, 1, 1, 1), Stage(1, 2, 1, 0, 1)]
    # √n regions of √n stages: one more forward of each stage but the last region's.
    regions = group([UNIFORM] * 64, 8)
    schedule = optimal_schedule(regions, 1000)
    assert schedule.time == 64 * 3 + 56 and schedule.peak == 8 + 7 + 3


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
        (lambda: recursive_halving(-3), "n must be at least 1"),
        (lambda: binomial(4, 0), "slots must be at least 1"),
        (lambda: optimal_schedule([UNIFORM] * 9, 4), "budget of 4; the least feasible is 5"),
        (lambda: optimal_schedule([UNIFORM], 3), "least feasible is 4"),
        (lambda: optimal_schedule([UNIFORM] * 2, float("nan")), "budget of nan"),
        (lambda: sqrt_n(9).on([UNIFORM] * 8), "for 9 stages, not 8"),
        (lambda: fit(nn.Sequential(), torch.ones(1), 100), "at least one stage"),
    ],
)
def test_bad_values_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Stage("1", 2, 1, 0),
        lambda: every_k(4.0, 2),
        lambda: binomial(4, 2.5),
        lambda: fit(nn.Linear(2, 2), torch.ones(1, 2), 100),
        lambda: fit(nn.Sequential(nn.LSTM(2, 2)), torch.ones(1, 2), 100),
        lambda: fit([torch.relu], [1.0], 100),
    ],
)
def test_bad_types_are_named(call):
    with pytest.raises(TypeError, match="must"):
        call()


@pytest.mark.parametrize(
    "steps, words",
    [
        ("b0 b1", "step 0, backward 0"),
        ("k0 f0 f1 b1", "step 3, backward 1"),  # its input is gone
        ("k0 k1", "step 1, keep 1"),
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


def test_the_picture_shows_every_step():
    from matplotlib.figure import Figure

    schedule = every_k(5, 2)
    axes = schedule.plot(Figure().add_subplot())
    boxes = {container.get_label(): [patch.get_bbox() for patch in container] for container in axes.containers}
    cells = {label: [(box.x0, box.x1, round((box.y0 + box.y1) / 2)) for box in found] for label, found in boxes.items()}
    assert cells["input kept"] == [(2, 8, 2), (0, 11, 0)]
    assert cells["forward"] == [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 4, 3), (5, 6, 2), (8, 9, 0)]
    taped = [(4, 5, 4), (6, 7, 3), (7, 8, 2), (9, 10, 1), (10, 11, 0)]
    assert cells["forward with tape, and backward"] == taped
    assert axes.get_title() == "5 stages: 2 kept at most, 6 forwards without a tape"


# Real chains.


def mlp(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def test_measured_sizes():
    """In units of the input: what each layer's tape and output are, by hand."""
    width = 64
    layers = [nn.Linear(width, width), nn.ReLU(), nn.GELU(), nn.Dropout(0.5), mlp(width), nn.Linear(width, width // 2)]
    stages = measure_chain(layers, torch.ones(128, width))
    unit = 128 * width * 4
    assert [stage.boundary for stage in stages] == [unit] * 6
    # Linear and GELU save their input, ReLU its output, dropout its mask. The block's worst moment is in its second
    # layer's backward: 4 + 4 saved, a gradient of 4, the output and its gradient; input and output count by themselves.
    assert [stage.tape for stage in stages] == [0, 0, 0, unit, (4 + 4 + 4 + 2 - 3) * unit, 0]
    assert [stage.output for stage in stages] == [None] * 5 + [unit // 2]
    assert all(stage.forward > 0 and stage.backward > 0 for stage in stages)
    assert stages[4].forward > stages[0].forward


def test_measuring_leaves_no_trace():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    model[0].weight.grad = torch.ones(8, 8)
    model[3].weight.register_post_accumulate_grad_hook(lambda p: pytest.fail("an optimizer would have stepped here"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator, sample = torch.get_rng_state(), torch.ones(4, 8)
    fit(model, sample, 10**6)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8)) and model[3].weight.grad is None
    assert sample.grad is None and not sample.requires_grad


def test_an_input_changed_in_place_is_refused():
    with pytest.raises(ValueError, match=r"layer 1 \(ReLU\) changes its input in place"):
        fit([nn.Linear(4, 4), nn.ReLU(inplace=True)], torch.ones(2, 4), 10**6)
    sample = -torch.ones(2, 4)
    with pytest.raises(ValueError, match="layer 0"):
        fit([nn.ReLU(inplace=True)], sample, 10**6)
    assert torch.equal(sample, -torch.ones(2, 4))


def test_fit_names_the_least_budget_and_then_meets_it():
    layers, sample = [mlp(32) for _ in range(20)], torch.ones(64, 32)
    with pytest.raises(ValueError, match="least feasible") as error:
        fit(layers, sample, 1000)
    least = int(str(error.value).split()[-1])
    unit = 64 * 32 * 4
    assert least == (1 + 1 + 1 + 2 + 11) * unit  # the chain's input, the running one, the output, gradients, the tape
    tight, wide = fit(layers, sample, least), fit(layers, sample, 100 * least)
    assert tight.peak <= least and tight.slots == 1 and tight.advances == 20 * 19 / 2
    assert wide.slots == wide.advances == 19
    stages, last = measure_chain(layers, sample), math.inf
    for slots in range(1, 20):
        schedule = optimal_schedule(stages, least + (slots - 1) * unit)
        assert schedule.peak <= least + (slots - 1) * unit and schedule.slots <= slots and schedule.time <= last
        last = schedule.time
    assert schedule.advances == 19


def test_integers_and_frozen_layers_have_no_gradient_to_keep():
    frozen = nn.Linear(8, 8).requires_grad_(False)
    stages = measure_chain([nn.Embedding(16, 8), frozen, mlp(8)], torch.zeros(4, 2, dtype=torch.long))
    assert stages[0].boundary == 4 * 2 * 8 and stages[1].boundary == 4 * 2 * 8 * 4
    assert measure_chain([frozen], torch.ones(4, 8))[0].tape == 0
