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

from minizero.engines.mixing import Mixed
from minizero.engines.partition import Unit
from minizero.memory import tag
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm
from precision.master import master_to_weight


class Zero3(Mixed):
    """Sharded optimizer states, gradients and parameters. More arguments, and the training loop: see `Engine`.

    reshard_after_forward: False keeps what forward gathered until backward: a third less is sent, for 4Ψ bytes more
    at the peak. Each of the others is a file of its own (mixing.py):
    sharding_factor=None: shard over groups of so many ranks, by default over all (hybrid.py);
    prefetch=1: how many units to gather ahead, beside the computation; 0 does one thing at a time (prefetch.py);
    offload=False: keep shards, gradients and optimizer states in the CPU's memory (offload.py).
    `torch.compile` of each block, before wrapping, works; around the engine it changes nothing; others are refused.
    """

    def __init__(self, module: nn.Module, comm: Comm, *, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(module, comm, **options)
        self.reshard_after_forward = reshard_after_forward
        self.check_compiled(module.modules())

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.master = self.own(unit.chunk(full))
        unit.cut_shards()
        unit.flat = full.to(unit.dtype)
        tag(unit.flat, "parameters")
        self.release(unit)

    def own(self, chunk: torch.Tensor) -> torch.Tensor:
        """This rank's chunk, where its shards are to live."""
        return chunk.clone()

    def gather(self, unit: Unit) -> None:
        if not self.has_replica(unit):
            self.make_room(unit)
            self.fill(unit)
        unit.point_parameters_at(unit.flat)

    def has_replica(self, unit: Unit) -> bool:
        """Is it whole, and not left over from a forward without backward, before the last optimizer step?"""
        return bool(unit.flat.untyped_storage().nbytes()) and not unit.replica_is_stale()

    def make_room(self, unit: Unit) -> None:
        """Give the replica its memory back."""
        unit.flat.untyped_storage().resize_(unit.size * unit.dtype.itemsize)
        unit.replica_is_fresh_now()

    def fill(self, unit: Unit) -> None:
        """The collective: every rank's chunk, in the computing dtype, into every rank's replica."""
        mine = unit.chunk(unit.flat)
        master_to_weight(unit.master, mine)
        all_gather(mine, unit.comm, out=unit.flat, label=unit.name)

    def release(self, unit: Unit) -> None:
        # The storage is emptied, not only the parameter: autograd still holds views of it for backward.
        unit.flat.untyped_storage().resize_(0)
        unit.point_parameters_at(None)

    def forward_is_over(self, unit: Unit) -> None:
        if self.reshard_after_forward or not torch.is_grad_enabled():
            self.release(unit)

    def deposit(self, unit: Unit, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if self.reshard_after_forward and unit.module is not None and not unit.users:
            raise RuntimeError(
                f"{type(self).__name__}: backward reached {unit.name} while it was not gathered: a tensor that it made "
                "was used, but was neither in its output nor an attribute: return it from the unit's forward"
            )
        super().deposit(unit, parameter, gradient)

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        # Nothing refers to the full gradient after this: its memory is free for the next unit's.
        unit.set_gradient(self.average(unit, gradient, unit.comm))

    def average(self, unit: Unit, gradient: torch.Tensor, comm: Comm) -> torch.Tensor:
        """The collective: this rank's chunk of the mean gradient."""
        return reduce_scatter(gradient, comm, "mean", label=unit.name)
