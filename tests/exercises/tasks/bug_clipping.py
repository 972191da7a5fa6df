"""Training on shards, and clipping the gradient's norm, without an engine."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, all_reduce, reduce_scatter
from minizero.ranks.comm import Comm


def train_on_shards(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    max_norm: float,
    learning_rate: float,
    comm: Comm,
) -> list[float]:
    """Train with the gradient clipped to a norm of `max_norm`. Return its norm before clipping, for each step.

    batches: this rank's part of each batch, as large as the others'. model(x, y): the mean loss. Each rank keeps the
    parameters, gradients and momentum of its chunk, as in ZeRO-2.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    flat = pad(parameters_to_vector(model.parameters()).detach(), comm.size)
    mine = nn.Parameter(flat.chunk(comm.size)[comm.rank].clone())
    optimizer = torch.optim.SGD([mine], lr=learning_rate, momentum=0.9)
    norms = []
    for x, y in batches:
        gradients = torch.autograd.grad(model(x, y), list(model.parameters()))
        mine.grad = reduce_scatter(pad(parameters_to_vector(gradients), comm.size), comm, "mean")
        squares = mine.grad.square().sum()
        norm = all_reduce(squares, comm, "sum").sqrt()
        mine.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        vector_to_parameters(all_gather(mine.detach(), comm)[:count], model.parameters())
        norms.append(norm.item())
    return norms
