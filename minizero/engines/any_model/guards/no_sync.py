"""Against using a gradient that no_sync() holds back: it is this rank's sum, and not the average.

FunASR#3472: an optimizer steps before the last backward.
"""

import warnings
from collections.abc import Iterable, Sequence

import torch

from minizero.engines.any_model.unit import Unit


def check_averaged(stage: str, unit: Unit, shards: Iterable[torch.Tensor]) -> None:
    """`RuntimeError` if the .grad of one of `shards` is what the unit shows under no_sync: this rank's sum."""
    shown = {id(view) for view, *_ in unit.gradient.shown}
    if shown and any(id(shard.grad) in shown for shard in shards):
        raise RuntimeError(
            f"{stage}: no_sync() holds the gradients back, each rank has its own: run the last backward outside "
            "no_sync() before you step or clip, or drop them by zero_grad()"
        )


def check_untouched(unit: Unit) -> None:
    """`RuntimeError` if a shard's .grad shows a chunk of the sum, and was written to: the other chunks miss the write.

    Called before the next backward goes on with the sum. If every .grad is None, that backward drops it.
    """
    shown = [] if unit.unsharded else unit.gradient.shown
    now = [(shard.grad, count) for shard, (_, count, _) in zip(unit.shards, shown)]
    dropped = all(grad is None for grad, _ in now)
    if not dropped and any(grad is None or grad._version != count for grad, count in now):
        raise RuntimeError(
            f"{unit.name}: .grad was written to between backwards under no_sync, and shows this rank's chunk "
            "only: use zero_grad(set_to_none=True), and clip or scale after the last of them"
        )


def say_what_is_dropped(stage: str, units: Sequence[Unit]) -> None:
    """Warn if a backward has raised that went on with the sum of backwards before."""
    if any(unit.gradient.goes_on for unit in units):
        warnings.warn(
            f"{stage}: a backward has raised, and the sum that no_sync() held is dropped with it: begin again with the "
            "first micro-batch, on all ranks",
            stacklevel=2,
        )
