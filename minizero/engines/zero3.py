"""ZeRO stage 3 (fully sharded, FSDP): each rank also keeps the parameters of its own chunk only.

    per rank (FP32, Adam)   parameters 4Ψ/N   gradients 4Ψ/N   optimizer 8Ψ/N   = 16Ψ/N bytes, for Ψ parameters
    sent per step           12Ψ (N-1)/N bytes: reduce-scatter of gradients, two all-gathers of parameters
                            (the root unit's: one)
    at the peak             besides, parameters and gradients of the root and of one unit, two buffers of the ring

A unit's replica exists only while it is used, in forward and in backward: `gather` fills and `release` empties it.
unit.comm: the ranks that share the unit; here all.
Rajbhandari et al., 2019, "ZeRO", section 5.3 (P_os+g+p); Zhao et al., 2023, "PyTorch FSDP".
"""

import torch

from minizero.engines.core import Engine, Unit
from minizero.memory import tag
from minizero.ranks.collectives import all_gather, reduce_scatter


class CoreZero3(Engine):
    """Sharded optimizer states, gradients and parameters; the public `Zero3` adds what core.py does not serve."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        tag(unit.replica, "parameters")
        unit.point_parameters_at(unit.replica)
        unit.master = unit.chunk(full).clone()
        unit.cut_shards()

    def gather(self, unit: Unit) -> None:
        if unit.replica_is_stale():
            self.make_room(unit)
            self.fill(unit)

    def make_room(self, unit: Unit) -> None:
        """Allocate the replica's memory. (any_model/prefetch.py lets another thread `fill` it.)"""
        unit.replica.untyped_storage().resize_(unit.size * unit.dtype.itemsize)

    def fill(self, unit: Unit) -> None:
        """The collective: every rank's chunk, in the computing dtype, into every rank's replica."""
        mine = unit.chunk(unit.replica)
        mine.copy_(unit.master)  # in 16 bits rounded
        all_gather(mine, unit.comm, out=unit.replica, label=unit.name)
        unit.replica_is_fresh_now()

    def release(self, unit: Unit) -> None:
        # The storage is emptied, and not thrown away: autograd saved views of it, and `fill` writes there again. That
        # is no error for autograd: a parameter set by `.data =` has its own count of writes.
        unit.replica.untyped_storage().resize_(0)
        unit.version = -1

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        # Nothing refers to the full gradient after the reduction: its memory is free for the next unit's.
        unit.set_gradient(self.average(unit, gradient))

    def average(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor:
        """The collective: this rank's chunk of the mean gradient."""
        return reduce_scatter(gradient, unit.comm, "mean", label=unit.name)
