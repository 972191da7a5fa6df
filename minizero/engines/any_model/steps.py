"""An optimizer's step: whose are the shards that it holds, and what does it make old?

An optimizer knows no engine, so each shard says whose it is. Two functions are called around every optimizer step in
this process. The one before it refuses (guards/optimizers.py). The one after it empties the module's parameters, which
are old until the next forward gathers. (In FP32 DDP they are what was stepped, and stay.)
"""

import functools
import weakref
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from minizero.engines.any_model.guards.no_sync import check_untouched
from minizero.engines.any_model.guards.optimizers import check_no_hook, check_shard, check_step
from minizero.engines.any_model.guards.shards import watch, watching
from minizero.engines.any_model.unit import Unit


class Ours(functools.partial):
    """A function that an engine leaves on a module or a tensor: a copy of it shares the function, a file has none."""

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError("what an engine has wrapped cannot be pickled, nor its optimizer: save gather_state_dict()")


def mark(unit: Unit, engine: Any) -> None:
    """Write on parameters and shards whose they are."""
    for parameter, name, shape in zip(unit.parameters, unit.layout.names, unit.layout.shapes, strict=True):
        parameter.wrapped_in = name, unit.name, engine.name, shape.numel()  # type: ignore[attr-defined]
    weak = weakref.ref(unit), weakref.ref(engine)
    for shard in unit.shards:
        shard.shard_of = Ours(lambda: (weak[0](), weak[1]()))  # type: ignore[attr-defined]
        if unit.trains and not unit.original:
            shard.register_hook(Ours(own_gradient_comes, weakref.ref(shard)))
    watch(unit, watched=True)


def own_gradient_comes(weak: Any, _: torch.Tensor) -> None:
    """Autograd calls this hook of a shard if the loss uses the shard itself, in a penalty over `parameters()`."""
    check_no_hook(shard := weak())
    unit, _ = shard.shard_of()
    if unit is not None:
        check_untouched(unit)
        unit.gradient.begin()  # autograd will add to .grad: what no_sync shows there must go away first


def held_by(optimizer: Optimizer) -> tuple[list[nn.Parameter], dict[Unit, Any]]:
    """The shards that it holds, and their units, each with its engine."""
    shards, units = [], {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        unit, engine = parameter.shard_of() if hasattr(parameter, "shard_of") else (None, None)
        if unit and engine:
            shards.append(parameter)
            units[unit] = engine
        else:  # it is no shard, or of an engine that is gone
            check_shard(parameter)
    return shards, units


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """May it step what it holds? Norms of shards are not watched now, but inside of a closure they are."""
    shards, units = held_by(optimizer)
    for unit in units:
        watch(unit, watched=False)
    check_step(optimizer, shards, units)

    def inside(value: Any) -> Any:
        return watching(units)(value) if callable(value) else value

    return ((optimizer, *map(inside, args[1:])), {k: inside(v) for k, v in kwargs.items()}) if units else None


def mark_as_old(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The replicas of what the optimizer has stepped are old from here on."""
    for unit, engine in held_by(optimizer)[1].items():
        engine.done["step"] = True
        watch(unit, watched=True)
        if not unit.original:
            torch.autograd.graph.increment_version(unit.master)  # a fused kernel writes without telling
            unit.empty_parameters()


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(mark_as_old)
