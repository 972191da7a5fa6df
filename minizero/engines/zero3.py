"""ZeRO stage 3 (fully sharded, FSDP): each rank also keeps the parameters of its own chunk only.

    per rank (FP32, Adam)   parameters 4Ψ/N   gradients 4Ψ/N   optimizer 8Ψ/N   = 16Ψ/N bytes, for Ψ parameters
    sent per step           3Ψ (N-1)/N elements: reduce-scatter of gradients, two all-gathers of parameters
                            (the root unit's: one)

A unit's replica exists only while it is used, in forward and in backward: `gather` fills and `release` empties it.
The lane says when: `Now` (lane.py), or by default `Ahead` (prefetch.py), which begins each gather a unit earlier.
Rajbhandari et al., 2019, "ZeRO", section 5.3 (P_os+g+p); Zhao et al., 2023, "PyTorch FSDP".
"""

from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.engine import Engine
from minizero.engines.hybrid import average_in_two_steps, inside_and_across
from minizero.engines.offload import to_host
from minizero.engines.prefetch import Ahead, check_prefetch
from minizero.engines.unit import Unit
from minizero.memory import tag
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm


class Zero3(Engine):
    """Sharded optimizer states, gradients and parameters. More arguments, and the training loop: see `Engine`.

    sharding_factor: shard over groups of so many ranks, by default over all (hybrid.py). prefetch: how many units other
    threads gather ahead (when: prefetch.py); 0 does one thing at a time. offload: keep shards, gradients and optimizer
    states in the CPU's memory (offload.py). reshard_after_forward: False keeps what forward gathered until backward; a
    third less is sent, for 4Ψ bytes more at the peak (2Ψ in 16 bits). To compile, `torch.compile` each block before
    wrapping.
    """

    frees_replicas = True
    forward = torch_private.not_compiled(Engine.forward)  # torch.compile would trace memory that comes and goes

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        sharding_factor: int | None = None,
        prefetch: int = 1,
        offload: bool = False,
        reshard_after_forward: bool = True,
        **options: Any,
    ) -> None:
        check_prefetch(prefetch)
        self.inside, self.across = inside_and_across(comm, sharding_factor)  # across: same chunk, other groups, or None
        self.offload, self.reshard_after_forward = offload, reshard_after_forward
        super().__init__(module, comm, **options)
        if prefetch:
            self.lane = Ahead(self, prefetch)

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        tag(unit.replica, "parameters")
        unit.master = to_host(unit.chunk(full), full.dtype) if self.offload else unit.chunk(full).clone()
        unit.cut_shards()
        self.release(unit)

    def gather(self, unit: Unit) -> None:
        self.lane.gather(unit)
        unit.point_parameters_at(unit.replica)

    def make_room(self, unit: Unit) -> None:
        """Allocate the replica's memory. From here on `replica_is_stale` says no, so no second gather begins."""
        unit.replica.untyped_storage().resize_(unit.size * unit.dtype.itemsize)
        unit.replica_is_fresh_now()

    def fill(self, unit: Unit) -> None:
        """The collective: every rank's chunk, in the computing dtype, into every rank's replica."""
        mine = unit.chunk(unit.replica)
        mine.copy_(unit.master)  # rounded to the computing dtype
        all_gather(mine, unit.comm, out=unit.replica, label=unit.name)

    def release(self, unit: Unit) -> None:
        self.lane.wait_for(unit)  # a gather ahead writes to the memory that is given back here
        # The storage is emptied, and not thrown away: autograd saved views of it, and `fill` writes there again. That
        # is no error for autograd: parameters set by `.data =` do not share the storage's count of writes.
        unit.replica.untyped_storage().resize_(0)
        unit.point_parameters_at(None)

    def keep_writes(self, unit: Unit) -> None:
        super().keep_writes(unit)
        if unit.dtype == unit.master.dtype:  # `.data` is not counted: a counted write makes replicas stale
            unit.master.data.copy_(unit.chunk(unit.replica))

    def forward_is_over(self, unit: Unit) -> None:
        self.keep_writes(unit)
        if self.reshard_after_forward or not torch.is_grad_enabled():
            self.release(unit)

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        # Nothing refers to the full gradient after the reduction: its memory is free for the next unit's.
        self.lane.reduce(unit, gradient)

    def average(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor:
        """The collective: this rank's chunk of the mean gradient."""
        if self.across is None:
            mine = reduce_scatter(gradient, unit.reduce_comm, "mean", label=unit.name)
        else:
            mine = average_in_two_steps(gradient, unit.reduce_comm, self.across, unit.name)
        return to_host(mine) if self.offload else mine
