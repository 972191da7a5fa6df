"""Against using a gradient that no_sync() holds back: it is this rank's sum, and not the average.

FunASR#3472: an optimizer steps before the last backward.
"""

import torch

from minizero.engines.any_model.unit import Unit


def check_averaged(stage: str, unit: Unit, shard: torch.Tensor) -> None:
    """`RuntimeError` if the .grad of the unit's shard is this rank's sum under no_sync."""
    if unit.gradient is not None and any(shard.grad is view for view, *_ in unit.gradient.shown):
        raise RuntimeError(
            f"{stage}: no_sync() holds the gradients back, each rank has its own: run the last backward outside "
            "no_sync() before you step or clip, or drop them by zero_grad()"
        )


def check_untouched(unit: Unit) -> None:
    """`RuntimeError` if a shard's .grad shows a chunk of the sum, and was written to: the other chunks miss the write.

    Called before the next backward goes on with the sum. If every .grad is None, that backward drops it.
    """
    sum_so_far = unit.gradient
    if sum_so_far is None or not sum_so_far.shown or not sum_so_far.chunk:
        return
    counts = [shard.grad._version if shard.grad is not None else None for shard in unit.shards]
    if counts != [count for _, count, _ in sum_so_far.shown] and any(count is not None for count in counts):
        raise RuntimeError(
            f"{unit.name}: .grad was written to between backwards under no_sync, and shows this rank's chunk "
            "only: use zero_grad(set_to_none=True), and clip or scale after the last of them"
        )
