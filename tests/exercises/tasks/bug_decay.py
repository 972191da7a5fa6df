"""AdamW on weights in BF16, without masters."""

from collections.abc import Iterable

import torch
from torch import nn


def stochastic(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """FP32 numbers as BF16: each becomes one of its two neighbours at random, the nearer one more often.

    So the mean over many draws is the number itself. BF16 is the upper half of FP32's 32 bits: whoever adds a random
    number of 16 bits, and cuts the lower half off, goes up as often as the lower half is large.
    """
    draws = torch.randint(2**16, exact.shape, generator=generator, dtype=torch.int32)
    return ((exact.view(torch.int32) + draws) & -(2**16)).view(torch.float32).bfloat16()


def train_in_bf16(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    rate: float,
    decay: float,
    generator: torch.Generator,
) -> list[float]:
    """Train with AdamW. Return the loss of each step.

    model(x, y): the loss; all parameters are BF16. Adam's moments are FP32. In each step a weight loses rate · decay of
    itself, beside what Adam does (Loshchilov and Hutter, 2019). There are no masters: `stochastic` rounds instead.
    """
    weights = list(model.parameters())
    moments = [torch.zeros(2, *weight.shape) for weight in weights]
    losses = []
    for step, (x, y) in enumerate(batches, 1):
        loss = model(x, y)
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient, (mean, square) in zip(weights, gradients, moments):
            mean.lerp_(gradient.float(), 0.1)
            square.lerp_(gradient.float().square(), 0.001)
            update = rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            exact = weight.detach().float() * (1 - rate * decay) - update
            weight.data.copy_(stochastic(exact, generator))
        losses.append(loss.item())
    return losses
