"""Against optimizers that step the wrong tensors, or need whole ones; and hooks that see a part.

DeepSpeed#7807: an optimizer of matrices, of whose gradient a rank has averaged its own part only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from minizero import torch_private
from minizero.engines.any_model.guards.no_sync import check_averaged
from minizero.engines.any_model.unit import Unit


def check_hooks(stage: str, name: str, parameter: nn.Parameter) -> None:
    """`ValueError` if a hook on a parameter of the module may step with what it sees, which is no average."""
    if torch_private.gradient_hooks(parameter)[1]:
        raise ValueError(
            f"{stage}: a hook of register_post_accumulate_grad_hook on {name} would see this rank's gradient before it "
            "is averaged: put it on what parameters() of Zero1, Zero2 or Zero3 gives"
        )


def check_no_hook(shard: nn.Parameter) -> None:
    """`RuntimeError` if a shard whose own gradient comes has a hook: it would see each of two parts."""
    if any(torch_private.gradient_hooks(shard)):
        raise RuntimeError(
            "a hook on a shard, and a loss that uses the shard itself (a penalty over parameters()): the hook "
            "would be called for each of two parts of its gradient: let the hook add the penalty's gradient"
        )


def check_shard(tensor: torch.Tensor) -> None:
    """`RuntimeError` if an optimizer holds a parameter of the module in place of its shards."""
    if hasattr(tensor, "wrapped_in"):
        stage = tensor.wrapped_in[2]
        raise RuntimeError(
            f"this optimizer holds parameters that are not {stage}'s shards: it was built before the model was "
            "wrapped, or from a module around the wrapped model, such as torch.compile gives: "
            f"build it afterwards, from the parameters() of the {stage} itself"
        )


def check_step(optimizer: Optimizer, shards: Sequence[nn.Parameter], units: dict[Unit, Any]) -> None:
    """`RuntimeError` if an optimizer may not step now the shards that it holds. units: theirs, with the engines."""
    for unit, engine in units.items():
        check_averaged(engine.name, unit, shards)
        check_place(engine.name, unit)
    engines = {engine: unit for unit, engine in units.items() if not unit.original}
    for engine, unit in [*engines.items()][:1]:  # two may be sharded over other ranks
        check_states(optimizer, engine.name, unit)
    if getattr(optimizer, "found_inf", None) is not None and not all(unit.unsharded for unit in units):
        raise RuntimeError(
            "GradScaler lets a fused optimizer leave out a step by what this rank alone has seen: build the optimizer "
            "with fused=False, and let all ranks decide, as precision.DynamicLossScaler does"
        )
    for engine in engines:
        check_elementwise(optimizer, engine.name)
        if engine.passes == {"forward"} and all(shard.grad is None for shard in shards):
            advice = "Had it inputs=? Shards are in no graph, so no gradient comes: leave it out"
            raise RuntimeError(f"{engine.name}: a step without a backward. {advice}")


SHARDS_OF = "shards_of"  # a key of an optimizer's groups: it goes where the states go


def check_states(optimizer: Optimizer, stage: str, unit: Unit) -> None:
    """`RuntimeError` if the optimizer's states were loaded from another rank's shards."""
    mine = "all ranks" if unit.unsharded else f"rank {unit.comm.rank} of {unit.comm.size}"
    for group in optimizer.param_groups:
        if (other := group.setdefault(SHARDS_OF, mine)) != mine:
            raise RuntimeError(
                f"{stage}: the optimizer's states are of the shards of {other}, its shards are of {mine}: "
                "save and load by minizero.checkpoint, or on each rank its own state_dict()"
            )


def check_place(stage: str, unit: Unit) -> None:
    """`RuntimeError` if a shard was given other memory than its part of the master's."""
    memory, start = torch_private.place(unit.master)
    for shard in unit.shards:
        if shard.numel() and torch_private.place(shard) != (memory, start):
            raise RuntimeError(
                f"{stage}: a shard no longer lies in its unit's memory: something gave it other memory through .data, "
                "as vector_to_parameters does, so the model would not see it: copy_() into it under no_grad"
            )
        start += shard.numel()


# A shard is a piece of a flat buffer: no rows, no columns, the norm of a piece. That serves an optimizer that looks at
# one number at a time. These do.
optim = torch.optim
ELEMENTWISE = [optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad]
ELEMENTWISE += [optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD]
# These do not. LBFGS takes products of all numbers, Adafactor means of rows and columns, Muon multiplies matrices.
WHOLE_TENSORS = (optim.LBFGS, optim.Adafactor, optim.Muon)


def check_elementwise(optimizer: Optimizer, stage: str) -> None:
    """`RuntimeError` if the optimizer needs whole tensors, or if only its user can know."""
    name = type(optimizer).__name__
    if isinstance(optimizer, WHOLE_TENSORS):
        raise RuntimeError(
            f"{name} needs whole tensors, {stage} gives it flat shards: "
            "use DDP in FP32, or an elementwise optimizer such as AdamW"
        )
    if type(optimizer) not in ELEMENTWISE and not getattr(optimizer, "elementwise", False):
        raise RuntimeError(
            f"{stage} gives {name} flat shards, pieces of tensors end to end. Does it compute each number from that "
            "number, its gradient and its states alone? (Adam does. An optimizer that takes the norm of a tensor, or "
            "its rows and columns, does not.) If so, say optimizer.elementwise = True; if not, use DDP in FP32"
        )
