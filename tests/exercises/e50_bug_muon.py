"""Find the bug. The function below trains with Muon on several ranks. Muon moves a matrix not by its gradient, but by a
matrix with the same directions whose singular values are all about 1. The parameters lie end to end in a flat buffer,
and each rank updates its chunk of it, as in ZeRO-1 and ZeRO-2. It runs, its loss falls, and after a step all ranks hold
the same parameters, bit for bit. Yet some matrices take other steps than in a single process.

This happened to DeepSpeed, in January 2026, with ZeRO stage 1 or 2, Muon and reduce_scatter, which is on by default: a
part of the matrices took wrong steps. No error was raised, and the tests only asked whether the parameters had changed.

    the report          https://github.com/deepspeedai/DeepSpeed/issues/7807
    it is refused       https://github.com/deepspeedai/DeepSpeed/pull/8090
    it is made right    https://github.com/deepspeedai/DeepSpeed/pull/8141

What was made smaller: three matrices of 8 x 4, 8 x 8 and 2 x 8, and ranks that are threads. DeepSpeed gives vectors and
embeddings to Adam, and here there are none. Each rank computes the update of all matrices; DeepSpeed's computes that
of the matrices in which it has a part. Momentum is the plain one.

Predict before you look: the three matrices have 32, 64 and 16 numbers and lie end to end. Which of them takes a wrong
first step on 2 ranks? Which ones on 4 ranks? And does the loss show it?

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.draws import deal
from tests.exercises.kit import Tolerance, lent, wrong
from tests.exercises.rank_kit import by_rank, metered
from tests.exercises.tasks import bug_muon

PLAN = [
    "What must hold: losses and parameters are those of one process that has the whole batch and steps with Muon.",
    "Each rank moves its own chunk of the parameters, and then all gather all chunks.",
    "In a step a rank sends at most three times what a reduce-scatter of the gradients sends.",
]
HINTS = [
    "Two ranks, and a matrix of two rows: rank 0 owns the first row, rank 1 the second. Write down which numbers each "
    "rank gives to `orthogonal`: which are averages over the ranks, and which are its own?",
    "Adam needs of a gradient only the numbers of its own chunk. `orthogonal` multiplies the matrix by itself: each "
    "number of the result depends on all numbers of the matrix.",
    "After reduce_scatter each rank has the average of its chunk, and all chunks together are the whole average. "
    "all_gather(chunk, comm) returns it on every rank.",
]
AFTER = (
    "Of 32, 64 and 16 numbers the second matrix is cut on 2 ranks, the first and the second on 4. "
    "DeepSpeed first refused Muon with reduce_scatter, as its ZeRO-3 did already. In July each averaged slice of a cut "
    "matrix then went to all ranks that own a part of it, and a test compared the update with that of the whole "
    "gradient. Another way is to cut the buffer between matrices only, so that each has one owner. This package "
    "refuses: its stages take optimizers that look at one number at a time, and turn torch.optim.Muon away by name. "
    "Read next: `check_elementwise` in minizero/engines/any_model/guards/optimizers.py."
)
TAKEAWAY = (
    "A shard serves an optimizer that looks at one number at a time: what needs the whole matrix goes wrong on exactly "
    "the matrices that are cut, while the ranks agree and the loss looks right."
)
BUGGY = (
    (
        "        gradient = all_gather(averaged, comm)\n",
        "        gradient.chunk(comm.size)[comm.rank].copy_(averaged)\n",
    ),
)
REDUCE = '        averaged = reduce_scatter(gradient, comm, "mean")\n'
GATHER = BUGGY[0][0]
PAIRS = "        pairs = zip(momentum.split(sizes), matrices)\n"
UPDATE = "        update = torch.cat([orthogonal(piece.view_as(matrix)).flatten() for piece, matrix in pairs])\n"
MOVE = "        mine -= learning_rate * pad(update, comm.size).chunk(comm.size)[comm.rank]\n"
STEP = "momentum = 0.9 * momentum + gradient[: sum(sizes)]"
WRONG = [
    wrong("averages-its-chunk", "Only this rank's chunk of the gradient is an average. A matrix that lies in one chunk "
          "is right; one that is cut is not: gather the average before a matrix is made orthogonal.", *BUGGY),
    wrong("averages-nothing", "Each rank moves its chunk by its own gradient: nothing was averaged.", (REDUCE, ""),
          (GATHER, "")),
    wrong("gathers-what-is-not-averaged", "Each rank has the same whole gradient, whose first part is rank 0's own and "
          "whose second part is rank 1's: average before you gather.",
          (REDUCE, "        averaged = gradient.chunk(comm.size)[comm.rank]\n")),
    wrong("averages-the-updates", "The average of two orthogonal matrices is not orthogonal: average the gradients "
          "first.", (REDUCE, ""), (GATHER, ""), (UPDATE, UPDATE + "        "
           'update = all_gather(reduce_scatter(pad(update, comm.size), comm, "mean"), comm)[: sum(sizes)]\n')),
    wrong("orthogonal-chunk", "A rank's chunk was taken for a matrix: `orthogonal` needs each matrix whole.",
          (GATHER, ""), ("momentum = torch.zeros(sum(sizes), dtype=mine.dtype)", "momentum = torch.zeros_like(mine)"),
          (STEP, "momentum = 0.9 * momentum + averaged"), (PAIRS, ""), (UPDATE, ""),
          (MOVE, "        mine -= learning_rate * orthogonal(momentum.view(1, -1)).flatten()\n")),
    wrong("one-long-matrix", "The whole buffer was taken for one matrix: make each matrix orthogonal by itself.",
          (PAIRS, ""), (UPDATE, "        update = orthogonal(momentum.view(1, -1)).flatten()\n")),
    wrong("momentum-too-late", "Momentum adds up gradients, and what is made orthogonal is the momentum: not the other "
          "way round.", (STEP, "pieces = gradient[: sum(sizes)].split(sizes)"),
          (PAIRS, "        pairs = zip(pieces, matrices)\n"),
          (MOVE, "        momentum = 0.9 * momentum + update\n" + MOVE.replace("update", "momentum"))),
    wrong("sends-all-gradients", "The numbers are right, and too many bytes go out: a rank passes on averages of "
          "chunks, not all gradients.", (REDUCE, ""),
          (GATHER, "        gradient = all_gather(gradient, comm).view(comm.size, -1).mean(0)\n")),
]  # fmt: skip


class Given(nn.Module):
    """Three matrices whose gradients are what it is given: 4, 8 and 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(2, columns)) for columns in (2, 4, 2))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (parameters_to_vector(self.weights) * x).sum()


class Model(nn.Module):
    """Three layers without bias."""

    def __init__(self, width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        shapes = ((width, 4), (width, width), (2, width))
        drawn = [torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes]
        self.weights = nn.ParameterList(nn.Parameter(matrix.to(dtype)) for matrix in drawn)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second, third = self.weights
        return F.mse_loss(((x @ first.T).tanh() @ second.T).tanh() @ third.T, y)


def data(steps: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """A batch is in order, so that each rank sees other inputs."""
    turn, batches = torch.randn(4, 2, generator=generator), []
    for _ in range(steps):
        x = torch.randn(size, 4, generator=generator)
        x = x[x[:, 0].argsort()]
        batches.append((x.to(dtype), (x @ turn).sin().to(dtype)))
    return batches


class Case(NamedTuple):
    ranks: int
    steps: int
    width: int
    dtype: torch.dtype
    seed: int


EXAMPLE = Case(2, 2, 0, torch.float32, 0)  # of known gradients; rank 0 owns the first 8 of 16 numbers
GIVEN = ([3.0, 1, -1, 2, 2, 0, 1, -2, 4, 1, 0, 3, 1, 0, 2, 2], [1.0, -1, 1, 4, 0, 2, 1, 4, -2, 3, 2, 1, 3, 2, -2, 0])


def draw(random: Random) -> list[Case]:
    """width: of the matrices; the flat buffer is cut at other places with each, and may need padding."""
    ways = [*itertools.product((1, 2, 3, 4), (1, 3)), (6, 2), (2, 60)]
    return [EXAMPLE, *map(Case._make, deal(random, ways, [3, 5, 6, 7], [torch.float32, torch.float64]))]


def result(case: Case) -> Any:
    generator, rate = torch.Generator().manual_seed(case.seed), 0.02
    if case.width:
        model: nn.Module = Model(case.width, case.dtype, generator)
        batches = data(case.steps, 12, case.dtype, generator)
    else:
        model, rate, numbers = Given(), 1.0, torch.tensor(GIVEN)
        batches = [(numbers, numbers), (numbers.flip(1), numbers)]

    def train(comm: Any) -> dict[str, Any]:
        mine = lent(model)
        parts = [tuple(both.chunk(comm.size)[comm.rank] for both in batch) for batch in batches]
        losses = bug_muon.train_with_muon(mine, iter(parts), rate, comm)
        return {"parameters": parameters_to_vector(mine.parameters()).detach(), "losses": torch.tensor(losses)}

    runs, meters = metered(case.ranks, train)
    return by_rank(runs) | meters


def tolerance(case: Case) -> Tolerance:
    return {torch.float64: 1e-9, torch.float32: 1e-3}
