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
from minizero.memory import tag
from minizero.partition import Unit
from precision.master import master_to_weight

# A message costs its latency however short it is, so the gradients of several units travel together.
BUCKET_BYTES = 25 * 2**20  # PyTorch's choice too


class DDP(Engine):
    """Replicated data parallelism. Arguments, and the training loop: see `Engine`."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.flat = full.to(unit.dtype)
        unit.point_parameters_at(unit.flat)
        unit.master = full  # in FP32 the replica itself
        if unit.flat is full:
            unit.shards, unit.groups = unit.parameters, unit.group_of  # the optimizer sees the original parameters
        else:
            unit.cut_shards()

    def before_forward(self) -> None:
        for unit in self.units:
            if unit.replica_is_stale():
                master_to_weight(unit.master, unit.flat)
                unit.replica_is_fresh_now()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        if unit is self.in_order[0]:  # the first of a backward
            self.buckets: dict[torch.dtype, list[tuple[Unit, torch.Tensor]]] = {}
        bucket = self.buckets.setdefault(unit.dtype, [])
        bucket.append((unit, gradient))
        if sum(g.nbytes for _, g in bucket) < BUCKET_BYTES and unit is not self.in_order[-1]:
            return
        for dtype in list(self.buckets) if unit is self.in_order[-1] else [unit.dtype]:
            bucket = self.buckets.pop(dtype)
            # Row r is chunk r of every unit, so each number is summed in the same order as in the other stages.
            by_rank = [g.view(self.comm.size, -1) for _, g in bucket]
            rows = torch.cat(by_rank, dim=1)
            tag(rows, "gradients")
            all_reduce(rows, self.comm, out=rows, label=unit.name)
            for view, columns in zip(by_rank, rows.split([view.shape[1] for view in by_rank], dim=1)):
                torch.div(columns, self.comm.size, out=view)
            for each, averaged in bucket:
                each.set_gradient(averaged, full=averaged)
