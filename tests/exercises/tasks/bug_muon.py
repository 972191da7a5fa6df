"""Muon on shards: a step that needs whole matrices, on parameters that are cut anywhere."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, all_reduce, reduce_scatter
from minizero.ranks.comm import Comm


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values brought to about 1, and their directions kept. Of the same shape.

    Five steps of Newton and Schulz. Jordan et al., 2024, "Muon", https://kellerjordan.github.io/posts/muon/
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def train_with_muon(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], learning_rate: float, comm: Comm
) -> list[float]:
    """Train with Muon, which moves each matrix by the orthogonal form of its momentum. Return the loss of each step.

    model: all its parameters are matrices. model(x, y): the mean loss. batches: this rank's part of each batch, as
    large as the others'. The matrices lie end to end, and each rank updates one chunk of this flat buffer.
    """
    matrices = list(model.parameters())
    sizes = [matrix.numel() for matrix in matrices]
    mine = pad(parameters_to_vector(matrices).detach(), comm.size).chunk(comm.size)[comm.rank].clone()
    momentum = torch.zeros(sum(sizes), dtype=mine.dtype)
    losses = []
    for x, y in batches:
        loss = model(x, y)
        gradient = pad(parameters_to_vector(torch.autograd.grad(loss, matrices)), comm.size)
        averaged = reduce_scatter(gradient, comm, "mean")
        gradient = all_gather(averaged, comm)
        momentum = 0.9 * momentum + gradient[: sum(sizes)]
        pairs = zip(momentum.split(sizes), matrices)
        update = torch.cat([orthogonal(piece.view_as(matrix)).flatten() for piece, matrix in pairs])
        mine -= learning_rate * pad(update, comm.size).chunk(comm.size)[comm.rank]
        vector_to_parameters(all_gather(mine, comm)[: sum(sizes)], matrices)
        losses.append(all_reduce(loss.detach(), comm, "mean").item())
    return losses
