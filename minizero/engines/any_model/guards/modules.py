"""Against modules that an engine cannot wrap, or that changed after it did, and against backwards that cannot be right.

DeepSpeed#846: a part that is added later is never trained. pytorch#63916: buffers that share memory. DeepSpeed#4808:
ranks that use other experts. fairscale#642: weights that autograd keeps in another form.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from minizero import torch_private
from minizero.engines.any_model.guards.optimizers import check_hooks, check_place
from minizero.engines.any_model.unit import Unit
from minizero.ranks.comm import Comm


def check_module(stage: str, module: nn.Module, comm: Comm, dtype: torch.dtype | None) -> None:
    """`ValueError` if `module` cannot be wrapped: it must have FP32 parameters that train, on one device."""
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{stage}: dtype must be torch.float32, float16 or bfloat16, not {dtype}")
    for fault in faults(module, comm):
        raise ValueError(f"{stage}: {fault}")
    for name, parameter in module.named_parameters():
        check_hooks(stage, name, parameter)


def faults(module: nn.Module, comm: Comm) -> Iterator[str]:
    """Why `module` cannot be wrapped on this rank, and what to do."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for name, tensor in [*parameters.items(), *buffers.items()]:
        if is_lazy(tensor):
            yield f"{name} is lazy, and has no shape yet: run one forward before wrapping"
        if tensor.is_meta:
            advice = "module.to_empty(device=...), then initialise it or load a state dict, then wrap it"
            yield f"{name} is on the meta device, and has no values: {advice}"
        if tensor.layout != torch.strided:
            yield f"{name} is {tensor.layout}, not a dense tensor: call to_dense() first"
    if not any(p.requires_grad for p in parameters.values()):
        yield "the module has no parameters that train"
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            yield f"{name or 'the module'} is a ScriptModule, which takes no hooks of ours: wrap the plain module"
        name, clips = name or "the module", getattr(part, "max_norm", None) is not None
        looks_up = isinstance(part, nn.Embedding | nn.EmbeddingBag) or clips
        trains = looks_up and getattr(getattr(part, "weight", None), "requires_grad", False)
        if isinstance(part, nn.SyncBatchNorm):
            advice = "use BatchNorm, or a norm that does not look at the batch, such as GroupNorm"
            yield f"{name} is a SyncBatchNorm, whose collectives would meet the engine's: {advice}"
        if trains and getattr(part, "sparse", False):
            yield f"{name} gives sparse gradients, shards are dense: sparse=False"
        if trains and clips and comm.size > 1:
            yield (
                f"{name} has a max_norm: its forward writes in place to the rows that this rank looks up. It would be "
                "right if all ranks looked up the same rows in each forward, which nobody can see here: leave it out, "
                "or scale what it returns"
            )
    if len(devices := sorted({str(p.device) for p in parameters.values()})) > 1:
        yield f"parameters on mixed devices ({', '.join(devices)}): move the module to one"
    by_memory: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            if parameter.is_complex():
                advice = "keep real and imaginary part in one more dimension, as torch.view_as_real gives them"
            elif not parameter.is_floating_point():
                advice = "make it a buffer (register_buffer): only floating-point numbers are trained"
            else:
                advice = "call module.float(); dtype= makes the engine compute in 16 bits"
            yield f"parameters must be float32, {name} is {parameter.dtype}: {advice}"
        if hasattr(parameter, "wrapped_in"):
            yield f"{name} is wrapped in {parameter.wrapped_in[2]} already: wrap a fresh module"
        if vars(parameter).setdefault("claimed_by", comm.rank) != comm.rank:
            yield f"{name} is another rank's: let each thread build or copy.deepcopy() the module"
        if parameter.numel() == 0:
            yield f"{name} has no elements: take it out of the module"
        by_memory.setdefault(torch_private.place(parameter)[0], {})[name] = parameter
    for name, buffer in buffers.items():
        if shared := by_memory.get(torch_private.place(buffer)[0]):
            advice = "compute it from the parameter in forward"
            yield f"the buffer {name} lies in the memory of {[*shared][0]}, which moves into a flat buffer: {advice}"
    for together in by_memory.values():
        for (name, one), (other, two) in itertools.combinations(together.items(), 2):
            memory = torch.empty(one.untyped_storage().nbytes() // one.itemsize)  # on the CPU, where NumPy can look
            x, y = (memory.as_strided(p.shape, p.stride(), p.storage_offset()).numpy() for p in (one, two))
            if np.shares_memory(x, y):
                advice = "tie them by assigning the same nn.Parameter to both, or slice one in forward"
                both = f"{other} and {name} are two parameters in one memory"
                yield f"{both}, and would be trained apart: {advice}"


def check_complete(stage: str, module: nn.Module, complete: dict[str, int], units: Sequence[Unit]) -> None:
    """`RuntimeError` if the module has other parameters, frozen ones or hooks than when it was wrapped.

    complete: what `names_and_parameters` gave then.
    """
    if (now := names_and_parameters(module)) != complete:
        changed = [name for name in {**now, **complete} if now.get(name) != complete.get(name)]
        raise RuntimeError(
            f"{stage}: {', '.join(changed)}: parameters added, replaced or removed after wrapping would not be trained "
            "or saved: complete the module, then wrap it"
        )
    with torch_private.as_plain_tensors():  # those of the guards answer each question in Python
        for unit in units:
            checked = (*unit.parameters, *unit.shards) if torch.is_grad_enabled() else ()  # PEFT switches adapters off
            if any(parameter.requires_grad != unit.trains for parameter in checked):
                raise RuntimeError(
                    f"{stage}: requires_grad changed in {unit.name}: freeze before wrapping, or use no_grad"
                )
            check_place(stage, unit)
            for name, parameter in zip(unit.layout.names, unit.parameters, strict=True):
                check_hooks(stage, name, parameter)


def names_and_parameters(module: nn.Module) -> dict[str, int]:
    """The identity of the parameter behind each name."""
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


def check_unchanged(stage: str, unit: Unit, version: int, *, double_backward: bool) -> None:
    """`RuntimeError` if backward cannot use the unit's parameters as forward did. double_backward: is it served?"""
    if unit.master._version != version:
        raise RuntimeError(f"{stage}: {unit.name} was changed between its forward and its backward")
    if torch.is_grad_enabled() and not double_backward:
        raise RuntimeError(
            f"{stage}: double backward (create_graph=True, torch.func) is not supported: use DDP, Zero1 or "
            "Zero2, and torch.autograd.grad(…, inputs, create_graph=True)"
        )


def check_writes(stage: str, unit: Unit) -> None:
    """`RuntimeError` if a parameter of the unit was written to so that the unit's master cannot have it."""
    memory, start = torch_private.place(unit.replica)
    its = zip(unit.parameters, unit.layout.names, unit.layout.offsets, unit.writes, strict=True)
    for parameter, name, offset, writes in its:
        if torch_private.place(parameter) != (memory, start + offset):
            what = "given other memory, as `.data =` does: copy_() into it instead"
        elif unit.dtype != unit.master.dtype and parameter._version != writes:
            what = (
                "written to, its FP32 master was not: write to parameters(), under no_grad and after the step, or "
                "initialise the module before wrapping it"
            )
        else:
            continue
        raise RuntimeError(f"{stage}: {name} was {what}")


def check_gradient(stage: str, unit: Unit, gradient: torch.Tensor | None, *, again: bool, gathered: bool) -> None:
    """`RuntimeError` if a parameter of the unit has a gradient that the engine cannot use.

    again: the unit is reduced already. gathered: its parameters are there.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{stage}: backward(create_graph=True): .grad is an average over ranks, which no graph "
            "contains: use torch.autograd.grad(…, inputs, create_graph=True), then backward()"
        )
    if again:
        raise RuntimeError(
            f"{stage}: a second gradient for {unit.name} after it was reduced: "
            "use checkpoint with use_reentrant=False, or no_sync()"
        )
    if not gathered:
        raise RuntimeError(
            f"{stage}: backward reached {unit.name} while it was not gathered: a tensor that it made "
            "was used, but was neither in its output nor an attribute: return it from the unit's forward"
        )
    if gradient is not None and gradient.is_sparse:
        raise RuntimeError(f"{unit.name}: sparse gradients are not supported: use sparse=False")


def about_units(error: Exception) -> Exception:
    """What a gather raises says what to do if the ranks use other units, as they do with experts."""
    return type(error)(
        f"{error} If each rank uses other modules, such as experts: name a module around them all in units="
    )


def name_buffers(stage: str, module: nn.Module, dtype: torch.dtype | None, error: BaseException) -> None:
    """In 16 bits, if `error` says that dtypes differ: `RuntimeError` that names the buffers in FP32."""
    names = [n for n, b in module.named_buffers() if b.dtype == torch.float32 and "running_" not in n]  # not of norms
    if dtype in (torch.float16, torch.bfloat16) and names and type(error) is RuntimeError and "type" in str(error):
        how = f"buffers keep their dtype, torch.float32: cast {', '.join(names)} in forward, or before wrapping"
        raise RuntimeError(f"{stage}: {error}; {how}") from error


def say_what_is_held(stage: str, module: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of what stage 3 will hold whole: a unit that is most of the model, and weights that forward computes."""
    total = sum(unit.layout.numel for unit in units)
    for unit in units:
        by_module: Counter[str] = Counter()
        for name, shape in zip(unit.layout.names, unit.layout.shapes, strict=True):
            by_module[name.rpartition(".")[0]] += shape.numel()
        if 2 * unit.layout.numel > total and 2 * max(by_module.values()) < unit.layout.numel:  # its modules are smaller
            warnings.warn(
                f"{stage}: the unit {unit.name} holds {unit.layout.numel / total:.0%} of the parameters, and is "
                "gathered as a whole: name smaller modules in units=, or put the blocks into a ModuleList",
                stacklevel=2,
            )
    parts = module.named_modules()
    computed = (name for name, part in parts if is_parametrized(part) or torch_private.weight_is_computed(part))
    for name in itertools.islice(computed, 1):
        warnings.warn(
            f"{stage}: autograd keeps the weight of {name or 'the module'}, which is computed from others (a "
            "parametrization, weight_norm), whole and on each rank, until backward: recompute its block, by "
            "minizero.recompute.checkpoint",
            stacklevel=2,
        )


def say_what_autocast_keeps(stage: str, dtype: torch.dtype | None, device: str) -> bool:
    """Warn if torch.autocast casts FP32 weights: autograd keeps the copies, and stage 3 cannot free them. Did it?"""
    casts = dtype in (None, torch.float32) and torch.is_grad_enabled() and torch.is_autocast_enabled(device)
    if casts:
        warnings.warn(
            f"{stage}: autograd keeps the copy that torch.autocast makes of each weight, whole and on each rank, until "
            "backward, and a second forward in the same block of autocast fails: wrap with "
            f"dtype={torch.get_autocast_dtype(device)}, and leave autocast out",
            stacklevel=2,
        )
    return casts


def check_compiled(stage: str, whole: nn.Module, units: Sequence[Unit]) -> None:
    """`ValueError` if a unit would be gathered and released inside what a module compiled. whole: the model."""
    used_by = {unit.module for unit in units}
    for module in whole.modules():
        with_hooks = torch_private.is_compiled(module)  # by module.compile(); torch.compile(module) has its around it
        compiled = with_hooks or torch_private.is_compiled_inside(module)
        if compiled and used_by.intersection(module.modules()) - (set() if with_hooks else {module}):
            raise ValueError(
                f"{stage}: a compiled {type(module).__name__} contains units, whose parameters come "
                "and go: wrap the plain module, with blocks[i] = torch.compile(blocks[i]) for each block"
            )
