"""ZeRO stage 1: each rank keeps the optimizer states of its own chunk only.

    per rank (FP32, Adam)   parameters 4Ψ   gradients 4Ψ   optimizer 8Ψ/N   = 8Ψ + 8Ψ/N bytes, for Ψ parameters
    sent per step           8Ψ (N-1)/N bytes: reduce-scatter of gradients, all-gather of parameters

DDP's all-reduce is a reduce-scatter and an all-gather. Put the optimizer between the two: after the
reduce-scatter a rank has the averaged gradient of its chunk, which is all it needs to update that
chunk. The unit's next forward begins with the all-gather, of parameters instead of gradients: the same
traffic, 1/N of the states. (zero2.py repeats these lines on purpose: what differs there is the lesson.)
Rajbhandari et al., 2019, "ZeRO", section 5.1 (P_os).
"""

import torch

from minizero.engines.core import Engine, Unit
from minizero.ranks.collectives import all_gather, reduce_scatter


class CoreZero1(Engine):
    """Sharded optimizer states; the public `Zero1` adds what core.py does not serve."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        unit.point_parameters_at(unit.replica)
        # The master is a view of the replica. (In 16 bits it is an FP32 copy.) `.data` has the same memory, and a count
        # of writes of its own. Else a gather, which writes to the replica, would count for the shard, too. A loss with
        # `(shard ** 2).sum()`, and then a forward, would fail: autograd would say that the shard has changed.
        unit.master = unit.chunk(full.data) if unit.replica is full else unit.chunk(full).clone()
        unit.cut_shards()

    def gather(self, unit: Unit) -> None:
        if unit.replica_is_stale():
            mine = unit.chunk(unit.replica)
            mine.copy_(unit.master)  # in 16 bits rounded; in FP32 they are one memory
            all_gather(mine, self.comm, out=unit.replica, label=unit.name)
            unit.replica_is_fresh_now()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        mine = unit.chunk(gradient)
        reduce_scatter(gradient, self.comm, "mean", out=mine, label=unit.name)
        # `mine` is a view, so the whole buffer stays until zero_grad(), as in DDP. The rest of it is of no use here.
        unit.set_gradient(mine, full=gradient)
