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

import copy
import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import Diagnosis, Tolerance, fail, lent, ranks, recognise, wrong
from tests.exercises.rank_kit import by_rank, metered
from tests.exercises.tasks import bug_accumulation

PLAN = [
    "What must hold: a step is that of one process which has all micro-batches of all ranks in one batch. A gradient "
    "that is there before the call counts for nothing.",
    "Every target counts the same, whatever its micro-batch and its rank. Padding counts for nothing. A micro-batch "
    "or a rank's whole window may be padding alone.",
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
    wrong("mean-of-means", *BUGGY),
    wrong("own-targets", (COUNT, ""), GRADIENT, LOSS),
    wrong("own-count", (COUNT, COUNT.replace("targets = ", ""))),
    wrong("divides-by-ranks-too", GRADIENT),
    wrong("counts-padding", ("(y != -100).sum()", "y.numel()")),
    wrong("nan-without-targets", (BUGGY[2][0], ", ignore_index=-100) * (y != -100).sum() / targets")),
    wrong("a-rank-skips", (COUNT, f"        if not targets:\n            losses.append(0.0)\n            continue\n"
          f"{COUNT}")),
    wrong("reports-its-own-loss", ('all_reduce(window_loss, comm, "sum")', "window_loss")),
]  # fmt: skip
WORDS = 4
COUNTS = [[2, 10], [6, 2]]  # targets of a rank's micro-batches


class Free(nn.Module):
    """Every token has scores of its own, so that a step shows how much each token counts."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(tokens, WORDS))

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


def train(comm, model, windows, options, left_over=False):
    """(losses, parameters) of this rank. left_over: there is a gradient before."""
    model = lent(model)
    if left_over:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    losses = bug_accumulation.train_on_windows(model, optimizer, windows[comm.rank], comm)
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_one_process(model: nn.Module, windows: Any, options: Any) -> tuple[list[float], torch.Tensor]:
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(len(windows[0])):
        pairs = [pair for rank in windows for pair in rank[step]]
        x, y = (torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def how_much_each_counts(before: str) -> None:
    """One window on two ranks: each micro-batch is padded to 12."""
    x = torch.arange(48).view(2, 2, 1, 12)
    y = torch.full_like(x, -100)
    for rank, micro_batch in itertools.product(range(2), range(2)):
        y[rank, micro_batch, 0, : COUNTS[rank][micro_batch]] = 1
    windows = [[[(x[rank, i], y[rank, i]) for i in range(2)]] for rank in range(2)]
    (_, first), (_, second) = ranks(2, train, Free(48), windows, dict(lr=1.0))
    if not torch.equal(first, second):
        fail("ranks-differ", "After a step the two ranks have other parameters: all ranks must apply one gradient.")
    got = (first.view(48, WORDS)[:, 1] / (1 - 1 / WORDS))[y.flatten() != -100]

    def each(*weights: float) -> torch.Tensor:
        return torch.cat([torch.full((n,), w) for n, w in zip(itertools.chain(*COUNTS), weights)])

    said = (
        f"{before}. But rank 0 has micro-batches of 2 and of 10 targets, rank 1 of 6 and of 2. A target of them counts "
        f"{got[0]:.4f}, {got[2]:.4f}, {got[12]:.4f} and {got[18]:.4f} in the gradient"
    )
    should = "each of the 20 should count 1/20 = 0.0500"
    mistakes = {
        "mean-of-means": (each(1 / 8, 1 / 40, 1 / 24, 1 / 8), f"{said}: {should}."),
        "own-targets": (
            each(1 / 24, 1 / 24, 1 / 16, 1 / 16),
            f"{said}: {should}. On one rank all count the same now, and those of another rank do not.",
        ),
        "own-count": (
            each(1 / 12, 1 / 12, 1 / 8, 1 / 8),
            f"{said}: {should}. A rank divides by its own targets. all_reduce returns the sum; its argument stays.",
        ),
        "divides-by-ranks-too": (
            each(*[1 / 40] * 4),
            f"{said}: they are equal, and half of what they should be, 1/20 = 0.0500, on 2 ranks.",
        ),
        "counts-padding": (each(*[1 / 48] * 4), f"{said}: {should}. 1/48 counts the padding as well."),
        "sum-alone": (each(1, 1, 1, 1), f"{said}: {should}. With the sum a longer window takes a larger step."),
    }
    recognise(got, each(*[1 / 20] * 4), mistakes, f"{said}: {should}", tolerance=1e-5)


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Model(6, torch.float32, generator)
    windows = [[[pair(n, 12, 6, generator) for n in rank] for _ in range(6)] for rank in COUNTS]
    (losses, got), _ = ranks(2, train, model, windows, dict(lr=0.5))
    want_losses, want = on_one_process(model, windows, dict(lr=0.5))
    if not isinstance(losses, list) or len(losses) != 6:
        fail("no-losses", "Expected the loss of each of the six windows.")
    how_much_each_counts(f"{fell(losses)} in 6 windows, as it is returned, and should fall to {want_losses[-1]:.3f}")
    recognise(got, want, {}, "The parameters after six windows, against one process with the whole batch", 1e-4)
    if abs(losses[0] - want_losses[0] / 2) < 1e-4:
        fail(
            "reports-a-share", f"The first loss is said to be {losses[0]:.4f}, and is {want_losses[0]:.4f}: half of it."
        )
    if abs(losses[0] - want_losses[0]) > 1e-4:
        fail(
            "reports-its-own-loss",
            f"The first loss is said to be {losses[0]:.4f} on rank 0, and over both ranks it is {want_losses[0]:.4f}.",
        )
    windows[0][1][0] = pair(0, 12, 6, generator)
    (losses, got), _ = ranks(2, train, model, windows, dict(lr=0.5))
    if bool(got.isnan().any()) or losses[1] != losses[1]:
        fail("nan-without-targets", "A micro-batch that is padding alone makes the run NaN: it must add nothing.")
    windows[1][2] = [pair(0, 12, 6, generator) for _ in windows[1][2]]
    try:
        ranks(2, train, model, windows, dict(lr=0.5))
    except Diagnosis as diagnosis:
        if diagnosis.name in ("deadlock", "mismatch"):
            fail(
                "a-rank-skips",
                "Rank 1 has a window of padding alone, and the ranks no longer fit together: one of them skipped a "
                "collective. Each rank calls the same ones, also if it has nothing to add.",
            )
        raise


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


def draw(random: Random) -> list[Case]:
    """A rank may have another number of micro-batches than the others, and of targets."""
    ways = [*itertools.product((1, 2, 3), (1, 2, 4), (1, 3)), (6, 2, 2), (2, 60, 2), (1, 1, 40)]
    return [Case(*row) for row in deal(random, ways, [torch.float32, torch.float64], [0.0, 0.9], [False, True])]


def result(case: Case) -> Any:
    random, generator = Random(case.seed), torch.Generator().manual_seed(case.seed)
    model = Model(5, case.dtype, generator)
    windows: list[Any] = [[] for _ in range(case.ranks)]
    for _ in range(case.windows):
        for rank in windows:
            counts = [random.choice((0, 1, 4, 9)) for _ in range(random.randint(1, case.micro_batches))]
            rank.append([rows(max(n, rank is windows[0]), random.randint(1, 3), generator) for n in counts])
    options = dict(lr=0.1, momentum=case.momentum)
    given, meters = metered(case.ranks, train, model, windows, options, case.gradient_before)
    return by_rank([{"losses": torch.tensor(losses), "parameters": each} for losses, each in given]) | meters


def rows(targets: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """So many rows of 9, of which the first has the most targets."""
    pairs = [pair(targets // (1 + row), 9, 5, generator) for row in range(count)]
    return tuple(torch.cat(parts) for parts in zip(*pairs))


def tolerance(case: Case) -> Tolerance:
    return {torch.float64: 1e-9, torch.float32: 1e-4}
