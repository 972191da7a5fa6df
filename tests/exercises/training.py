"""Train a small GPT with a student's function inside, and measure one step.

The first optimizer of a process makes PyTorch import for a second or more. It is made here, so that this time does not
count as the student's.
"""

from typing import Any, NamedTuple

import torch

from minizero import GPT
from minizero.memory import Ledger
from tests.exercises.kit import fail
from tests.support.helpers import SMALL, batch, plain, relative_error, train

__all__ = ["SMALL", "Step", "batch", "check_training", "one_step", "plain", "train", "vector"]

torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
NAMES = [name for name, _ in GPT(SMALL).named_parameters()]
PSI = sum(p.numel() for p in GPT(SMALL).parameters())


def part(comm: Any, step: int = 0) -> list[torch.Tensor]:
    """x and y: this rank's part of the batch."""
    return [both.chunk(comm.size)[comm.rank] for both in batch(step)]


def vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameters, flat, one after the other."""
    return torch.cat([tensors[name].detach().reshape(-1) for name in NAMES])


class Step(NamedTuple):
    """One step with SGD at learning rate 1: what the parameters moved by is minus the gradient."""

    gradient: torch.Tensor
    held: dict[str, int]  # bytes after backward
    after: dict[str, int]  # bytes after the optimizer's step
    sent: int  # bytes in forward, backward, and the next forward
    again: int  # bytes in one more forward, with nothing changed


def one_step(comm: Any, stage: Any, optimizer: Any = torch.optim.SGD, **options: Any) -> Step:
    model = stage(GPT(SMALL), comm, **options)
    before = vector(model.gather_state_dict())
    opt = optimizer(model.parameters(), lr=1.0 if optimizer is torch.optim.SGD else 1e-3)
    start = comm.bytes_sent
    with Ledger(model, opt) as ledger:
        model(*part(comm)).backward()
        held = dict(ledger.current)
        opt.step()
        after = dict(ledger.current)
    opt.zero_grad()
    with torch.no_grad():
        model(*part(comm))
        sent = comm.bytes_sent - start
        model(*part(comm))
        again = comm.bytes_sent - start - sent
    moved = before - vector(model.gather_state_dict())
    return Step(moved, held, after, sent, again)


def check_training(results: list[Any], what: str) -> None:
    """results: of `train` with two steps, on each rank. All ranks' parameters are one process's."""
    want = plain(2)[1]
    for rank, (_, state, _) in enumerate(results):
        if not relative_error(state, want) < 1e-4:
            fail("values", f"After two steps of {what} rank {rank}'s parameters are not those of one process.")
