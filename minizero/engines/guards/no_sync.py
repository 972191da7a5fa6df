"""Against using a gradient that no_sync() holds back: it is this rank's sum, and not the average.

FunASR#3472: an optimizer steps before the last backward.
"""

from collections.abc import Sequence

import torch
from torch import nn


def check_averaged(stage: str, shard: torch.Tensor) -> None:
    """`RuntimeError` if the shard's .grad is this rank's sum under no_sync."""
    if hasattr(shard.grad, "held_back"):
        raise RuntimeError(
            f"{stage}: no_sync() holds the gradients back, each rank has its own: run the last backward outside "
            "no_sync() before you step or clip, or drop them by zero_grad()"
        )


def check_untouched(name: str, shards: Sequence[nn.Parameter], shown: list[int]) -> None:
    """`RuntimeError` if the .grad of a unit's shards was written to under no_sync. shown: their counts of writes."""
    if [shard.grad._version if shard.grad is not None else None for shard in shards] != shown:
        raise RuntimeError(
            f"{name}: .grad was written to between backwards under no_sync, and shows this rank's chunk "
            "only: use zero_grad(set_to_none=True), and clip or scale after the last of them"
        )
