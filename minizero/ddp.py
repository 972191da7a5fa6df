"""DDP, stage 0: every rank holds everything; gradients are averaged in backward.

    per rank (FP32, Adam)   parameters 4Ψ   gradients 4Ψ   optimizer 8Ψ   = 16Ψ bytes
    sent per step           2Ψ (N-1)/N elements: all-reduce of the gradients

Each rank computes on its own part of the batch, and since all start from the same parameters
and apply the same averaged gradient, they stay the same without ever being sent.
Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

import torch

from minizero.collectives import all_reduce
from minizero.engine import Engine
from minizero.partition import Unit


class DDP(Engine):
    """Replicated data parallelism. Arguments, and the training loop: see `Engine`."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.flat = full.to(unit.dtype)
        unit.point_parameters_at(unit.flat)
        unit.master = full  # in FP32 the replica itself
        if unit.flat is full:
            unit.shards, unit.groups = (
                unit.parameters,
                unit.group_of,
            )  # the optimizer sees the original parameters
        else:
            unit.cut_shards()

    def before_forward(self) -> None:
        for unit in self.units:
            if unit.replica_is_stale():
                unit.flat.copy_(unit.master)
                unit.replica_is_fresh_now()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        all_reduce(gradient, self.comm, "mean", out=gradient, label=unit.name)
        unit.set_gradient(gradient, full=gradient)
