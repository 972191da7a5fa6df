"""The cheapest stack of techniques that fits a budget.

    price    a guess at the time that a technique adds to a step, as a share of it: it only sets the order of trying
    peak     a run of each stack, from the cheapest on, until one fits

DDP and ZeRO-1 are not tried: ZeRO-2 sends as many bytes, and holds less. A part of the budget is kept free, for what no
ledger of tensors sees.
"""

import dataclasses
import itertools
import math

import torch

from minizero.xray.case import Case, NotPossible
from minizero.xray.plan import Plan
from minizero.xray.step import Result

GIB = 2**30
CONTEXT = 1 * GIB  # CUDA's own, its libraries' workspaces, NCCL's buffers: about that on today's GPUs
FRAGMENTS = 0.06  # of the budget: an allocator's pieces too small to use, and scratch inside operators


def kept_free(budget: float) -> float:
    """Bytes of a device that a plan must leave free."""
    return CONTEXT + FRAGMENTS * budget if budget > 4 * GIB else FRAGMENTS * budget


def price(plan: Plan) -> float:
    """The time that a plan adds to a step, roughly, as a share of the plain step's."""
    return (
        {None: 0.0, 0: 0.0, 1: 0.0, 2: 0.0, 3: 0.06}[plan.stage]
        + 0.01 * plan.no_scores  # none at all, but a line of the model changes
        + 0.02 * plan.loss_in_chunks
        + 0.03 * (plan.dtype is not None)  # none, but numbers change
        + 0.03 * math.log2(plan.micro_batches)
        + 0.33 * plan.recompute
        + 1.0 * plan.offload
    )


def stacks(ranks: int, batch: int) -> list[Plan]:
    """The plans to be tried, the cheapest first."""
    pieces = sorted({1, batch} | ({2} if batch % 2 == 0 else set())) if batch else [1]
    plans = []
    off_or_on = (False, True)
    for dtype, no_scores, in_chunks, micro_batches, recompute in itertools.product(
        (None, torch.bfloat16), off_or_on, off_or_on, pieces, off_or_on
    ):
        if no_scores and recompute:  # then no block stores anything
            continue
        plan = Plan(None, 1, dtype, None, False, recompute, micro_batches, no_scores, in_chunks, foreach=True)
        if ranks == 1:
            plans.append(plan)
            continue
        plans.append(dataclasses.replace(plan, stage=2, ranks=ranks))
        plans.append(dataclasses.replace(plan, stage=3, ranks=ranks))
        plans.append(dataclasses.replace(plan, stage=3, ranks=ranks, offload=True))
    return sorted(plans, key=price)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cheapest plan that fits, or, if none does, the one that holds least."""

    plan: Plan
    result: Result
    spare: float  # bytes below the budget, what is kept free counted as used; negative if nothing fits
    tried: int


def fit(case: Case, budget: float, ranks: int) -> Fit:
    """Try stacks from the cheapest on, without the techniques that this model cannot follow."""
    usable = budget - kept_free(budget)
    refused = [field for field in ("recompute", "no_scores", "loss_in_chunks") if not possible(case, field)]
    tried: list[Fit] = []
    too_large: set[tuple] = set()  # (stage, dtype, offload) of which the optimizer's states alone are
    for plan in stacks(ranks, case.batch_size):
        kind = plan.stage, plan.dtype, plan.offload
        if kind in too_large or any(getattr(plan, field) for field in refused):
            continue
        try:
            result = case.run(plan)
        except NotPossible:  # such as a stage that refuses this model: other stacks may fit
            continue
        tried.append(Fit(plan, result, usable - result.peak["total"], len(tried) + 1))
        if tried[-1].spare >= 0:
            return tried[-1]
        if result.parts["optimizer"] + (result.parts["parameters"] if plan.stage != 3 else 0) > usable:
            too_large.add(kind)
    if not tried:
        raise NotPossible(f"no stack of techniques can be run on {ranks} ranks: the table says why for each technique")
    return dataclasses.replace(max(tried, key=lambda fit: fit.spare), tried=len(tried))


def possible(case: Case, field: str) -> bool:
    """Can this model's step be run with a technique? field: the plan's."""
    try:
        case.run(Plan(**{field: True}))  # type: ignore[arg-type]
    except NotPossible:
        return False
    return True
