"""Data parallelism with random numbers: an order of the examples, and noise on them."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from minizero.ranks.collectives import all_reduce
from minizero.ranks.comm import Comm


def train_on_noise(
    model: nn.Module,
    examples: tuple[torch.Tensor, torch.Tensor],
    epochs: Iterable[int],
    batch_size: int,
    seed: int,
    comm: Comm,
) -> list[float]:
    """Train on examples with noise, which makes few examples many. Return the mean loss of each epoch.

    examples: (x, y), all of them on every rank; `comm.size` times batch_size divides their number. epochs: 0, 1, 2, …,
    or 5, 6, … if the run goes on after an interruption. model(x, y): the mean loss. A rank takes batch_size examples.
    """
    inputs, targets = examples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    means = []
    for epoch in epochs:
        order = np.random.default_rng([seed, epoch]).permutation(len(inputs))
        # + 1, since NumPy takes [seed, epoch, 0] for [seed, epoch].
        random = np.random.default_rng([seed, epoch, comm.rank + 1])
        losses = []
        for batch in np.split(order[comm.rank :: comm.size], len(order) // comm.size // batch_size):
            noise = random.normal(0, 0.1, inputs[batch].shape).astype(np.float32)
            optimizer.zero_grad()
            loss = model(inputs[batch] + torch.from_numpy(noise), targets[batch])
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = all_reduce(parameter.grad, comm, "mean")
            optimizer.step()
            losses.append(loss.detach())
        means.append(all_reduce(torch.stack(losses).mean(), comm, "mean").item())
    return means
