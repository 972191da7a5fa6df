"""Find the bug. The function below trains on several ranks, each with a chunk of the gradients, as ZeRO-2 does. It
clips: if the norm of the gradient is above max_norm, the gradient is made shorter, and keeps its direction. It runs,
its loss falls, and all ranks hold the same parameters. Yet a single process with the same batch takes other steps.

Several libraries that split a model over ranks have met this one. fairscale described it in 2020, for its sharded
optimizer: "each rank only has a partial view to all the gradients". torchtitan, a library of PyTorch's developers, had
it until November 2024, in its pipelines. The issue carries the label release_blocking.

    torchtitan's issue      https://github.com/pytorch/torchtitan/issues/596
    its correction          https://github.com/pytorch/torchtitan/pull/649
    fairscale               https://github.com/facebookresearch/fairscale/pull/167

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.draws import deal
from tests.exercises.kit import lent, wrong
from tests.exercises.rank_kit import by_rank, metered
from tests.exercises.tasks import bug_clipping

PLAN = [
    "What must hold: the parameters after each step are those of one process with the whole batch, which clips the "
    "whole gradient.",
    "Clipping changes how long the gradient is, and never its direction. A gradient that is short enough stays.",
    "The norm of each step, before clipping, is the same number on all ranks: it is what a log shows. It is as exact "
    "as the dtype of the parameters allows.",
    "No rank ever holds the whole averaged gradient: that would be the memory that the chunks save.",
]
HINTS = [
    "Rank 0 has the gradient (3, 0) and rank 1 has (0, 4). How long is the whole one, and what is each number "
    "multiplied by, if the norm shall be 1?",
    "Norms do not add up. What does, of the numbers of two ranks?",
    'squares = mine.grad.square().sum() is this rank\'s share. all_reduce(squares, comm, "sum") is one number.',
]
AFTER = (
    "PyTorch's first FSDP has a method for this, model.clip_grad_norm_, since the function of the same name sees "
    "one rank's shards. In FSDP2 a parameter is a DTensor, which knows over which ranks it is split, so the plain "
    "function adds the squares up by itself. It does not know of pipeline stages, and that was torchtitan's bug. "
    "Under Adam the bug is hard to see: Adam divides a gradient by its usual size, so a factor that a rank always "
    "has cancels out. Read next: `clip_grad_norm_` in minizero/engines/any_model/wrapped.py, which adds in one order, "
    "so that all stages agree bit for bit."
)
TAKEAWAY = (
    "A norm over shards is the root of the sum of all squares: a rank that clips by its own norm turns the gradient."
)
BUGGY = (
    ("        squares = mine.grad.square().sum()\n", ""),
    (
        '        norm = all_reduce(squares, comm, "sum").sqrt()\n',
        "        norm = torch.nn.utils.clip_grad_norm_([mine], max_norm)\n",
    ),
    ("        mine.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)\n", ""),
)
NORM = 'all_reduce(squares, comm, "sum").sqrt()'
WRONG = [
    wrong("local-norm", "Each rank cuts its own part by the norm of that part, and the gradient points elsewhere: the "
          "norm is that of all parts together.", *BUGGY),
    wrong("mean-of-norms", "The norm was taken for the mean of the ranks' norms. 3 and 4 make 5, not 3.5: add up "
          "squares, and take the root.", (NORM, 'all_reduce(squares.sqrt(), comm, "mean")')),
    wrong("sum-of-norms", "The norm was taken for the sum of the ranks' norms. 3 and 4 make 5, not 7: add up squares, "
          "and take the root.", (NORM, 'all_reduce(squares.sqrt(), comm, "sum")')),
    wrong("forgets-the-root", "The norm was taken for the sum of the squares, 25 where it is 5: the root is missing.",
          (NORM, 'all_reduce(squares, comm, "sum")')),
    wrong("shares-the-threshold", "The norm is right now, and the direction is not: the ranks' parts need one factor.",
          BUGGY[0], (BUGGY[1][0], "        norm = torch.nn.utils.clip_grad_norm_([mine], max_norm / comm.size**0.5)\n"),
          BUGGY[2]),
    wrong("clips-before-the-average", "Each rank's gradient was clipped before the average: clip the average.",
          BUGGY[0], BUGGY[1], BUGGY[2], (
           "        mine.grad = reduce_scatter(pad(parameters_to_vector(gradients), comm.size)", "        whole = "
           "parameters_to_vector(gradients)\n        whole *= (max_norm / whole.norm()).clamp(max=1.0)\n"
           "        mine.grad = reduce_scatter(pad(whole, comm.size)"),
          ("        optimizer.step()\n", "        norm = whole.norm()\n        optimizer.step()\n")),
    wrong("lengthens", "A gradient that is short enough stays as it is: the factor is at most 1.",
          (".clamp(max=1.0)", "")),
    wrong("reports-its-own-norm", "The norm that is returned is that of this rank's part. It is that of all parts, "
          "before clipping.", ("norms.append(norm.item())", "norms.append(squares.sqrt().item())")),
]  # fmt: skip


class Free(nn.Module):
    """The gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Model(nn.Module):
    """Two layers, whose second one has the larger gradients. An odd number of parameters, so that there is padding."""

    def __init__(self, width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()), y)


def data(steps: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """To be learnt: y = 3 x₀ - 2 x₁."""
    xs = [torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]
    return [(x, 3 * x[:, :1] - 2 * x[:, 1:]) for x in xs]


class Case(NamedTuple):
    ranks: int
    max_norm: float
    width: int
    dtype: torch.dtype
    seed: int


EXAMPLE = Case(2, 1.0, 0, torch.float32, 0)  # its ranks see the gradients (6, 0, 0, 0) and (0, 0, 0, 8)


def draw(random: Random) -> list[Case]:
    ways = itertools.product((1, 2, 3, 4), (0.0, 0.5, 4.0, 1000.0, math.inf))
    rows = deal(random, [*ways, (6, 0.5)], [1, 3, 8], [torch.float32, torch.float64])
    plain = [EXAMPLE, EXAMPLE._replace(max_norm=10.0)]
    return [*plain, *map(Case._make, rows), Case(4, 4.0, 2000, torch.float32, random.randrange(10**6))]


def result(case: Case) -> Any:
    """The averaged gradient of the example is (3, 0 | 0, 4), half of it on each rank. Its norm is 5."""
    generator, rate = torch.Generator().manual_seed(case.seed), 0.02
    if case.width:
        model: nn.Module = Model(case.width, case.dtype, generator)
        batches = data(4, 12, case.dtype, generator)
    else:
        model, rate, x = Free(), 1.0, torch.tensor([[6.0, 0, 0, 0], [0, 0, 0, 8]])
        batches = [(x, x)]

    def train(comm: Any) -> dict[str, Any]:
        mine = lent(model)
        parts = [tuple(both.chunk(comm.size)[comm.rank] for both in batch) for batch in batches]
        norms = bug_clipping.train_on_shards(mine, iter(parts), case.max_norm, rate, comm)
        return {
            "parameters": parameters_to_vector(mine.parameters()).detach(),
            "norms": norms,
            "parameters with a full gradient": sum(parameter.grad is not None for parameter in mine.parameters()),
        }

    runs, meters = metered(case.ranks, train)
    return by_rank(runs) | meters


def tolerance(case: Case) -> float:
    """Where it clips, 1e-6 may stand beside the norm, or not."""
    return 1e-9 if case.dtype == torch.float64 and case.max_norm >= 1000 else 1e-4
