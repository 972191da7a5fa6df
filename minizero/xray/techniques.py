"""What would help: the same step, run again with each technique, and with the stacks that people use.

A row is a run, not a formula. So a technique that makes this model's peak higher shows it, and the category that grew
says why. A technique that this model cannot follow is a row with the reason.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from minizero.xray.case import Case, NotPossible
from minizero.xray.plan import Plan
from minizero.xray.step import Result

BF16 = torch.bfloat16
FORWARD = "about a third more time"
SMALLER = "smaller products; a loss that is no mean changes"
MASTERS = "rounding to 8 bits"
STAGE_3 = "half as much again is sent"
HOST = "traffic to the CPU, which runs the optimizer"
OTHER = "another optimizer, to be tuned anew"
# Why a technique can make the peak higher: by what the plan has, and by the category that grew most.
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
    ("foreach", "temporary"): "all updates are there at once, not one parameter's",
}


@dataclasses.dataclass(frozen=True)
class Technique:
    """A row's name, its plan, and its price in words."""

    name: str
    plan: Plan
    price: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table: a result, or why there is none."""

    technique: Technique
    result: Result | None
    against: float  # its peak / the plain step's
    remark: str  # why there is no result, or why the peak is higher


def techniques(ranks: int, batch: int) -> Iterator[Technique]:
    """On one device, on `ranks` of them, and stacks. Each rank has a batch of the plain step's size."""

    def row(name: str, price: str, **plan: Any) -> Technique:
        return Technique(name, Plan(**plan), price)

    yield row("recompute of each block", FORWARD, recompute=True)
    for pieces in sorted({2, batch} - {0, 1}):
        if batch % pieces == 0:
            yield row(f"{pieces} micro-batches", SMALLER, micro_batches=pieces)
    yield row("attention without scores", "none: FlashAttention is faster, too", no_scores=True)
    yield row("loss in chunks", "little: the head's products are cut", loss_in_chunks=True)
    yield row("BF16 with FP32 masters", MASTERS, dtype=BF16)
    yield row("SGD with momentum", OTHER, momentum=True)
    yield row("optimizer as on a GPU", "none: foreach is the default there", foreach=True)
    if ranks == 1:
        return
    on = {"ranks": ranks}
    yield row(f"DDP on {ranks}", "gradients are sent", stage=0, **on)
    yield row(f"ZeRO-1 on {ranks}", "as DDP", stage=1, **on)
    yield row(f"ZeRO-2 on {ranks}", "as DDP", stage=2, **on)
    yield row(f"ZeRO-3 on {ranks}", STAGE_3, stage=3, **on)
    if (group := largest_divisor(ranks)) > 1:
        yield row(
            f"ZeRO-3 in groups of {group}", "more memory, less between machines", stage=3, sharding_factor=group, **on
        )
    yield row(f"ZeRO-3 on {ranks}, offload", HOST, stage=3, offload=True, **on)
    stack: dict[str, Any] = dict(stage=3, dtype=BF16, **on)
    yield row("ZeRO-3, BF16", f"{STAGE_3}; {MASTERS}", **stack)
    yield row("ZeRO-3, BF16, recompute", FORWARD, **stack, recompute=True)
    yield row("the same, loss in chunks", FORWARD, **stack, recompute=True, loss_in_chunks=True)
    yield row("the same, offload", f"{FORWARD}; {HOST}", **stack, recompute=True, offload=True)


def largest_divisor(number: int) -> int:
    """The largest divisor below the number itself."""
    return max(factor for factor in range(1, number) if number % factor == 0)


def outcome(case: Case, technique: Technique, plain: Result) -> Outcome:
    """Run a technique on a case."""
    try:
        found = case.run(technique.plan)
    except NotPossible as error:
        return Outcome(technique, None, 0.0, f"not possible: {error}")
    against = found.peak["total"] / plain.peak["total"]
    return Outcome(technique, found, against, why_higher(technique.plan, found, plain) if against > 1 else "")


def why_higher(plan: Plan, found: Result, plain: Result) -> str:
    """Which category grew most between two peaks, and why, if that is known."""
    grown = {name: found.parts[name] - plain.parts[name] for name in found.parts if name not in ("total", "host")}
    category = max(grown, key=grown.__getitem__)
    changed = [field.name for field in dataclasses.fields(Plan) if getattr(plan, field.name) != field.default]
    words = [WHY_HIGHER[field, category] for field in changed if (field, category) in WHY_HIGHER]
    return f"higher: more {category}" + "".join(f"; {reason}" for reason in words[:1])
