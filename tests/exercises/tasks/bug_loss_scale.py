"""Mixed precision with a loss scaler, and a gradient that is clipped."""

from collections.abc import Iterable

import torch
from torch import nn

from precision.scaling import LossScaler


def train_scaled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    max_norm: float,
) -> list[tuple[float, float]]:
    """Train in 16 bits, with the gradient clipped to a norm of `max_norm`. Return (loss, norm) of each step.

    model(x, y): the loss; it computes in FP16, with FP32 parameters. norm: of the gradient of that loss, before
    clipping. If it has inf or NaN, the step is skipped.
    """
    log = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        log.append((loss.item(), norm.item()))
    return log
