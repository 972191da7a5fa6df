"""The techniques in words: one table, with a row for each. A stack of techniques has the words of all of them.

`outcome` runs the same step again with one of them, or with a stack. It is a run, not a formula. So a technique that
makes this model's peak higher shows it, and the category that grew says why.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from minizero.xray.case import Case, NotPossible
from minizero.xray.plan import Plan
from minizero.xray.step import Result


class Technique(NamedTuple):
    """A row. {value} in its name is the plan's field. price: as in budget.py, in percent."""

    name: str
    costs: str
    price: int = 0


# By the field of a plan; a stage also by its number.
TECHNIQUES = {
    "stage 0": Technique("DDP on {ranks} ranks", "gradients are sent"),
    "stage 1": Technique("ZeRO-1 on {ranks} ranks", "as DDP"),
    "stage 2": Technique("ZeRO-2 on {ranks} ranks", "as DDP"),
    "stage 3": Technique("ZeRO-3 on {ranks} ranks", "half as much again is sent", 6),
    "sharding_factor": Technique("in groups of {value}", "more memory, less between machines"),
    "reshard_after_forward": Technique("whole until backward", "a third less of that, for more memory"),
    "offload": Technique("offload", "traffic to the CPU, which runs the optimizer", 100),
    "dtype": Technique(  # no time, but numbers change
        "BF16 with FP32 masters",
        "rounding to 8 bits; 20 bytes a parameter on one card, where autocast and DeepSpeed take 16 to 18",
        3,
    ),
    "recompute": Technique("recompute of each block", "about a third more time", 33),
    "micro_batches": Technique(
        "{value} micro-batches",
        "smaller products; a loss that is no mean changes; under ZeRO-3 each piece gathers again",
    ),
    "flash": Technique("attention without scores", "none: FlashAttention is faster, too", 1),  # but a line changes
    "chunked_loss": Technique("loss in chunks", "little: the head's products are cut", 2),
    "momentum": Technique("SGD with momentum", "another optimizer, to be tuned anew"),
    "eight_bit": Technique("8-bit Adam", "rounding of its states; counted, not run: bitsandbytes has it"),
    "four_bit": Technique(
        "frozen matrices in 4 bits",
        "rounding, and each matrix is made whole while it is used; counted, not run: bitsandbytes has it",
    ),
}
# Why a technique can make the peak higher: by its field, and by the category that grew most.
WHY_HIGHER = {
    ("micro_batches", "gradients"): "the sum of the gradients waits while the next micro-batch runs",
    ("micro_batches", "activations"): "the gradients so far wait while the next micro-batch runs",
    ("micro_batches", "temporary"): "each micro-batch makes gradients that are added to the sum",
    ("dtype", "optimizer"): "FP32 masters come on top of the states",
    ("dtype", "gradients"): "gradients are there in 16 bits, and as FP32 for the optimizer",
    ("dtype", "temporary"): "some operators compute in FP32, and cast first",
    ("recompute", "temporary"): "what one block keeps is made again in backward",
    ("stage", "gradients"): "gradients are copied into flat buffers to be sent",
    ("stage", "communication"): "a ring receives into buffers of its own",
    ("stage", "temporary"): "the gradient of a parameter is there before it is copied into the flat buffer",
    ("reshard_after_forward", "parameters"): "all are whole from forward to backward, beside the shards",
}


def fields_of(plan: Plan) -> list[str]:
    """The fields that this plan sets, but for the number of ranks."""
    plain = vars(Plan(ranks=plan.ranks))
    return [name for name, value in vars(plan).items() if value != plain[name]]


def rows_of(plan: Plan) -> dict[str, Technique]:
    """The rows of a plan's techniques, by their names."""
    rows = {}
    for field in fields_of(plan):
        value = getattr(plan, field)
        if field == "stage" and plan.offload and plan.ranks == 1:
            continue  # one card shards nothing
        row = TECHNIQUES[f"stage {value}" if field == "stage" else field]
        rows[row.name.format(value=value, ranks=plan.ranks)] = row
    return rows


def name_of(plan: Plan) -> str:
    """What the report calls a plan."""
    return ", ".join(rows_of(plan)) or "as it is"


def costs_of(plan: Plan) -> str:
    """What all techniques of a plan cost, in words."""
    return "; ".join(row.costs for row in rows_of(plan).values())


class Outcome(NamedTuple):
    """What a plan has given: a result, or why there is none."""

    plan: Plan
    result: Result | None
    against: float  # its peak / the plain step's
    remark: str  # why there is no result, or why the peak is higher


def plans(ranks: int, batch: int, frozen: bool = True) -> Iterator[Plan]:
    """What is run: on one device, on `ranks` of them, and stacks. batch: a rank's samples; frozen: are parameters?"""
    yield Plan(recompute=True)
    yield from (Plan(micro_batches=pieces) for pieces in sorted({2, batch} - {0, 1}) if batch and batch % pieces == 0)
    yield from (Plan(flash=True), Plan(chunked_loss=True), Plan(dtype=torch.bfloat16))
    yield from (Plan(momentum=True), Plan(eight_bit=True), Plan(3, 1, offload=True))
    yield from [Plan(four_bit=True)] * frozen
    if ranks == 1:
        return
    yield from (Plan(stage, ranks) for stage in range(4))
    groups = max(factor for factor in range(1, ranks) if ranks % factor == 0)
    yield from [Plan(3, ranks, groups)] * (groups > 1)
    yield from (Plan(3, ranks, reshard_after_forward=False), Plan(3, ranks, offload=True))
    stack = Plan(3, ranks, dtype=torch.bfloat16)
    yield stack
    yield (stack := dataclasses.replace(stack, recompute=True))
    yield dataclasses.replace(stack, chunked_loss=True)
    yield dataclasses.replace(stack, offload=True)


def outcome(case: Case, plan: Plan) -> Outcome:
    """Run a plan, beside the plain step."""
    plain = case.run(Plan())
    try:
        found = case.run(plan)
    except NotPossible as error:
        return Outcome(plan, None, 0.0, f"not possible: {error}")
    if (against := found.peak["total"] / plain.peak["total"]) <= 1:
        return Outcome(plan, found, against, "")
    grown = {name: found.parts[name] - plain.parts[name] for name in found.parts if name not in ("total", "host")}
    category = max(grown, key=grown.__getitem__)
    words = [WHY_HIGHER[field, category] for field in fields_of(plan) if (field, category) in WHY_HIGHER]
    return Outcome(plan, found, against, "; ".join([f"higher: more {category}", *words[:1]]))
