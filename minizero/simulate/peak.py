"""The most bytes that a GPU holds in a step: model states, and what comes and goes from use to use.

    between steps     `predict` of minizero.memory
    forward           + each unit's activations
                      + in stage 3 the units that are gathered
    backward          + the whole tape of the unit that runs again
                      + full gradients of this unit, and of the unit whose reduction is still running

The moments follow the order of the program, not the clock, so the peak is the same whatever runs late. It is an
estimate: this code's own engines hold 0.8 to 1.1 of it by the ledger. Workspaces, fragmentation and the CUDA context
are not counted: plan 23 % more (Rajbhandari et al., 2019, table 2).
"""

from minizero.cli import DTYPES
from minizero.engines.ddp import BUCKET_BYTES
from minizero.memory import predict
from minizero.simulate.shapes import Layer, Model
from minizero.simulate.strategy import Strategy


def states(model: Model, plan: Strategy) -> dict[str, float]:
    """Bytes between steps, by category. Under offload all of them are `host`."""
    factor = plan.sharding_factor if plan.stage == 3 else None
    held = predict(model.parameters, plan.ranks, plan.stage, dtype=DTYPES[plan.dtype], sharding_factor=factor)
    return {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "host": held["total"]} if plan.offload else held


def peak_memory(model: Model, plan: Strategy) -> dict[str, float]:
    """Bytes by category at the moment when they are most in all, and `total` (without `host`)."""
    units, root, each = model.units, model.root, plan.itemsize
    # What is held at every moment.
    fixed = {name: held for name, held in states(model, plan).items() if name != "total"}
    if plan.micro_batches > 1 and plan.stage > 0:  # the local sum, in FP32, until it is reduced
        fixed["gradients"] += 4 * model.parameters
    if plan.stage == 0 and plan.ranks > 1:
        bucket = BUCKET_BYTES + each * max(unit.parameters for unit in units)
        fixed["communication"] = min(bucket, each * model.parameters)

    def tape(unit: Layer, recompute: str) -> float:
        return plan.batch_size * unit.activations(each, recompute, plan.flash)

    def held(activations: float, gathered: tuple[Layer, ...], reduced: tuple[Layer, ...]) -> dict[str, float]:
        one = fixed | {"activations": activations}
        if plan.stage == 3:
            one["parameters"] += each * sum(unit.parameters for unit in (root, *gathered))
        if plan.stage > 1 and plan.micro_batches == 1:
            one["gradients"] += each * sum(unit.parameters for unit in reduced)
        return one | {"total": sum(size for name, size in one.items() if name != "host")}

    # Units `first` and on are gathered, in stage 3: the unit at work, and `prefetch` ahead of it.
    kept = 0.0  # activations
    moments = []
    for i, unit in enumerate(units):  # forward
        first = i if plan.reshard_after_forward else 0
        kept += tape(unit, plan.recompute)
        moments.append(held(kept, units[first : i + 1 + plan.prefetch], ()))
    # The head, forward and backward at once.
    first = max(0, len(units) - plan.prefetch) if plan.reshard_after_forward else 0
    moments.append(held(kept + tape(root, "none"), units[first:], (root,)))
    for i, unit in reversed(list(enumerate(units))):  # backward
        first = max(0, i - plan.prefetch) if plan.reshard_after_forward else 0
        whole = kept + tape(unit, "none") - tape(unit, plan.recompute)
        # The root's gradient is complete last: the embedding is used first.
        moments.append(held(whole, units[first : i + 1], (root, *units[i : i + (2 if plan.overlap else 1)])))
        kept -= tape(unit, plan.recompute)
    return max(moments, key=lambda one: one["total"])
