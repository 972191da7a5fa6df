"""A step of training with a sharding factor, on flat numbers.

Zhao et al., 2023, "PyTorch FSDP", section 3.2.2.
"""

from collections.abc import Callable

import torch

from minizero.ranks.collectives import all_gather, all_reduce, reduce_scatter
from minizero.ranks.comm import Comm


def hybrid_step(
    shard: torch.Tensor, gradient_of: Callable[[torch.Tensor], torch.Tensor], comm: Comm, factor: int, rate: float
) -> torch.Tensor:
    """One step of gradient descent with this learning rate; returns this rank's shard of the new parameters.

    shard: of all parameters, 1/factor; this rank's place in its machine says which chunk. gradient_of: takes all
    parameters, and returns this rank's own gradient, as long. comm: all ranks, of which each `factor` make a machine:
    ranks 0 … factor - 1 the first, and so on.
    """
    inside, across = comm.split(comm.rank // factor), comm.split(comm.rank % factor)
    gradient = gradient_of(all_gather(shard, inside))
    mine = reduce_scatter(gradient, inside, "mean")
    return shard - rate * all_reduce(mine, across, "mean")
