"""Gradient accumulation on several ranks, without an engine."""

import torch
from torch import nn
from torch.nn import functional as F

from minizero.ranks.collectives import all_reduce
from minizero.ranks.comm import Comm


def train_on_windows(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: list[list[tuple[torch.Tensor, torch.Tensor]]],
    comm: Comm,
) -> list[float]:
    """Take a step for each window. Return the loss of each: the mean over the targets that all ranks have in it.

    windows: this rank's. A window is a list of micro-batches (x, y). A target of -100 is padding, and counts for
    nothing. model(x): scores of the words, of shape (*y.shape, words). All ranks end with the same parameters.
    """
    losses = []
    for window in windows:
        targets = torch.tensor(float(sum((y != -100).sum() for _, y in window)))
        targets = all_reduce(targets, comm)
        optimizer.zero_grad()
        window_loss = torch.zeros(())
        for x, y in window:
            scores = model(x).flatten(0, 1)
            loss = F.cross_entropy(scores, y.flatten(), ignore_index=-100, reduction="sum") / targets
            loss.backward()
            window_loss += loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, comm, "sum")
        optimizer.step()
        losses.append(all_reduce(window_loss, comm, "sum").item())
    return losses
