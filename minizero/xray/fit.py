"""The cheapest stack of techniques that fits a budget, and the lines that write it down.

    price    a guess at the time that a technique adds to a step, as a share of it: it only sets the order of trying
    peak     a run of each stack, from the cheapest on, until one fits

DDP and ZeRO-1 are not tried: ZeRO-2 sends as many bytes and holds less. The budget is not filled to the brim: `kept_free`
is for what no ledger of tensors sees.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import nn

from minizero.engines.units import repeated_blocks
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
        + 0.03 * (plan.dtype is not None)  # none, but numbers change
        + 0.03 * math.log2(plan.micro_batches)
        + 0.33 * plan.recompute
        + 1.0 * plan.offload
    )


def stacks(ranks: int, batch: int) -> list[Plan]:
    """The plans to be tried, the cheapest first."""
    pieces = sorted({1, batch} | ({2} if batch % 2 == 0 else set())) if batch else [1]
    plans = []
    for dtype, scores, pieces_of_batch, recompute in itertools.product(
        (None, torch.bfloat16), (False, True), pieces, (False, True)
    ):
        plan = Plan(dtype=dtype, no_scores=scores, micro_batches=pieces_of_batch, recompute=recompute, foreach=True)
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
    """Try stacks from the cheapest on. `NotPossible` if the step cannot be run at all."""
    usable = budget - kept_free(budget)
    best: tuple[float, Plan, Result] | None = None
    tried = 0
    refused: NotPossible | None = None
    for plan in stacks(ranks, case.batch_size):
        try:
            found = case.run(plan)
        except NotPossible as error:
            refused = error
            continue
        tried += 1
        spare = usable - found.peak["total"]
        if best is None or spare > best[0]:
            best = spare, plan, found
        if spare >= 0:
            break
    if best is None:
        raise refused or NotPossible("no plan")
    spare, plan, found = best
    return Fit(plan, found, spare, tried)


# What to write. Both are read by a person, who puts them at the right place of a script.


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of the lists of repeated blocks, such as "model.layers"."""
    return list(dict.fromkeys(path.rpartition(".")[0] for path, _ in repeated_blocks(model)))


def with_minizero(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines of a plan with this package."""
    if plan.recompute:
        yield "from minizero.recompute import Checkpointed"
        for path in blocks_of(model):
            yield f"for name, block in list(model.{path}.named_children()):".replace("model..", "model.")
            yield f"    setattr(model.{path}, name, Checkpointed(block))".replace("model.,", "model,")
    if plan.stage is not None or plan.dtype is not None:
        engine = ("DDP", "Zero1", "Zero2", "Zero3")[plan.stage or 0]
        options = [f"dtype={plan.dtype}"] if plan.dtype else []
        options += [f"sharding_factor={plan.sharding_factor}"] if plan.sharding_factor else []
        options += ["offload=True"] if plan.offload else []
        yield f"from minizero import Comm, {engine}"
        yield f"model = {engine}({', '.join(['model', 'Comm.from_process_group()', *options])})"
    yield from _optimizer(plan)
    if plan.no_scores:
        yield "from flash import flash_attention  # in your attention: flash_attention(q, k, v, causal=True)"
    if plan.micro_batches > 1:
        yield "from minizero.accumulate import accumulate"
        yield f"loss = accumulate(model, micro_batches)  # {plan.micro_batches} of them, in place of model(…) and backward()"


def with_pytorch(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines of the same plan with PyTorch's own."""
    if plan.recompute:
        yield "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"
        for path in blocks_of(model):
            yield f"for name, block in list(model.{path}.named_children()):"
            yield f"    setattr(model.{path}, name, checkpoint_wrapper(block))"
    if plan.stage in (0, 1):
        yield "model = torch.nn.parallel.DistributedDataParallel(model)"
    if plan.stage in (2, 3):
        yield "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard"
        options = ["reshard_after_forward=False"] if plan.stage == 2 else []  # parameters stay: between ZeRO-2 and 3
        if plan.dtype:
            options.append(f"mp_policy=MixedPrecisionPolicy(param_dtype={plan.dtype})")
        options += ["offload_policy=CPUOffloadPolicy()"] if plan.offload else []
        for path in blocks_of(model):
            yield f"for block in model.{path}:"
            yield f"    fully_shard({', '.join(['block', *options])})"
        yield f"fully_shard({', '.join(['model', *options])})"
    elif plan.dtype:
        yield f"with torch.autocast(device, {plan.dtype}):  # around the forward; parameters stay FP32"
    yield from _optimizer(plan)
    if plan.no_scores:
        yield "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # in your attention"
    if plan.micro_batches > 1:
        yield f"(loss / {plan.micro_batches}).backward()  # for each micro-batch; optimizer.step() after the last"


def _optimizer(plan: Plan) -> Iterator[str]:
    yield "optimizer = torch.optim.AdamW(model.parameters())  # after the wrapping" if plan.stage else "# the optimizer stays"
