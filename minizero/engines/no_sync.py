"""Under no_sync a unit's gradient adds up over several backwards, and nothing is sent.

    Unit.begin_gradient ──► put, put, … ──► show ──► Unit.begin_gradient ──► put, put, … ──► take
    under no_sync                                    the first backward outside

Between two backwards the shards' .grad are views of this rank's sum so far, with offload on a GPU copies of it. So
zero_grad() can drop the sum.
`unit: Any` is a `Unit`, whose file imports this one.
"""

from typing import Any

from minizero.engines.gradient import pieces


def show(unit: Any) -> None:
    """A backward under no_sync is over: let the shards' .grad be views of the sum so far."""
    gradient = unit.gradient
    if gradient.full is None:  # unused on this rank
        unit.gradient = None
        return
    gradient.zero_unwritten()
    mine = gradient.full if unit.whole else unit.chunk(gradient.full)
    gradient.before = [shard.grad for shard in unit.shards]
    for shard, piece in zip(unit.shards, pieces(mine, unit.shards), strict=True):
        shard.grad = piece.to(shard.device)
        shard.grad.held_back = True  # check_optimizer looks (refused.py)
    gradient.shown = [shard.grad._version for shard in unit.shards]  # PyTorch's count of in-place writes


def check_untouched(unit: Any) -> None:
    """`RuntimeError` if a sharded unit's .grad has been written to since `show`: the other chunks were not."""
    versions = [shard.grad._version if shard.grad is not None else None for shard in unit.shards]
    if versions != unit.gradient.shown and not unit.whole:
        raise RuntimeError(
            f"{unit.name}: .grad was written to between backwards under no_sync, and shows this rank's chunk "
            "only: use zero_grad(set_to_none=True), and clip or scale after the last of them"
        )
