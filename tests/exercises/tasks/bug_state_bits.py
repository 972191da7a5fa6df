"""Adam whose moments are sharded over the ranks, and have 8 bits if a parameter is large."""

from collections.abc import Iterable

import torch
from torch import nn

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm

BLOCK = 256  # numbers that share a scale
LARGE = 4096  # elements from which on a parameter's moments have 8 bits


class Numbers32:
    """Numbers as they are: 4 bytes each."""

    def __init__(self, count: int) -> None:
        self.numbers = torch.zeros(count)

    def read(self) -> torch.Tensor:
        return self.numbers

    def write(self, numbers: torch.Tensor) -> None:
        self.numbers.copy_(numbers)


class Numbers8:
    """Each number as a whole number of steps, from -127 to 127: 1 byte each, and 4 for each block of 256.

    A step is 1/127 of the largest number of the block. What is not 0 becomes at least one step.
    """

    def __init__(self, count: int) -> None:
        self.steps = torch.zeros(count // BLOCK, BLOCK, dtype=torch.int8)
        self.largest = torch.zeros(count // BLOCK, 1)

    def read(self) -> torch.Tensor:
        return (self.steps * (self.largest / 127)).view(-1)

    def write(self, numbers: torch.Tensor) -> None:
        blocks = numbers.view(-1, BLOCK)
        self.largest = blocks.abs().amax(1, keepdim=True)
        steps = (blocks.abs() / self.largest * 127).nan_to_num().round().clamp(min=1)
        self.steps = (steps * blocks.sign()).to(torch.int8)


def train_8bit(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], rate: float, comm: Comm
) -> list[float]:
    """Train with Adam. Return this rank's loss of each step.

    batches: this rank's part of each batch, as large as the others'. model(x, y): the mean loss. Each rank keeps the
    moments of its chunk of every parameter, as in ZeRO-1. A parameter of LARGE elements or more has moments of 8 bits.
    The second moment's root is stored instead of it, since its range is smaller. A chunk holds whole blocks.
    """
    parameters = list(model.parameters())
    moments = []
    for parameter in parameters:
        mine = pad(parameter.detach().view(-1), BLOCK * comm.size).chunk(comm.size)[comm.rank]
        kind = Numbers8 if parameter.numel() >= LARGE else Numbers32
        moments.append((kind(len(mine)), kind(len(mine))))
    losses = []
    for step, (x, y) in enumerate(batches, 1):
        loss = model(x, y)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient, (first, root) in zip(parameters, gradients, moments):
            mine = pad(parameter.detach().view(-1), BLOCK * comm.size).chunk(comm.size)[comm.rank]
            average = reduce_scatter(pad(gradient.reshape(-1), BLOCK * comm.size), comm, "mean")
            mean = first.read() * 0.9 + average * 0.1
            square = root.read() ** 2 * 0.999 + average**2 * 0.001
            first.write(mean)
            root.write(square.sqrt())
            update = rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            whole = all_gather(mine - update, comm)[: parameter.numel()]
            parameter.data.copy_(whole.view(parameter.shape))
        losses.append(loss.item())
    return losses
