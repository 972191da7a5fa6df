"""CPU offload: shards, gradients and optimizer states live in the CPU's memory, and the step runs there.

    per rank and unit      GPU                          CPU
    forward, backward      the gathered unit   <---     its FP32 shard
    backward               the mean gradient   --->     its shard, which the optimizer reads
    step                                                12 bytes a parameter and more, and the arithmetic

What stays on the GPU is the unit in use and the activations; what the optimizer's step makes and frees is temporary.
Each step copies 4Ψ/N bytes down and 4Ψ/N up, twice as many down where backward gathers again; with `prefetch` they
travel beside the computation. On a machine without a GPU the same code runs, and its copies are counted as `host`,
which no total of the ledger contains.
Ren et al., 2021, "ZeRO-Offload"; Rajbhandari et al., 2021, "ZeRO-Infinity".
"""

import torch

from minizero.engines.partition import Unit
from minizero.engines.zero3 import Zero3
from minizero.memory import tag
from minizero.ranks.comm import Comm


class Offload(Zero3):
    """What `Zero3(module, comm, offload=True)` makes. The optimizer's parameters are on the CPU."""

    def own(self, chunk: torch.Tensor) -> torch.Tensor:
        return to_host(chunk, chunk.dtype)

    def average(self, unit: Unit, gradient: torch.Tensor, comm: Comm) -> torch.Tensor:
        # The copy is waited for, in the lane's thread where there is one: the CPU reads it next.
        return to_host(super().average(unit, gradient, comm))


def to_host(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A copy in the CPU's memory; pinned where it comes from a GPU, which can then copy by itself."""
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    tag(copy, "host")
    return copy.copy_(tensor)
