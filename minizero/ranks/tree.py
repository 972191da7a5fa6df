"""Broadcast, by a tree. (The other collectives go round a ring: collectives.py.)"""

import torch
from torch import Tensor

from minizero.ranks.agreement import agreement
from minizero.ranks.comm import Comm


@torch.no_grad()
def broadcast(tensor: Tensor, comm: Comm, root: int = 0, *, label: str = "") -> Tensor:
    """Rank `root`'s tensor, on every rank. The other ranks' tensors give shape and dtype.

    A binomial tree: in step k each of the 2^k ranks that have the tensor sends it to one more: log2 N steps suffice.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"broadcast: root {root} does not exist: ranks are 0 to {comm.size - 1}")
    with agreement(comm, "broadcast", tensor, root=root, label=label):
        result = tensor.contiguous().clone()
        position = (comm.rank - root) % comm.size  # the root stands at 0
        reach = 1
        while reach < comm.size and tensor.numel():
            if position < reach and position + reach < comm.size:
                comm.send(result, (comm.rank + reach) % comm.size)
            elif reach <= position < 2 * reach:
                comm.recv(result, (comm.rank - reach) % comm.size)
            reach *= 2
    return result
