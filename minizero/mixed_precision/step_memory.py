"""The whole memory of a training step, FP32 against mixed precision: what the masters cost, what activations save.

    FP32, Adam    weights 4Ψ + gradients 4Ψ                                     + moments 8Ψ + A(batch)
    mixed         weights 2Ψ + gradients 2Ψ + masters 4Ψ + their gradients 4Ψ   + moments 8Ψ + A(batch) / 2

Mixed precision holds more per parameter, and less per example: below a certain batch size it needs more memory
than FP32, not less. Nothing is emulated here: weights and activations are float16 tensors, and the ledger counts them.
Micikevicius et al., 2018, "Mixed Precision Training", section 3.1: "memory consumption is dominated by activations".
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from minizero.memory import Ledger, tag
from precision.master import MasterWeights


def watch(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, mixed: bool) -> Ledger:
    """The ledger of one training step of make() with Adam.

    x: FP32 inputs of the model, on the device to use. y: the classes that its logits are compared with.
    """
    model = make().to(x.device)
    if mixed:
        model, x = model.half(), x.half()
    # foreach=False: one parameter at a time on every device. Else a GPU's Adam takes temporary tensors of them all.
    optimizer_class = partial(MasterWeights, optimizer_class=torch.optim.Adam) if mixed else torch.optim.Adam
    optimizer = optimizer_class(model.parameters(), foreach=False)
    for _ in range(2):  # Adam makes its moments in the first step; the second is like all that follow
        with Ledger(model, optimizer) as ledger:
            for master in getattr(optimizer, "masters", ()):
                tag(master, "optimizer")
            F.cross_entropy(model(x).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ledger


def peaks(
    make: Callable[[], nn.Module], images: torch.Tensor, labels: torch.Tensor, batch_sizes: Sequence[int]
) -> dict[str, list[int]]:
    """The peak of all bytes together, for each batch size: {"baseline": [...] in FP32, "mixed": [...]}."""
    return {
        name: [watch(make, images[:size], labels[:size], mixed).peak["total"] for size in batch_sizes]
        for name, mixed in (("baseline", False), ("mixed", True))
    }


def crossover(batch_sizes: Sequence[int], baseline: Sequence[int], mixed: Sequence[int]) -> float | None:
    """The batch size from which on mixed precision holds less, on straight lines between the measurements.

    None if it holds less at all of them, or more at all of them.
    """
    more = [b - a for a, b in zip(baseline, mixed)]  # what mixed precision holds beyond FP32
    for i in range(len(more) - 1, 0, -1):
        if more[i] <= 0 < more[i - 1]:
            return batch_sizes[i - 1] + (batch_sizes[i] - batch_sizes[i - 1]) * more[i - 1] / (more[i - 1] - more[i])
    return None
