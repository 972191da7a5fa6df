"""Find the bug. The function below trains on several ranks, as data parallelism does. Each epoch shuffles the examples,
and adds noise to them, so that no example is ever seen twice in the same form. It runs, and its loss falls. Yet most of
its randomness is not there.

Two well-known failures meet here. NumPy's random state was the same in every worker of PyTorch's DataLoader, and the
same again in every epoch: a worker began with a copy of its parent's state. A study of open-source projects that draw
with NumPy in workers found it in more than 95 % of them, among them "PyTorch's official tutorial, OpenAI's code, and
NVIDIA's projects". And PyTorch's DistributedSampler has the same order in all epochs if nobody calls set_epoch, which
many projects forgot.

    the study               https://tanelp.github.io/posts/a-bug-that-plagues-thousands-of-open-source-ml-projects/
    NumPy in workers        https://github.com/pytorch/pytorch/issues/5059, changed in …/pull/56488
    the order of epochs     https://github.com/pytorch/pytorch/issues/31771

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import copy
import itertools
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.draws import deal
from tests.exercises.kit import compare, lent, ranks, wrong
from tests.exercises.tasks import bug_random

PLAN = [
    "In each epoch every example is seen once, by one of the ranks. The order is another one in each epoch.",
    "Noise is another one for each example, on each rank, in each epoch. Its standard deviation stays.",
    "The same seed gives the same run again, and another seed another run. A run that goes on at epoch 5 sees in it "
    "what it would have seen without the interruption.",
    "Whoever else picks a seed near yours shall not get your numbers. The global random states are theirs, too: leave "
    "them alone.",
]
HINTS = [
    "There are two kinds of random numbers here. On which of them must all ranks agree, and in which must they differ?",
    "What a generator gives depends on its seed alone. So ask for each kind: of which of seed, epoch and rank shall "
    "its seed be made?",
    "np.random.default_rng([seed, epoch]) takes a list, and mixes it. A sum does not: epoch 0 of rank 1 would be "
    "epoch 1 of rank 0.",
]
AFTER = (
    "Since 2021 PyTorch's DataLoader seeds NumPy anew in each worker and each epoch (pull request 56488). "
    "DistributedSampler still wants set_epoch(epoch); Lightning calls it for you. JAX makes the question of this "
    "exercise visible: there is no hidden state that could be copied, and a program must say for which use it "
    "splits a key. With dropout the question comes back: ranks with other data should draw other masks, and ranks "
    "that compute the same thing twice, as in tensor parallelism, must draw the same. Read next: NumPy's page on "
    "parallel random numbers (https://numpy.org/doc/stable/reference/random/parallel.html), and "
    "minizero/recompute/full.py, where a second forward needs the masks of the first."
)
TAKEAWAY = (
    "A random number has an address, of seed, epoch and rank: "
    "what should differ needs another address, what should agree the same."
)
BUGGY = (
    ("        order = np.random.default_rng([seed, epoch]).permutation(len(inputs))\n", ""),
    ("        # + 1, since NumPy takes [seed, epoch, 0] for [seed, epoch].\n", ""),
    (
        "        random = np.random.default_rng([seed, epoch, comm.rank + 1])\n",
        "        random = np.random.default_rng(seed)\n        order = random.permutation(len(inputs))\n",
    ),
)
ORDER, NOISE = "default_rng([seed, epoch]).", "default_rng([seed, epoch, comm.rank + 1])"
WRONG = [
    wrong("same-numbers", "Each rank draws the same noise, and again in each epoch.", *BUGGY),
    wrong("ranks-shuffle-apart", "In an epoch some examples were seen by no rank, and others twice: the ranks must "
          "agree on the order before each takes its part.", (ORDER, "default_rng([seed, epoch, comm.rank + 1]).")),
    wrong("same-noise-on-ranks", "In an epoch the ranks draw the same noise.",
          (NOISE, "default_rng([seed, epoch, 1])")),
    wrong("same-noise-in-epochs", "Each rank draws the same noise in every epoch.",
          (NOISE, "default_rng([seed, comm.rank + 1])")),
    wrong("seeds-collide", "What one rank draws in one epoch, another rank draws in another epoch: never add to a "
          "seed.", (NOISE, "default_rng(seed + epoch + comm.rank)")),
    wrong("same-order", "The examples come in the same order in each epoch: shuffle anew.",
          (ORDER, "default_rng(seed).")),
    wrong("ignores-the-seed", "Two seeds gave the same run: the seed must matter.", (ORDER, "default_rng([1, epoch])."),
          (NOISE, "default_rng([1, epoch, comm.rank + 1])")),
    wrong("forgets-on-resume", "A run over epochs 2 and 3 alone saw something else than a run over epochs 0 to 3 saw "
          "in them. After an interruption it would be another run.",
          ("    means = []\n", "    means = []\n    random = np.random.default_rng([seed, comm.rank + 1])\n"),
          ("        random = np.random.default_rng([seed, epoch, comm.rank + 1])\n", "")),
]  # fmt: skip
COUNT = 24
FAR = 7 + 1000 * 2**16  # what divides by 1000, or keeps 16 bits, takes it for 7


class Recorder(nn.Module):
    """Fits a line, and writes down the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.detach().clone(), y))
        return F.mse_loss(self.layer(x), y)


class Run:
    """What the ranks saw. noise: (epochs, ranks, examples of a rank, 3); numbers: of these examples."""

    def __init__(self, size: int, epochs: range, batch_size: int = 3, seed: int = 7) -> None:
        x = torch.stack([torch.linspace(-1, 1, COUNT), torch.ones(COUNT), torch.linspace(-1, 1, COUNT) ** 2], 1)
        y = torch.arange(float(COUNT))[:, None] / COUNT
        self.model = Recorder()
        self.losses, self.parameters, self.seen = zip(*ranks(size, train, self.model, (x, y), epochs, batch_size, seed))
        self.batches: list[Any] = [sorted({len(x) for x, _ in seen}) for seen in self.seen]
        self.batches += [sum(len(x) for x, _ in seen) for seen in self.seen]
        self.whole = self.batches == [[batch_size]] * size + [len(epochs) * COUNT // size] * size
        if self.whole:
            xs, ys = (torch.stack([torch.cat(parts) for parts in both]) for both in zip(*(zip(*s) for s in self.seen)))
            shape = size, len(epochs), COUNT // size
            numbers = (ys * COUNT).round().long().view(shape)
            self.numbers = numbers.transpose(0, 1)
            self.noise = (xs - x[numbers.view(size, -1)]).view(*shape, 3).transpose(0, 1)

    def is_by_hand(self) -> dict[str, list[bool]]:
        """Whether losses and parameters are those of one process that is given all batches of a step."""
        model, losses = copy.deepcopy(self.model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batches in zip(*self.seen):
            optimizer.zero_grad()
            loss = model(*(torch.cat(parts) for parts in zip(*batches)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means = torch.stack(losses).view(len(self.numbers), -1).mean(1)
        parameters = parameters_to_vector(model.parameters()).detach()
        return {
            "the losses are right": [not compare(torch.tensor(got), means, 1e-4) for got in self.losses],
            "the parameters are right": [not compare(got, parameters, 1e-4) for got in self.parameters],
        }

    def shared(self, first: int, batch_size: int, seed: int) -> int:
        """How often a rank's noise begins with what the generator draws that also gave the order."""
        count = 0
        for number, (numbers, noise) in enumerate(zip(self.numbers, self.noise)):
            for rank in range(len(numbers)):
                order = np.random.default_rng([seed, first + number]).permutation(COUNT)
                drawn = np.random.default_rng([seed, first + number]).normal(0, 0.1, (batch_size, 3))
                alike = noise[rank][:batch_size].allclose(torch.tensor(drawn, dtype=torch.float32), atol=1e-4)
                count += alike and numbers[rank].tolist() == order[rank :: len(numbers)].tolist()
        return count


def different(noise: torch.Tensor) -> int:
    """How many of the noises are different."""
    return len(noise.reshape(-1, 3).mul(1e5).round().unique(dim=0))


def train(comm, model, examples, epochs, batch_size, seed):
    model = lent(model)
    losses = bug_random.train_on_noise(model, examples, iter(epochs), batch_size, seed, comm)
    return losses, parameters_to_vector(model.parameters()).detach(), model.seen


def other_runs() -> dict[str, Any]:
    """Beside a run of four epochs with seed 7: the same again, one that goes on half-way, and those of other seeds."""
    run, again, neighbour, far = (Run(2, range(4), seed=seed) for seed in (7, 7, 8, FAR))
    later = Run(2, range(2, 4))
    with mock.patch.dict(bug_random.train_on_noise.__globals__, {"hash": of_another_process}):
        elsewhere = Run(2, range(4))
    return {
        "a run over epochs 2 and 3 alone sees what it saw": torch.equal(run.numbers[2:], later.numbers)
        and torch.equal(run.noise[2:], later.noise),
        "the same seed gives the same noise": torch.equal(run.noise, again.noise),
        "and in another process, where hash gives other numbers": torch.equal(run.noise, elsewhere.noise),
        f"seeds 7 and {FAR} give the same orders, and noise": [
            torch.equal(run.numbers, far.numbers),
            torch.equal(run.noise, far.noise),
        ],
        "different noises of two runs, with the seeds 7 and 8": different(torch.cat([run.noise, neighbour.noise])),
    }


def many_epochs() -> dict[str, Any]:
    """On one rank 1,010 epochs of seed 7, and epochs 0 and 1 of the seeds 6 and 8. Nothing is drawn twice."""
    runs = [Run(1, range(1010), COUNT), Run(1, range(2), COUNT, 6), Run(1, range(2), COUNT, 8)]
    return {
        "different orders": len(torch.cat([each.numbers.flatten(1) for each in runs]).unique(dim=0)),
        "different noises": different(torch.cat([each.noise for each in runs])),
        "some noise is beyond ±0.3": bool(runs[0].noise.abs().max() > 0.3),
    }


def of_another_process(x: Any) -> int:
    """What `hash` gives in a process that Python has started with another salt."""
    return hash(x) if isinstance(x, int | float) else hash(("another process", x))


class Case(NamedTuple):
    ranks: int
    batch_size: int
    epochs: int
    first: int
    seed: int


PLAIN, OTHER_RUNS, MANY_EPOCHS = Case(2, 3, 4, 0, 7), Case(2, 3, 4, 0, 8), Case(1, COUNT, 1010, 0, 7)


def draw(random: Random) -> list[Case]:
    """first: the epoch with which the run goes on."""
    ways = [*itertools.product((1, 2, 3, 4), (1, 2)), (6, 2), (8, 1), (12, 2), (24, 1)]
    drawn = [Case(*row) for row in deal(random, ways, [2, 5], [0, 3, 50])]
    return [PLAIN, OTHER_RUNS, *drawn, MANY_EPOCHS]


def result(case: Case) -> Any:
    """Not the random numbers themselves, since there are many right ways to draw them."""
    if case in (OTHER_RUNS, MANY_EPOCHS):
        return other_runs() if case == OTHER_RUNS else many_epochs()
    run = Run(case.ranks, range(case.first, case.first + case.epochs), case.batch_size, case.seed)
    seen: dict[str, Any] = {"of each rank the sizes of batches, and how many examples it saw": run.batches}
    if not run.whole:
        return seen
    return (
        seen
        | {
            "examples unseen in an epoch": max(COUNT - len(epoch.unique()) for epoch in run.numbers),
            "different orders": len({tuple(epoch.flatten().tolist()) for epoch in run.numbers}),
            "different noises": different(run.noise),
            "different noises in an epoch": different(run.noise[0]),
            "different noises on a rank": different(run.noise[:, 0]),
            "noises from the numbers that shuffle, too": run.shared(case.first, case.batch_size, case.seed),
            "the noise has mean 0 and standard deviation 0.1": case != PLAIN
            or bool(run.noise.mean().abs() < 0.04 and 0.08 < run.noise.std() < 0.12),
        }
        | run.is_by_hand()
    )
