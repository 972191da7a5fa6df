"""Data parallelism that leaves out the steps in which a loss is a spike."""

from collections.abc import Iterable
from statistics import median

import torch
from torch import nn

from minizero.ranks.collectives import all_reduce, broadcast
from minizero.ranks.comm import Comm


def train_without_spikes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    factor: float,
    comm: Comm,
) -> list[int]:
    """Train, but leave out every step in which the loss of some rank is a spike. Return the numbers of these steps.

    batches: this rank's part of each batch, as large as the others'. model(x, y): the mean loss. A loss is a spike if
    it is not finite, or if it is more than `factor` times this rank's usual loss. The usual loss is the median of the
    steps that were not left out, as soon as there are 5 (of an even number, the mean of the two in the middle). Step 0
    is the first. All ranks begin with rank 0's parameters.
    """
    for parameter in model.parameters():
        parameter.data = broadcast(parameter.data, comm)
    kept: list[float] = []
    left_out = []
    for step, (x, y) in enumerate(batches):
        loss = model(x, y)
        spike = not loss.isfinite() or len(kept) >= 5 and loss.item() > factor * median(kept)
        if all_reduce(torch.tensor(int(spike)), comm, "max"):
            left_out.append(step)
            continue
        kept.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, comm, "mean")
        optimizer.step()
    return left_out
