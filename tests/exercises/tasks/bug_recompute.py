"""Training in which backward runs each block once more."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    """A network of blocks, one after the other."""

    stem: nn.Module
    blocks: nn.ModuleList
    head: nn.Module


def train_recomputed(
    model: Deep,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[float]:
    """Train in little memory. Return the loss of each step.

    model: it has a `stem`, `blocks` (a list of modules) and a `head`. Forward keeps the input of each block, and what
    lies inside a block is computed again in backward. The run has the numbers of one that keeps everything.
    """
    losses = []
    for x, y in batches:
        hidden = model.stem(x)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = F.cross_entropy(model.head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
