"""The dynamic programme: against the closed form and against brute force."""

import heapq
import itertools
import math
import random

import pytest

from minizero.schedules import Stage, binomial, optimal_schedule
from minizero.schedules.optimal import fastest_within, least_budget
from tests.support.interpreter import UNIFORM, check, closed_form, output_sizes


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
    return float(str(error.value).split()[-1])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 33, 64])
def test_binomial_and_the_dynamic_programme_are_the_closed_form(n):
    stages = [UNIFORM] * n
    least, thriftiest = least_budget(stages)
    assert least == thriftiest.peak == (5 if n > 1 else 4)
    for slots in (1, 2, 3, 5, 10, 20):
        schedule, expected = binomial(n, slots), closed_form(n, slots)
        check(schedule)
        assert schedule.advances == expected and schedule.slots <= slots
        # Of equal stages the best is binomial; the programme itself comes to the same.
        for fitted in (optimal_schedule(stages, slots + 4), fastest_within(stages, slots + 4, thriftiest)):
            assert fitted.advances == expected and fitted.peak <= slots + 4


def compare_with_brute_force(seed, n):
    rng = random.Random(seed)
    stages = random_chain(rng, n)
    least = least_feasible(stages)
    assert brute_force(stages, least - 1) is None, f"{least} is not the least budget of {stages}"
    in_tenths = [Stage(*(None if cost is None else cost / 10 for cost in vars(stage).values())) for stage in stages]
    assert least_feasible(in_tenths) == pytest.approx(least / 10)  # of numbers that are not whole
    most = optimal_schedule(stages, 10**6).peak
    for budget in sorted({least, *(rng.randint(int(least), max(int(least), int(most))) for _ in range(4)), 10**6}):
        schedule = optimal_schedule(stages, budget)
        check(schedule, stages)
        assert schedule.peak <= budget
        assert schedule.time == brute_force(stages, budget), f"budget {budget} of {stages}"


@pytest.mark.parametrize("n", [*range(1, 6), *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 7))])
def test_dynamic_programme_is_brute_force(n):
    for seed in range(12):
        compare_with_brute_force(100 * n + seed, n)


@pytest.mark.slow
def test_sizes_are_rounded_up_never_down():
    """Sizes of no common unit, more of them than the exact table takes: at every budget the peak stays below."""
    rng = random.Random(5)
    stages = [Stage(*(rng.uniform(1, 10) for _ in range(2)), *(rng.uniform(1e6, 2e6),) * 2) for _ in range(25)]
    stages[15] = Stage(1, 2, 1.23456e6, 2.34567e7)  # decides what the least budget is, with the chain's input beside it
    least, last = least_feasible(stages), math.inf
    for factor in (1, 1.01, 1.1, 2, 10):
        schedule = optimal_schedule(stages, factor * least)
        check(schedule)
        assert schedule.peak <= factor * least and schedule.time <= last
        last = schedule.time
    # With the least budget there is still a choice where memory is not scarce.
    assert optimal_schedule(stages, least).time < least_budget(stages)[1].time
    everything = sum(2 * stage.forward + stage.backward for stage in stages) - stages[-1].forward
    assert last == pytest.approx(everything)  # ten times the least is enough to run each but the last just twice


def test_sizes_need_not_be_whole_numbers():
    stages = [Stage(1, 2, boundary=0.1, tape=0)] * 20
    for slots in range(1, 19):
        schedule = optimal_schedule(stages, 0.1 * (slots + 4) + 1e-15)
        assert schedule.slots == slots and schedule.advances == closed_form(20, slots)
    stages = [Stage(1, 2, boundary=0.1, tape=0)] * 10
    assert (0.9 - 0.4) // 0.1 == 4 and optimal_schedule(stages, 0.9).slots == 5
    assert optimal_schedule(stages, math.inf).slots == 9
    assert optimal_schedule([Stage(1, 2, boundary=0, tape=0)] * 20, 0).slots == 19


@pytest.mark.parametrize("seed", range(40))
def test_the_budget_that_is_named_is_met_whatever_the_rounding(seed):
    draw = random.Random(seed).random
    stages = [Stage(draw(), draw(), 10 * draw(), 10 * draw()) for _ in range(8)]
    least = least_feasible(stages)
    assert optimal_schedule(stages, least).peak <= least


def test_the_last_output_counts():
    stages = [UNIFORM, Stage(1, 2, boundary=1, tape=0, output=10)]
    # In its backward: both inputs, the output, its gradient, the gradient of the input.
    assert optimal_schedule(stages, 100).peak == 2 + 10 + 10 + 1
    with pytest.raises(ValueError, match="budget of 22; the least feasible is 23"):
        optimal_schedule(stages, 22)
    # In the last advance, two inputs and the gradient that waits are less.
    assert optimal_schedule(stages, 100).curve[0] == 2 + 10
