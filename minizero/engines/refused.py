"""What an engine refuses, and says so: modules it cannot wrap, optimizers it cannot serve.

The check before each optimizer step also marks the shards as written, so that replicas are refreshed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minizero import torch_private
from minizero.engines.unit import Unit


def mark(unit: Unit, stage: str) -> None:
    """Write on parameters and shards whose they are, for the checks in refused.py."""
    for parameter in unit.parameters:
        parameter.wrapped_in = stage  # type: ignore[attr-defined]
    for shard in unit.shards:
        shard.shard_of, shard.cut_at = stage, shard.data_ptr()  # type: ignore[attr-defined]


def check_module(stage: str, module: nn.Module, dtype: torch.dtype | None) -> None:
    """`ValueError` where `module` cannot be wrapped: it must have FP32 parameters that train, on one device."""
    parameters = dict(module.named_parameters())
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{stage}: dtype must be torch.float32, float16 or bfloat16, not {dtype}")
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError(f"{stage}: the module has no parameters that train")
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"{stage}: {name} is a SyncBatchNorm, whose collectives would meet the engine's: use BatchNorm, "
                "or a norm that does not look at the batch, such as GroupNorm"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ValueError(f"{stage}: {name or 'the module'} gives sparse gradients, shards are dense: sparse=False")
    if len(devices := sorted({str(p.device) for p in parameters.values()})) > 1:
        raise ValueError(f"{stage}: parameters on mixed devices ({', '.join(devices)}): move the module to one")
    owners: dict[Any, str] = {}  # by memory and place in it
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"{stage}: parameters must be float32, {name} is {parameter.dtype}: "
                "call module.float(); dtype= makes the engine compute in 16 bits"
            )
        if hasattr(parameter, "wrapped_in"):
            raise ValueError(f"{stage}: {name} is wrapped in {parameter.wrapped_in} already: wrap a fresh module")
        if parameter.numel() == 0:
            raise ValueError(f"{stage}: {name} has no elements: take it out of the module")
        other = owners.setdefault(
            (torch_private.storage_id(parameter.untyped_storage()), parameter.storage_offset()), name
        )
        if other != name:
            raise ValueError(
                f"{stage}: {name} and {other} are two parameters in one memory, and would be trained apart: "
                "tie them by assigning the same nn.Parameter to both"
            )


def check_frozen(stage: str, units: Sequence[Unit]) -> None:
    """`RuntimeError` if a parameter was frozen, or unfrozen, after wrapping."""
    for unit in units:
        if any(parameter.requires_grad != unit.trains for parameter in unit.parameters):
            raise RuntimeError(f"{stage}: requires_grad changed in {unit.name}: freeze before wrapping")


def check_unchanged(engine: Any, unit: Unit, version: int) -> None:
    """`RuntimeError` if backward cannot use the unit's parameters as forward did."""
    if unit.master._version != version:
        raise RuntimeError(f"{type(engine).__name__}: {unit.name} was changed between its forward and its backward")
    if torch.is_grad_enabled() and engine.frees_replicas:
        raise RuntimeError(
            f"{type(engine).__name__}: double backward (create_graph=True) is not supported: use DDP, Zero1 or "
            "Zero2, and torch.autograd.grad(…, inputs, create_graph=True)"
        )


def check_compiled(engine: Any, modules: Iterable[nn.Module]) -> None:
    """`ValueError` if a unit of the engine would be gathered and released inside what one of `modules` compiled."""
    used_by = {unit.module for unit in engine.units}
    for module in modules if engine.frees_replicas else ():
        inside: set[Any] = set()
        if torch_private.is_compiled(module):  # module.compile(): its hooks are in it, too
            inside = set(module.modules()) | ({None} if module is engine.module else set())
        elif torch_private.is_compiled_inside(module):  # torch.compile(module): its hooks are around it
            inside = set(module.modules()) - {module}
        if inside & used_by:
            raise ValueError(
                f"{type(engine).__name__}: a compiled {type(module).__name__} contains units, whose parameters come "
                "and go: wrap the plain module, with blocks[i] = torch.compile(blocks[i]) for each block"
            )


def check_optimizer(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before every optimizer step in this process: does the optimizer hold what it should?"""
    shard = None
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        stage = getattr(parameter, "shard_of", None)
        if stage is None and hasattr(parameter, "wrapped_in"):
            wrapper = parameter.wrapped_in
            raise RuntimeError(
                f"this optimizer holds parameters that are not {wrapper}'s shards: it was built before the model was "
                "wrapped, or from a module around the wrapped model, such as torch.compile gives: "
                f"build it afterwards, from the parameters() of the {wrapper} itself"
            )
        if stage is not None and parameter.data_ptr() != parameter.cut_at:
            raise RuntimeError(
                f"{stage}: a shard no longer lies in its unit's memory: something gave it other memory through .data, "
                "as vector_to_parameters does, so the model would not see the step: copy_() into it under no_grad"
            )
        if stage is not None:  # a fused kernel writes without telling; this tells that the replica is old
            torch.autograd.graph.increment_version(parameter)
        if stage is not None and not hasattr(parameter, "wrapped_in"):  # FP32 DDP's are the original parameters
            shard = parameter
    if shard is not None:
        check_elementwise(optimizer, shard.shard_of)


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


register_optimizer_step_pre_hook(check_optimizer)
