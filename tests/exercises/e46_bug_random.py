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
from tests.exercises.kit import fail, lent, random_states, ranks, recognise, same, wrong
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
    wrong("same-numbers", "", *BUGGY),
    wrong("ranks-shuffle-apart", "", (ORDER, "default_rng([seed, epoch, comm.rank + 1]).")),
    wrong("same-noise-on-ranks", "", (NOISE, "default_rng([seed, epoch, 1])")),
    wrong("same-noise-in-epochs", "", (NOISE, "default_rng([seed, comm.rank + 1])")),
    wrong("seeds-collide", "", (NOISE, "default_rng(seed + epoch + comm.rank)")),
    wrong("same-order", "", (ORDER, "default_rng(seed).")),
    wrong("ignores-the-seed", "", (ORDER, "default_rng([1, epoch])."),
          (NOISE, "default_rng([1, epoch, comm.rank + 1])")),
    wrong("forgets-on-resume", "",
          ("    means = []\n", "    means = []\n    random = np.random.default_rng([seed, comm.rank + 1])\n"),
          ("        random = np.random.default_rng([seed, epoch, comm.rank + 1])\n", "")),
]  # fmt: skip
COUNT, EPOCHS, LONG = 24, 4, 1010
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

    def __init__(self, size: int, epochs: list[int], batch_size: int = 3, seed: int = 7) -> None:
        x = torch.stack([torch.linspace(-1, 1, COUNT), torch.ones(COUNT), torch.linspace(-1, 1, COUNT) ** 2], 1)
        y = torch.arange(float(COUNT))[:, None] / COUNT
        self.model = Recorder()
        before = random_states()
        runs = ranks(size, train, self.model, (x, y), epochs, batch_size, seed)
        if random_states() != before:
            fail("global-state", "The global random state of NumPy, PyTorch or Python is another one afterwards.")
        self.losses = [losses for losses, _, _ in runs]
        self.parameters = [parameters for _, parameters, _ in runs]
        self.seen = [seen for _, _, seen in runs]
        if not all(self.seen):
            fail(
                "examples-missing",
                f"In {len(epochs)} epochs a rank of {size} saw no example. `epochs` may be an iterator: it can be gone "
                "through once.",
            )
        sizes = {len(x) for seen in self.seen for x, _ in seen}
        if sizes != {batch_size}:
            fail(
                "batch-size", f"With batch_size={batch_size} a rank took {max(sizes - {batch_size})} examples at once."
            )
        shape = (len(epochs), COUNT // size)
        xs, ys = (
            torch.stack([torch.cat(parts) for parts in both]) for both in zip(*(zip(*seen) for seen in self.seen))
        )
        if xs.shape[1] != len(epochs) * COUNT // size:
            fail("examples-missing", f"In {len(epochs)} epochs a rank of {size} saw {xs.shape[1]} examples of {COUNT}.")
        self.numbers = (ys * COUNT).round().long().view(size, *shape).transpose(0, 1)
        self.noise = (xs - x[self.numbers.transpose(0, 1).reshape(size, -1)]).view(size, *shape, 3).transpose(0, 1)

    def by_hand(self) -> tuple[list[float], torch.Tensor]:
        """The mean losses of the epochs, and the parameters, of one process that is given all batches of a step."""
        model, losses = copy.deepcopy(self.model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batches in zip(*self.seen):
            optimizer.zero_grad()
            loss = model(*(torch.cat(parts) for parts in zip(*batches)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means = torch.stack(losses).view(len(self.numbers), -1).mean(1).tolist()
        return means, parameters_to_vector(model.parameters()).detach()

    def unseen(self) -> int:
        """How many examples no rank saw, in the first epoch that misses any."""
        return max(COUNT - len(epoch.unique()) for epoch in self.numbers)

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

    def orders(self) -> int:
        return len({tuple(epoch.flatten().tolist()) for epoch in self.numbers})

    def noises(self, of: torch.Tensor | None = None) -> int:
        """How many of the noises are different."""
        return len((self.noise if of is None else of).reshape(-1, 3).mul(1e5).round().unique(dim=0))


def train(comm, model, examples, epochs, batch_size, seed):
    model = lent(model)
    losses = bug_random.train_on_noise(model, examples, iter(epochs), batch_size, seed, comm)
    return losses, parameters_to_vector(model.parameters()).detach(), model.seen


def check() -> None:
    run = Run(2, list(range(EPOCHS)))
    mean, deviation = float(run.noise.mean()), float(run.noise.std())
    if not (0.08 < deviation < 0.12 and abs(mean) < 0.04):
        words = f"The noise has a mean of {mean:.4f} and a standard deviation of {deviation:.4f}"
        fail("no-noise", f"{words}, and should have 0 and 0.1.")
    check_randomness(run)
    if not torch.equal(run.noise, Run(2, list(range(EPOCHS))).noise):
        fail("not-reproducible", "The same seed gave another run the second time: nobody could repeat it.")
    other = Run(2, list(range(EPOCHS)), seed=8)
    for seed, another in ((8, other), (FAR, Run(2, list(range(EPOCHS)), seed=FAR))):
        if same(run.noise, another.noise, 1e-3):
            fail("ignores-the-seed", f"Seeds 7 and {seed} gave the same noise: the seed must matter.")
    both = torch.cat([run.noise, other.noise])
    if run.noises(both) < 2 * EPOCHS * COUNT:
        fail(
            "neighbours-share",
            f"Of the {2 * EPOCHS * COUNT} noises of two runs, with the seeds 7 and 8, {run.noises(both)} are "
            "different: one draws in an epoch what the other draws in another. Never add to a seed.",
        )
    long, below, above = Run(1, list(range(LONG)), COUNT), Run(1, [0, 1], COUNT, 6), Run(1, [0, 1], COUNT, 8)
    if long.noise.abs().max() < 0.3:
        words = f"Of {long.noise.numel():,} numbers of the noise none is beyond ±{long.noise.abs().max():.2f}"
        fail("no-noise", f"{words}: this is no normal noise of standard deviation 0.1.")
    orders = torch.cat([each.numbers.flatten(1) for each in (long, below, above)])
    noise = torch.cat([each.noise for each in (long, below, above)])
    if len(orders.unique(dim=0)) < len(orders) or long.noises(noise) < len(orders) * COUNT:
        fail(
            "neighbours-share",
            f"In one of {LONG} epochs on one rank, seed 7 draws what it has drawn before, or what seed 6 or 8 draws "
            "in epoch 0 or 1: an order, or noise. A sum or product of seed and epoch is the same for several pairs.",
        )
    with mock.patch.dict(bug_random.train_on_noise.__globals__, {"hash": of_another_process}):
        if not torch.equal(run.noise, Run(2, list(range(EPOCHS))).noise):
            fail("salted-hash", "The hash of a text is another number in every process. So is your run.")
    later = Run(2, [2, 3])
    if not (torch.equal(run.numbers[2:], later.numbers) and torch.equal(run.noise[2:], later.noise)):
        fail(
            "forgets-on-resume",
            "A run over epochs 2 and 3 alone saw something else than the run over epochs 0 to 3 saw in them. After an "
            "interruption it would be another run.",
        )
    losses, want = run.by_hand()
    for rank, got in enumerate(run.parameters):
        recognise(got, want, {}, f"The parameters of rank {rank}, against one process with the same batches", 1e-4)
        recognise(torch.tensor(run.losses[rank]), torch.tensor(losses), {}, f"The losses on rank {rank}", 1e-4)


def of_another_process(x: Any) -> int:
    """What `hash` gives in a process that Python has started with another salt."""
    return hash(x) if isinstance(x, int | float) else hash(("another process", x))


def check_randomness(run: Run) -> None:
    total = EPOCHS * COUNT
    said = (
        f"The loss ends at {run.losses[0][-1]:.3f}. But of the {total} noises of {EPOCHS} epochs on 2 ranks "
        f"{run.noises()} are different"
    )
    if run.unseen():
        fail(
            "ranks-shuffle-apart",
            f"In one epoch {run.unseen()} of the {COUNT} examples were seen by no rank, and others twice: the ranks "
            "must agree on the order before each takes its part.",
        )
    one_epoch, one_rank = run.noises(run.noise[0]), run.noises(run.noise[:, 0])
    if one_epoch < COUNT and one_rank < total // 2:
        orders = "the same in all epochs" if run.orders() == 1 else "another one in each epoch"
        fail("same-numbers", f"{said}: each rank draws the same, and again in each epoch. The order is {orders}.")
    if one_epoch < COUNT:
        fail("same-noise-on-ranks", f"{said}: in an epoch both ranks draw the same.")
    if one_rank < total // 2:
        fail("same-noise-in-epochs", f"{said}: each rank draws the same in every epoch.")
    if run.noises() < total:
        fail("seeds-collide", f"{said}: what one rank draws in one epoch, another rank draws in another epoch.")
    if run.orders() < EPOCHS:
        fail("same-order", f"The examples come in {run.orders()} order, in {EPOCHS} epochs: shuffle anew in each.")


class Case(NamedTuple):
    ranks: int
    batch_size: int
    epochs: int
    first: int
    seed: int


def draw(random: Random) -> list[Case]:
    """first: the epoch with which the run goes on."""
    ways = [*itertools.product((1, 2, 3, 4), (1, 2)), (6, 2), (8, 1), (12, 2), (24, 1)]
    return [Case(*row) for row in deal(random, ways, [2, 5], [0, 3, 50])]


def result(case: Case) -> Any:
    """Not the random numbers themselves, since there are many right ways to draw them."""
    run = Run(case.ranks, list(range(case.first, case.first + case.epochs)), case.batch_size, case.seed)
    losses, parameters = run.by_hand()
    return {
        "examples unseen": run.unseen(),
        "different orders": run.orders(),
        "different noises": run.noises(),
        "noises from the numbers that shuffle, too": run.shared(case.first, case.batch_size, case.seed),
        "losses are right": all(same(torch.tensor(got), torch.tensor(losses), 1e-4) for got in run.losses),
        "parameters are right": all(same(got, parameters, 1e-4) for got in run.parameters),
    }
