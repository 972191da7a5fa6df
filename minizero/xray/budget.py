"""The cheapest stack that fits a budget.

    price    a guess at the time that a stack adds to a step, as a share of it: it only sets the order of trying
    peak     a run of each stack, from the cheapest on, until one fits

DDP and ZeRO-1 are not tried: ZeRO-2 sends as many bytes, and holds less. A card is full when its allocator has reserved
what is left beside the context, and an allocator reserves more than it is asked for.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import torch

from minizero.xray.case import Case, NotPossible
from minizero.xray.plan import Plan
from minizero.xray.step import Result, of_samples, time_first
from minizero.xray.techniques import TECHNIQUES, fields_of, outcome, rows_of

GIB = 2**30
SMALL = 4 * GIB  # a budget up to this is no GPU's, but a part of a machine
CONTEXT = 1 * GIB  # CUDA's own, the driver's, NCCL's buffers: about that on today's GPUs
RESERVED = 1.18  # times what it is asked for: the most of ten models on an H200; the least was 1.05


def kept_free(budget: float) -> float:
    """Bytes of a device that a plan must leave free."""
    context = CONTEXT if budget > SMALL else 0
    return context + (budget - context) * (1 - 1 / RESERVED)


def price(plan: Plan) -> float:
    """The time that a plan adds to a step, roughly, as a share of the plain step's. Under ZeRO-3 each piece gathers."""
    gathers = TECHNIQUES["stage 3"].price * (plan.micro_batches - 1) if plan.stage == 3 else 0
    return (sum(row.price for row in rows_of(plan).values()) + gathers + 3 * math.log2(plan.micro_batches)) / 100


def stacks(ranks: int, batch: int) -> list[Plan]:
    """The plans to be tried, the cheapest first."""
    sharded = [Plan(2, ranks), Plan(3, ranks), Plan(3, ranks, offload=True)]
    engines = [Plan(), Plan(3, 1, offload=True)] if ranks == 1 else sharded
    pieces = [pieces for pieces in sorted({1, 2, max(1, batch)}) if (batch or 1) % pieces == 0]
    either = False, True
    plans = [
        dataclasses.replace(plan, dtype=dtype, flash=x, chunked_loss=y, micro_batches=n, recompute=z)
        for dtype, x, y, n, z in itertools.product((None, torch.bfloat16), either, either, pieces, either)
        for plan in engines
        if not (x and z)  # if it recomputes, no block stores scores anyway
    ]
    return sorted(plans, key=price)


class Choice(NamedTuple):
    """The cheapest plan that fits, or, if none does, the one that holds least.

    spare: bytes below the budget, what is kept free counted as used; negative if nothing fits. peaks: of all that was
    tried. tied: plans of the same price that were not tried, since they stand behind it in the list. refused: what
    this model cannot follow, and why.
    """

    plan: Plan
    result: Result
    spare: float
    peaks: dict[Plan, int]
    tied: tuple[Plan, ...]
    refused: dict[Plan, str]


def cheapest(case: Case, budget: float, ranks: int) -> Choice:
    """Try stacks from the cheapest on, without the techniques that this model cannot follow."""
    usable = budget - kept_free(budget)
    alone = [outcome(case, plan) for plan in (Plan(recompute=True), Plan(flash=True), Plan(chunked_loss=True))]
    refused = {found.plan: found.remark for found in alone if found.result is None}
    without = {name for plan in refused for name in fields_of(plan)}
    order = [plan for plan in stacks(ranks, case.batch_size) if without.isdisjoint(fields_of(plan))]
    peaks: dict[Plan, int] = {}  # of all that is tried
    too_large: set[tuple] = set()  # (stage, dtype, offload) of which the states alone are
    for plan in (left := iter(order)):
        kind = plan.stage, plan.dtype, plan.offload
        if kind in too_large or (result := outcome(case, plan).result) is None:  # a stage may refuse this model
            continue
        peaks[plan] = result.peak["total"]
        if peaks[plan] <= usable:
            break
        if result.parts["optimizer"] + (result.parts["parameters"] if plan.stage != 3 else 0) > usable:
            too_large.add(kind)
    if not peaks:
        raise NotPossible(f"no stack of techniques can be run on {ranks} ranks: the table says why for each technique")
    plan = min(peaks, key=peaks.__getitem__)  # what fits holds less than all before it
    tied = tuple(other for other in left if price(other) == price(plan))
    return Choice(plan, case.run(plan), usable - peaks[plan], peaks, tied, refused)


def largest(case: Case, budget: float, plan: Plan) -> int:
    """How many samples the largest batch has that fits; 0 if none does. `ValueError` if it cannot be cut."""

    def peak_of(samples: int) -> int:
        batch = of_samples(case.inputs, lambda x: x.new_empty((samples, *x.shape[1:]), device="meta"))
        return Case(case.model, batch, case.make_optimizer, case.card).run(plan).peak["total"]

    usable, peaks = budget - kept_free(budget), {0: 0}
    low, high, n = 0, 0, max(1, case.batch_size)  # low fits, high does not; 0: not known yet
    pieces = next((pieces for pieces in range(2, n + 1) if n % pieces == 0), 0)
    if pieces and time_first(case.model):
        case.run(Plan(micro_batches=pieces))  # is refused if what it cuts is time
    while high - low != 1:
        peaks[n] = peak_of(n)
        low, high = (n, high) if peaks[n] <= usable else (low, n)
        n = 2 * low
        if high:  # a peak grows nearly by a line
            n = low + int((high - low) * (usable - peaks[low]) / (peaks[high] - peaks[low]))
            n = min(max(n, low + 1), high - 1)
    return low
