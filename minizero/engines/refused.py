"""What an engine refuses, and says so: modules it cannot wrap, optimizers it cannot serve.

The check before each optimizer step also marks the shards as written, so that replicas are refreshed.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from minizero import torch_private


class Released(nn.Parameter):
    """A parameter of the module while its unit is not gathered, or old. It is empty; who computes with it is told so.

    PyTorch's `UninitializedParameter` refuses in the same way.
    """

    wrapped_in: tuple[str, str, str]
    QUESTIONS = ["__repr__", "__hash__", "size", "dim", "is_floating_point", "is_complex", "untyped_storage"]
    QUESTIONS += ["data_ptr", "register_hook", "register_post_accumulate_grad_hook"]
    # Of Module.to(), if it changes nothing.
    QUESTIONS += ["to", "float", "half", "bfloat16", "cpu", "cuda", "_has_compatible_shallow_copy_type"]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = function.__self__.__name__ if type(function).__name__ == "method-wrapper" else None
        writes = attribute == "data" and function.__name__ == "__set__" and args[1] is not args[0]
        if not writes and (attribute or function.__name__ in cls.QUESTIONS):
            answer = super().__torch_function__(function, types, args, kwargs or {})
            if not isinstance(answer, torch.Tensor) or answer is args[0] or attribute == "grad":
                return answer
        name, unit, stage = next(p for p in tree_leaves((args, kwargs)) if isinstance(p, cls)).wrapped_in
        if stage == "Zero3":
            when = "outside the forward of its unit"
            way = "call the unit, make a module around it the unit (units=), or set reshard_after_forward=False"
        else:
            when, way = "from optimizer.step() to the next forward of the whole model", "run that forward first"
        raise RuntimeError(
            f"{stage}: {name}, of the unit {unit}, is empty {when}. To compute with it, {way}. To copy the weights, "
            f"call gather_state_dict() on all ranks. To average them, or for a penalty, take {stage}.parameters()"
        )


def mark(unit: Any, stage: str, names: dict[int, list[str]]) -> None:
    """Write on parameters and shards whose they are, for the checks in this file."""
    for parameter in unit.parameters:
        parameter.wrapped_in = names[id(parameter)][0], unit.name, stage
    for shard in unit.shards:
        shard.shard_of, shard.cut_at = (weakref.ref(unit), stage), shard.data_ptr()
        if unit.trains and not unit.original:
            shard.register_post_accumulate_grad_hook(check_hooks)


def check_hooks(shard: torch.Tensor) -> None:
    """Autograd has brought a shard a gradient of its own: a penalty's. `RuntimeError` if the shard has hooks."""
    if any(torch_private.gradient_hooks(shard)):
        raise RuntimeError(
            "a hook on a shard, and a loss that uses the shard itself (a penalty over parameters()): the hook would be "
            "called for each of two parts of its gradient: let the hook add the penalty's gradient"
        )


check_hooks.ours = True  # type: ignore[attr-defined]


def check_module(stage: str, module: nn.Module, dtype: torch.dtype | None) -> None:
    """`ValueError` where `module` cannot be wrapped: it must have FP32 parameters that train, on one device."""
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    for name, tensor in [*parameters.items(), *buffers.items()]:
        if is_lazy(tensor):
            raise ValueError(f"{stage}: {name} is lazy, and has no shape yet: run one forward before wrapping")
        if tensor.is_meta:
            raise ValueError(
                f"{stage}: {name} is on the meta device, and has no values: module.to_empty(device=...), then "
                "initialise it or load a state dict, then wrap it"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{stage}: {name} is {tensor.layout}, not a dense tensor: call to_dense() first")
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
            if parameter.is_complex():
                advice = "keep real and imaginary part in one more dimension, as torch.view_as_real gives them"
            elif not parameter.is_floating_point():
                advice = "make it a buffer (register_buffer): only floating-point numbers are trained"
            else:
                advice = "call module.float(); dtype= makes the engine compute in 16 bits"
            raise ValueError(f"{stage}: parameters must be float32, {name} is {parameter.dtype}: {advice}")
        if torch_private.gradient_hooks(parameter)[1]:
            raise ValueError(
                f"{stage}: {name} has a hook of register_post_accumulate_grad_hook, which would see this rank's "
                "gradient before the average: register it on what parameters() of a Zero1, Zero2 or Zero3 gives"
            )
        if hasattr(parameter, "wrapped_in"):
            raise ValueError(f"{stage}: {name} is wrapped in {parameter.wrapped_in[-1]} already: wrap a fresh module")
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
    memories = {torch_private.storage_id(p.untyped_storage()): name for name, p in parameters.items()}
    for name, buffer in buffers.items():
        if (memory := torch_private.storage_id(buffer.untyped_storage())) in memories:
            raise ValueError(
                f"{stage}: the buffer {name} lies in the memory of {memories[memory]}, which moves into a flat "
                "buffer: compute it from the parameter in forward"
            )


def check_complete(engine: Any) -> None:
    """`RuntimeError` if the module has other parameters, frozen ones or hooks than when it was wrapped."""
    stage, now = type(engine).__name__, names_and_parameters(engine.module)
    if now != engine.complete:
        changed = [name for name in {**now, **engine.complete} if now.get(name) != engine.complete.get(name)]
        raise RuntimeError(
            f"{stage}: {', '.join(changed)}: parameters added, replaced or removed after wrapping would not be trained "
            "or saved: complete the module, then wrap it"
        )
    for unit in engine.units:
        if any(parameter.requires_grad != unit.trains for parameter in unit.parameters):
            raise RuntimeError(f"{stage}: requires_grad changed in {unit.name}: freeze before wrapping")
        if unit.original and any(torch_private.gradient_hooks(p)[1] for p in unit.parameters):
            raise RuntimeError(
                f"{stage} in FP32: a hook on a parameter of {unit.name} would see this rank's gradient before it is "
                "averaged: use Zero1, Zero2 or Zero3, whose parameters() are given the average"
            )


def names_and_parameters(module: nn.Module) -> dict[str, int]:
    """The identity of the parameter behind each name."""
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


def check_unchanged(engine: Any, unit: Any, version: int) -> None:
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
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        reference, stage = getattr(parameter, "shard_of", (None, ""))
        unit = reference() if reference else None
        if not stage and hasattr(parameter, "wrapped_in"):
            *_, wrapper = parameter.wrapped_in
            raise RuntimeError(
                f"this optimizer holds parameters that are not {wrapper}'s shards: it was built before the model was "
                "wrapped, or from a module around the wrapped model, such as torch.compile gives: "
                f"build it afterwards, from the parameters() of the {wrapper} itself"
            )
        if unit is None:  # no shard, or of an engine that is gone
            continue
        if parameter.data_ptr() != parameter.cut_at:
            raise RuntimeError(
                f"{stage}: a shard no longer lies in its unit's memory: something gave it other memory through .data, "
                "as vector_to_parameters does, so the model would not see the step: copy_() into it under no_grad"
            )
        check_averaged(stage, parameter)
        if not unit.original:
            check_elementwise(optimizer, stage)
            torch.autograd.graph.increment_version(parameter)  # a fused kernel writes without telling
            unit.point_parameters_at(None)  # the replica is old from here on


def check_averaged(stage: str, shard: torch.Tensor) -> None:
    """`RuntimeError` if the shard's .grad is this rank's sum under no_sync."""
    if hasattr(shard.grad, "held_back"):
        raise RuntimeError(
            f"{stage}: no_sync() holds the gradients back, each rank has its own: run the last backward outside "
            "no_sync() before you step or clip, or drop them by zero_grad()"
        )


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
