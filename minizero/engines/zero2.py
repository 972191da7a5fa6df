"""ZeRO stage 2: each rank also keeps the gradient of its own chunk only.

    per rank (FP32, Adam)   parameters 4Ψ   gradients 4Ψ/N   optimizer 8Ψ/N   = 4Ψ + 12Ψ/N bytes, for Ψ parameters
    sent per step           8Ψ (N-1)/N bytes: reduce-scatter of gradients, all-gather of parameters

The difference from stage 1 is what is not kept. A unit's full gradient is dropped as soon as it is reduced. That is
before backward goes on, if it need not wait for its turn. (The root is reduced last. Its full gradient lives from its
first part to the end of backward.) What is kept and gathered is as in zero1.py.
Rajbhandari et al., 2019, "ZeRO", section 5.2 (P_os+g).
"""

import torch

from minizero.engines.core import Engine, Unit
from minizero.ranks.collectives import all_gather, reduce_scatter


class CoreZero2(Engine):
    """Sharded optimizer states and gradients; the public `Zero2` adds what core.py does not serve."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        unit.point_parameters_at(unit.replica)
        # The master is a view of the replica, by `.data` (why: zero1.py). In 16 bits it is an FP32 copy.
        unit.master = unit.chunk(full.data) if unit.replica is full else unit.chunk(full).clone()
        unit.cut_shards()

    def gather(self, unit: Unit) -> None:
        if unit.replica_is_stale():
            mine = unit.chunk(unit.replica)
            mine.copy_(unit.master)  # in 16 bits rounded; in FP32 they are one memory
            all_gather(mine, self.comm, out=unit.replica, label=unit.name)
            unit.replica_is_fresh_now()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        # Nothing refers to the full gradient after the reduction: its memory is free for the next unit's.
        unit.set_gradient(reduce_scatter(gradient, self.comm, "mean", label=unit.name))
