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

import copy
import itertools
import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import fail, lent, ranks, recognise, wrong
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
    wrong("local-norm", *BUGGY),
    wrong("mean-of-norms", (NORM, 'all_reduce(squares.sqrt(), comm, "mean")')),
    wrong("sum-of-norms", (NORM, 'all_reduce(squares.sqrt(), comm, "sum")')),
    wrong("largest-norm", (NORM, 'all_reduce(squares.sqrt(), comm, "max")')),
    wrong("mean-of-squares", (NORM, 'all_reduce(squares, comm, "mean").sqrt()')),
    wrong("forgets-the-root", (NORM, 'all_reduce(squares, comm, "sum")')),
    wrong("shares-the-threshold", BUGGY[0], (BUGGY[1][0], "        norm = torch.nn.utils.clip_grad_norm_("
          "[mine], max_norm / comm.size**0.5)\n"), BUGGY[2]),
    wrong("clips-before-the-average", BUGGY[0], BUGGY[1], BUGGY[2], (
          "        mine.grad = reduce_scatter(pad(parameters_to_vector(gradients), comm.size)",
          "        whole = parameters_to_vector(gradients)\n        whole *= (max_norm / whole.norm()).clamp(max=1.0)\n"
          "        mine.grad = reduce_scatter(pad(whole, comm.size)"), (
          "        optimizer.step()\n", "        norm = whole.norm()\n        optimizer.step()\n")),
    wrong("divides-by-zero", ("mine.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)", "mine.grad *= min(1.0, "
          "max_norm / norm.item())"), says="ZeroDivisionError"),
    wrong("lengthens", (".clamp(max=1.0)", "")),
    wrong("reports-its-own-norm", ("norms.append(norm.item())", "norms.append(squares.sqrt().item())")),
    wrong("reports-the-clipped-norm", ("norms.append(norm.item())", "norms.append(min(norm.item(), max_norm))")),
    wrong("gathers-the-gradient", ("        squares = mine.grad.square()", "        squares = all_gather(mine.grad, "
          "comm).square()"), (NORM, "squares.sqrt()")),
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


def train(comm, model, batches, max_norm, rate):
    """Norms, parameters, the bytes that this rank sent, and how many parameters keep a gradient."""
    model = lent(model)
    parts = [tuple(both.chunk(comm.size)[comm.rank] for both in batch) for batch in batches]
    before = comm.bytes_sent
    norms = bug_clipping.train_on_shards(model, iter(parts), max_norm, rate, comm)
    kept = sum(parameter.grad is not None for parameter in model.parameters())
    return norms, parameters_to_vector(model.parameters()).detach(), comm.bytes_sent - before, kept


def on_one_process(model: nn.Module, batches: Any, max_norm: float, rate: float) -> tuple[list[float], torch.Tensor]:
    model, norms = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return norms, parameters_to_vector(model.parameters()).detach()


def data(steps: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """To be learnt: y = 3 x₀ - 2 x₁."""
    xs = [torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]
    return [(x, 3 * x[:, :1] - 2 * x[:, 1:]) for x in xs]


def how_much_is_cut(before: str) -> None:
    """One step on two ranks, which see the gradients (6, 0, 0, 0) and (0, 0, 0, 8)."""
    x = torch.tensor([[6.0, 0, 0, 0], [0, 0, 0, 8]])
    (norms, after, *_), (_, other, *_) = ranks(2, train, Free(), [(x, x)], 1.0, 1.0)
    if not torch.equal(after, other):
        fail("ranks-differ", "After a step the two ranks have other parameters: all must end with the same.")
    got = -after[[0, 3]] / torch.tensor([3.0, 4.0])
    said = (
        f"{before}. But take the averaged gradient (3, 0 | 0, 4), half of it on each of 2 ranks, and max_norm = 1. Its "
        f"norm is 5. Rank 0's half was multiplied by {got[0]:.4f}, rank 1's by {got[1]:.4f}, so that the norm is "
        f"{float(after.norm()):.3f}. Both should be 1/5 = 0.2000"
    )
    mistakes = {
        "local-norm": ([1 / 3, 1 / 4], f"{said}: the gradient points elsewhere now."),
        "mean-of-norms": ([1 / 3.5] * 2, f"{said}. Here the norm was taken for 3.5, the mean of 3 and 4."),
        "sum-of-norms": ([1 / 7] * 2, f"{said}. Here the norm was taken for 3 + 4."),
        "largest-norm": ([1 / 4] * 2, f"{said}. Here the norm was taken for 4, that of one rank."),
        "mean-of-squares": ([12.5**-0.5] * 2, f"{said}. Here the square of the norm was taken for (9 + 16) / 2."),
        "forgets-the-root": ([1 / 25] * 2, f"{said}. Here the norm was taken for 9 + 16."),
        "shares-the-threshold": (
            [0.5**0.5 / 3, 0.5**0.5 / 4],
            f"{said}: the norm is right now, and the direction is not. The ranks' halves need one factor.",
        ),
        "clips-before-the-average": (
            [1 / 6, 1 / 8],
            f"{said}. Here each rank's gradient was clipped before the average, (6, 0, 0, 0) and (0, 0, 0, 8).",
        ),
    }
    tensors = {name: (torch.tensor(factors), words) for name, (factors, words) in mistakes.items()}
    recognise(got, torch.tensor([0.2, 0.2]), tensors, said, tolerance=1e-4)
    if abs(norms[0] - 1) < 1e-4:
        fail("reports-the-clipped-norm", f"The norm before clipping is 5, and {norms[0]:.4f} is returned: after it.")
    if abs(norms[0] - 5) > 1e-4:
        fail("reports-its-own-norm", f"The norm of (3, 0 | 0, 4) is 5, and rank 0 returns {norms[0]:.4f}.")
    ranks(2, train, Free(), [(0 * x, 0 * x)], 1.0, 1.0)  # no gradient: its norm may divide nothing
    short = -ranks(2, train, Free(), [(x, x)], 10.0, 1.0)[0][1][0] / 3
    if abs(short - 1) > 1e-4:
        fail(
            "lengthens",
            f"A gradient of norm 5 was multiplied by {short:.4f} for max_norm = 10: it is short enough, so leave it.",
        )


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model, batches = Model(8, torch.float32, generator), data(30, 16, torch.float32, generator)
    runs = ranks(2, train, model, batches, 1.0, 0.05)
    norms, got, sent, _ = runs[0]
    want_norms, want = on_one_process(model, batches, 1.0, 0.05)
    losses, ends = [], [got, want]
    for parameters in (parameters_to_vector(model.parameters()), *ends):
        nn.utils.vector_to_parameters(parameters.detach().clone(), model.parameters())
        losses.append(float(model(*batches[0]).detach()))
    how_much_is_cut(f"{fell(losses[:2])} in 30 steps, where one process has {losses[2]:.3f}")
    recognise(got, want, {}, "The parameters after 30 steps, against one process with the whole batch", 1e-4)
    recognise(torch.tensor(norms), torch.tensor(want_norms), {}, "The norms of 30 steps", 1e-4)
    rings = 30 * 2 * -(-len(got) // 2) * 4
    if sent > rings + 30 * 32:
        fail(
            "gathers-the-gradient",
            f"Rank 0 sent {sent:,} bytes in 30 steps, where reduce-scatter and all-gather take {rings:,}. To know a "
            "norm, a rank needs one number of the others, and not their gradients.",
        )


class Case(NamedTuple):
    ranks: int
    max_norm: float
    width: int
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    ways = itertools.product((1, 2, 3, 4), (0.0, 0.5, 4.0, 1000.0, math.inf))
    rows = deal(random, [*ways, (6, 0.5)], [1, 3, 8], [torch.float32, torch.float64])
    return [*map(Case._make, rows), Case(4, 4.0, 2000, torch.float32, random.randrange(10**6))]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model = Model(case.width, case.dtype, generator)
    batches = data(4, 12, case.dtype, generator)

    def on_rank(comm: Any) -> dict[str, Any]:
        norms, parameters, _, kept = train(comm, model, batches, case.max_norm, 0.02)
        return {"norms": norms, "parameters": parameters, "parameters with a full gradient": kept}

    runs, meters = metered(case.ranks, on_rank)
    return by_rank(runs) | meters


def tolerance(case: Case) -> float:
    """Where it clips, 1e-6 may stand beside the norm, or not."""
    return 1e-9 if case.dtype == torch.float64 and case.max_norm >= 1000 else 1e-4
