"""Find the bug. The function below trains a language model. The batch of a step is cut into micro-batches, and the
micro-batches are spread over ranks. It runs, and its loss falls. Yet it does not train the model that one process
trains with the whole batch.

This happened to Hugging Face Transformers, among others. In October 2024 a user reported that the losses with and
without accumulation were not the same. Hugging Face wrote: "Gradient accumulation is supposed to be mathematically
equivalent to full batch training; however, losses did not match".

    the report              https://huggingface.co/blog/gradient_accumulation
    the first correction    https://github.com/huggingface/transformers/pull/34191
    a year before           https://github.com/huggingface/transformers/issues/24725
    what it left, on ranks  https://github.com/huggingface/transformers/issues/34242

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.exercises.draws import deal
from tests.exercises.kit import Tolerance, lent, wrong
from tests.exercises.rank_kit import by_rank, metered
from tests.exercises.tasks import bug_accumulation

PLAN = [
    "What must hold: a step is that of one process which has all micro-batches of all ranks in one batch. A gradient "
    "that is there before the call counts for nothing.",
    "Every target counts the same, whatever its micro-batch and its rank. Padding counts for nothing. A micro-batch "
    "or a rank's whole window may be padding alone.",
    "The activations of one micro-batch are in memory at a time: it goes backward before the next one goes forward.",
    "What is returned is the loss of the window, over all ranks: the number that one process would log.",
]
HINTS = [
    "Take two micro-batches, one of 2 targets and one of 10. How much does a target of the first one add to the "
    "gradient, and one of the second?",
    "The mean over a window is one division: the sum of the losses of all its targets, by the number of its targets. "
    "No rank knows that number alone, and it must be known before the first backward.",
    'F.cross_entropy(…, reduction="sum") does not divide. all_reduce(tensor, comm, "sum") adds over the ranks.',
]
AFTER = (
    "Transformers counts the targets of a window before it begins, passes the number to the model, and the loss is "
    "a sum divided by it. The first correction counted each rank's targets alone; a second one adds the counts up "
    "over the ranks (pull request 34373), and it was off by default. PyTorch's DDP averages gradients over N ranks,"
    " so a loss that was divided by all targets must be multiplied by N there. If all micro-batches have equally "
    "many targets, both ways agree, and nobody sees the bug. Read next: minizero/accumulate.py, which does this for"
    " every engine."
)
TAKEAWAY = (
    "A mean over micro-batches and ranks is one division, by all targets together: "
    "a mean of means makes short texts loud."
)
BUGGY = (
    ("        targets = torch.tensor(float(sum((y != -100).sum() for _, y in window)))\n", ""),
    ("        targets = all_reduce(targets, comm)\n", ""),
    (', ignore_index=-100, reduction="sum") / targets', ", ignore_index=-100) / len(window)"),
    ('all_reduce(parameter.grad, comm, "sum")', 'all_reduce(parameter.grad, comm, "mean")'),
    ('all_reduce(window_loss, comm, "sum")', 'all_reduce(window_loss, comm, "mean")'),
)
COUNT = "        targets = all_reduce(targets, comm)\n"
GRADIENT, LOSS = BUGGY[3], BUGGY[4]
WRONG = [
    wrong("mean-of-means", "A target of a short micro-batch counts more than one of a long one: each of the 20 should "
          "count 1/20. A mean of means is no mean.", *BUGGY),
    wrong("own-targets", "On one rank all targets count the same, and those of another rank do not: divide by the "
          "targets of all ranks.", (COUNT, ""), GRADIENT, LOSS),
    wrong("own-count", "A rank divides by its own targets. all_reduce returns the sum; its argument stays.",
          (COUNT, COUNT.replace("targets = ", ""))),
    wrong("divides-by-ranks-too", "All targets count the same, and too little: the mean over the ranks divides once "
          "more.", GRADIENT),
    wrong("counts-padding", "It counts the padding as well: a target of -100 is none.",
          ("(y != -100).sum()", "y.numel()")),
    wrong("nan-without-targets", "A micro-batch that is padding alone makes the run NaN: it must add nothing.",
          (BUGGY[2][0], ", ignore_index=-100) * (y != -100).sum() / targets")),
    wrong("a-rank-skips", "A rank has a window of padding alone, and the ranks no longer fit together: one of them "
          "skipped a collective. Each rank calls the same ones, also if it has nothing to add.",
          (COUNT, f"        if not targets:\n            losses.append(0.0)\n            continue\n{COUNT}")),
    wrong("reports-its-own-loss", "What is returned is this rank's loss, or its share: it is the loss over all ranks.",
          ('all_reduce(window_loss, comm, "sum")', "window_loss")),
]  # fmt: skip
COUNTED = [0, 1, *range(12, 22), *range(24, 30), 36, 37]  # of 48 tokens: 2 and 10 on rank 0, 6 and 2 on rank 1


class Free(nn.Module):
    """Every token has scores of its own, so that a step shows how much each token counts."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(tokens, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores[x]


class Model(nn.Module):
    """A word is guessed from the one before it."""

    def __init__(self, words: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 5, dtype=dtype)
        self.out = nn.Linear(5, words, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x))


def pair(targets: int, length: int, words: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The word that follows is the next one in the alphabet. After `targets` of them comes padding."""
    x = torch.randint(words, (1, length), generator=generator)
    return x, ((x + 1) % words).masked_fill(torch.arange(length) >= targets, -100)


class Case(NamedTuple):
    ranks: int
    micro_batches: int
    windows: int
    dtype: torch.dtype
    momentum: float
    gradient_before: bool
    seed: int


EXAMPLE = Case(2, 2, 1, torch.float32, 0.0, False, 0)


def draw(random: Random) -> list[Case]:
    """A rank may have another number of micro-batches than the others, and of targets."""
    ways = [*itertools.product((1, 2, 3), (1, 2, 4), (1, 3)), (6, 2, 2), (2, 300, 2), (1, 1, 40)]
    rows = deal(random, ways, [torch.float32, torch.float64], [0.0, 0.9], [False, True])
    return [EXAMPLE, *map(Case._make, rows)]


def result(case: Case) -> Any:
    random, generator, rate = Random(case.seed), torch.Generator().manual_seed(case.seed), 0.1
    if case == EXAMPLE:
        model: nn.Module = Free(48)
        rate, windows = 1.0, example()
    else:
        model, windows = Model(5, case.dtype, generator), [[] for _ in range(case.ranks)]
        for _ in range(case.windows):
            for rank in windows:
                counts = [random.choice((0, 1, 4, 9)) for _ in range(random.randint(1, case.micro_batches))]
                rank.append([rows(max(n, rank is windows[0]), random.randint(1, 3), generator) for n in counts])

    def train(comm: Any) -> dict[str, Any]:
        mine = lent(model)
        for parameter in mine.parameters():
            parameter.grad = torch.ones_like(parameter) if case.gradient_before else None
        optimizer = torch.optim.SGD(mine.parameters(), lr=rate, momentum=case.momentum)
        losses = bug_accumulation.train_on_windows(mine, optimizer, windows[comm.rank], comm)
        weights = [p.detach().reshape(-1) for p in mine.parameters()]
        if case == EXAMPLE:
            return {
                "how much a target counts": 4 / 3 * mine.scores.detach()[COUNTED, 1],
                "losses": torch.tensor(losses),
            }
        return {"parameters": torch.cat(weights), "losses": torch.tensor(losses)}

    given, meters = metered(case.ranks, train)
    return by_rank(given) | meters


def example() -> list[Any]:
    """A window of each of two ranks, with two micro-batches that are padded to 12. All targets are word 1."""
    x, y = torch.arange(48).view(2, 2, 1, 12), torch.full((48,), -100)
    y[COUNTED] = 1
    return [[list(zip(*both))] for both in zip(x, y.view(x.shape))]


def rows(targets: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """So many rows of 9, of which the first has the most targets."""
    pairs = [pair(targets // (1 + row), 9, 5, generator) for row in range(count)]
    return tuple(torch.cat(parts) for parts in zip(*pairs))


def tolerance(case: Case) -> Tolerance:
    return {torch.float64: 1e-9, torch.float32: 1e-4}
