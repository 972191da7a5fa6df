"""Gradient accumulation on ranks that send once in a window, without an engine."""

from collections.abc import Iterable

import torch
from torch import nn

from minizero.ranks.collectives import all_reduce
from minizero.ranks.comm import Comm


def train_held_back(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    window: int,
    comm: Comm,
) -> list[float]:
    """Take a step for each `window` micro-batches. Return the loss of each step: the mean over its micro-batches.

    model(x, y): the mean loss. micro_batches: this rank's, all of one size, and as many as the other ranks have. A rest
    that fills no window makes no step. A gradient that is there before the call counts for nothing.
    """
    losses = []
    total = torch.zeros(())
    optimizer.zero_grad()
    for number, (x, y) in enumerate(micro_batches):
        loss = model(x, y) / window
        loss.backward()
        total += loss.detach()
        # A message costs time: the gradients of a window are sent once. In between each rank adds up its own.
        if (number + 1) % window == 0:
            for parameter in model.parameters():
                assert parameter.grad is not None, "no gradient: was it stepped and cleared already?"
                parameter.grad = all_reduce(parameter.grad, comm, "mean")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(all_reduce(total, comm, "mean").item())
            total.zero_()
    return losses
