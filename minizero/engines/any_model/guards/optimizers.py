"""Against optimizers that step the wrong tensors, or need whole ones; and hooks that see a part.

Two functions are called around every optimizer step in this process: one checks, one marks replicas as old.
DeepSpeed#7807: an optimizer of matrices, of whose gradient a rank has averaged its own part only.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from minizero import torch_private
from minizero.engines.any_model.guards.no_sync import check_averaged, check_untouched
from minizero.engines.any_model.guards.shards import Shard, watch
from minizero.engines.any_model.guards.wrapped import Ours
from minizero.engines.any_model.unit import Unit


def mark(unit: Unit, engine: Any) -> None:
    """Write on parameters and shards whose they are, for the checks of this folder."""
    for parameter, name, shape in zip(unit.parameters, unit.layout.names, unit.layout.shapes, strict=True):
        parameter.wrapped_in = name, unit.name, engine.name  # type: ignore[attr-defined]
        parameter.elements = shape.numel()  # type: ignore[attr-defined]
    weak = weakref.ref(unit), weakref.ref(engine)
    for shard in unit.shards:
        shard.shard_of = Ours(lambda: (weak[0](), weak[1]()))  # type: ignore[attr-defined]
        shard.cut_at = torch_private.place(shard)  # type: ignore[attr-defined]
        if unit.trains and not unit.original:
            shard.register_hook(own_gradient_comes(weakref.ref(shard)))
    watch_shards(unit)


def watch_shards(unit: Unit) -> None:
    """Let norms of the unit's shards be seen."""
    for shard in unit.shards if unit.trains and not unit.unsharded else ():
        if type(shard) is nn.Parameter:
            watch(shard, watched=True)


def own_gradient_comes(weak: Any) -> Callable[[torch.Tensor], None]:
    """The hook of a shard that autograd calls if the loss uses the shard itself, in a penalty over `parameters()`."""

    def comes(_: torch.Tensor) -> None:
        shard = weak()
        unit, _ = shard.shard_of()
        if any(torch_private.gradient_hooks(shard)):
            raise RuntimeError(
                "a hook on a shard, and a loss that uses the shard itself (a penalty over parameters()): the hook "
                "would be called for each of two parts of its gradient: let the hook add the penalty's gradient"
            )
        if unit is not None:
            check_untouched(unit)
            unit.own_gradient_comes()

    return comes


def check_hooks(stage: str, name: str, parameter: nn.Parameter) -> None:
    """`ValueError` if a hook on a parameter of the module may step with what it sees, which is no average."""
    if torch_private.gradient_hooks(parameter)[1]:
        raise ValueError(
            f"{stage}: a hook of register_post_accumulate_grad_hook on {name} would see this rank's gradient before it "
            "is averaged: put it on what parameters() of Zero1, Zero2 or Zero3 gives"
        )


def shards_of(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Unit, Any]]:
    """The shards that it holds, with their units and engines."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        unit, engine = parameter.shard_of() if hasattr(parameter, "shard_of") else (None, None)
        if unit and engine:  # else it is no shard, or of an engine that is gone
            yield parameter, unit, engine
        elif hasattr(parameter, "wrapped_in"):
            *_, stage = parameter.wrapped_in
            raise RuntimeError(
                f"this optimizer holds parameters that are not {stage}'s shards: it was built before the model was "
                "wrapped, or from a module around the wrapped model, such as torch.compile gives: "
                f"build it afterwards, from the parameters() of the {stage} itself"
            )


def check_optimizer(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called before every optimizer step in this process: may it step what it holds? Its closure is watched."""
    held = list(shards_of(optimizer))
    for shard, _, engine in held:
        if type(shard) is Shard:
            watch(shard, watched=False)
        check_place(engine.name, shard)
        check_averaged(engine.name, shard)
    engines = {engine: unit for _, unit, engine in held if not unit.original}
    for engine, unit in [*engines.items()][:1]:  # two may be sharded over other ranks
        check_states(optimizer, engine.name, unit)
    for engine in engines:
        check_elementwise(optimizer, engine.name)
        if engine.passes == {"forward"} and all(shard.grad is None for shard, *_ in held):
            advice = "Had it inputs=? Shards are in no graph, so no gradient comes: leave it out"
            raise RuntimeError(f"{engine.name}: a step without a backward. {advice}")

    def watched(closure: Any) -> Any:
        """The closure is the loop's code, in the middle of the step."""

        def call() -> Any:
            for shard in sharded:
                watch(shard, watched=True)
            try:
                return closure()
            finally:
                for shard in sharded:
                    watch(shard, watched=False)

        return call if callable(closure) else closure

    if sharded := [shard for shard, unit, _ in held if not unit.unsharded]:
        return (optimizer, *map(watched, args[1:])), {name: watched(value) for name, value in kwargs.items()}


def mark_as_old(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called after every optimizer step in this process: the replicas of what it stepped are old from here on."""
    for shard, unit, engine in shards_of(optimizer):
        engine.done["step"] = True
        if not unit.original:
            if not unit.unsharded:
                watch(shard, watched=True)
            torch.autograd.graph.increment_version(shard)  # a fused kernel writes without telling
            unit.empty_parameters()


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


def check_place(stage: str, shard: torch.Tensor) -> None:
    """`RuntimeError` if a shard was given other memory."""
    if torch_private.place(shard) != shard.cut_at:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{stage}: a shard no longer lies in its unit's memory: something gave it other memory through .data, "
            "as vector_to_parameters does, so the model would not see it: copy_() into it under no_grad"
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
register_optimizer_step_post_hook(mark_as_old)
