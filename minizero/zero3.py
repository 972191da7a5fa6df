"""ZeRO stage 3 (fully sharded, FSDP): each rank also keeps the parameters of its own chunk only.

    per rank (FP32, Adam)   parameters 4Ψ/N   gradients 4Ψ/N   optimizer 8Ψ/N   = 16Ψ/N bytes
    sent per step           3Ψ (N-1)/N elements: parameters gathered in forward and again in backward,
                            gradients reduce-scattered; the root unit is gathered once

The replica of a unit exists only while the unit computes. `gather` fills its buffer from all ranks'
chunks, `release` empties it. Rajbhandari et al., 2019, "ZeRO", section 5.3 (P_os+g+p);
Zhao et al., 2023, "PyTorch FSDP".
"""

from typing import Any

import torch
from torch import nn

from minizero.collectives import all_gather, reduce_scatter
from minizero.comm import Comm
from minizero.engine import Engine
from minizero.memory import tag
from minizero.partition import Unit
from precision.master import master_to_weight


class Zero3(Engine):
    """Sharded optimizer states, gradients and parameters. More arguments, and the training loop: see `Engine`.

    sharding_factor: shard over groups of so many ranks, by default over all; see hybrid.py. reshard_after_forward:
    False keeps what forward gathered until backward: a third less is sent, for 4Ψ bytes more at the peak.
    """

    def __new__(cls, module: nn.Module, comm: Comm, *, sharding_factor: int | None = None, **_: Any) -> "Zero3":
        from minizero.hybrid import Hybrid  # which builds on this class

        return super().__new__(cls if sharding_factor in (None, comm.size) else Hybrid)

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        sharding_factor: int | None = None,
        reshard_after_forward: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(module, comm, **options)
        self.reshard_after_forward = reshard_after_forward

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.master = unit.chunk(full).clone()
        unit.cut_shards()
        unit.flat = full.to(unit.dtype)
        tag(unit.flat, "parameters")
        self.release(unit)

    def gather(self, unit: Unit) -> None:
        storage = unit.flat.untyped_storage()
        if storage.nbytes() and not unit.replica_is_stale():  # stale: left over from a forward without backward
            return
        storage.resize_(unit.size * unit.dtype.itemsize)
        mine = unit.chunk(unit.flat)
        master_to_weight(unit.master, mine)
        all_gather(mine, unit.comm, out=unit.flat, label=unit.name)
        unit.point_parameters_at(unit.flat)
        unit.replica_is_fresh_now()

    def release(self, unit: Unit) -> None:
        # The storage is emptied, not only the parameter: autograd still holds views of it for backward.
        unit.flat.untyped_storage().resize_(0)
        unit.point_parameters_at(None)

    def forward_is_over(self, unit: Unit) -> None:
        if self.reshard_after_forward or not torch.is_grad_enabled():
            self.release(unit)

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        # Nothing refers to the full gradient after this: its memory is free for the next unit's.
        unit.set_gradient(reduce_scatter(gradient, self.comm, "mean", label=unit.name))
