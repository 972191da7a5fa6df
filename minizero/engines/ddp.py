"""DDP, stage 0: every rank holds everything; gradients are averaged in backward.

    per rank (FP32, Adam)   parameters 4Ψ   gradients 4Ψ   optimizer 8Ψ   = 16Ψ bytes, for Ψ parameters
    sent per step           8Ψ (N-1)/N bytes: all-reduce of the gradients

Each rank computes on its own part of the batch, and since all start from the same parameters
and apply the same averaged gradient, they stay the same without ever being sent.
A bucket, the gradients of several units in one message, is a second copy of them, of BUCKET_BYTES
and a unit at most. PyTorch's `gradient_as_bucket_view` saves that copy. Here a unit's gradient
would be N pieces of the bucket, as `reduce` shows, and no view.
Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

import torch

from minizero.engines.core import Engine, Unit
from minizero.memory import tag
from minizero.ranks.collectives import all_reduce

# A message costs its latency however short it is, so the gradients of several units travel together.
BUCKET_BYTES = 25 * 2**20  # PyTorch's choice too


class CoreDDP(Engine):
    """Replicated data parallelism; the public `DDP` adds what core.py does not serve."""

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        unit.point_parameters_at(unit.replica)
        unit.master = full  # in FP32 the replica itself; else any_model/stages.py has a `gather`
        unit.cut_shards()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        buckets = self.backward.buckets  # by dtype: in any_model some units may have 16 bits
        buckets.setdefault(unit.dtype, []).append((unit, gradient))
        for dtype, bucket in list(buckets.items()):
            if sum(g.nbytes for _, g in bucket) < BUCKET_BYTES and unit is not self.in_order[-1]:
                continue  # it waits for the next unit
            del buckets[dtype]
            # A ring adds up chunk r from rank r+1 on, to rank r. If 3 ranks have the gradients x, y, z, chunk 0 becomes
            # (y + z) + x, and chunk 1 (z + x) + y, which rounds otherwise. All stages give the same bits if each number
            # stays in its chunk. A gradient is N rows here, its chunks; those of units B and A are joined:
            #     row 0    chunk 0 of B | chunk 0 of A    this is chunk 0 of the message
            #     row 1    chunk 1 of B | chunk 1 of A    this is chunk 1
            #     row 2    chunk 2 of B | chunk 2 of A    (end to end, chunk 1 would be the end of B and the start of A)
            by_rank = [g.view(self.comm.size, -1) for _, g in bucket]
            rows = torch.cat(by_rank, dim=1)
            tag(rows, "gradients")
            all_reduce(rows, self.comm, "mean", out=rows, label=unit.name)
            for view, columns in zip(by_rank, rows.split([view.shape[1] for view in by_rank], dim=1)):
                view.copy_(columns)
            for each, averaged in bucket:
                each.set_gradient(averaged, full=averaged)
