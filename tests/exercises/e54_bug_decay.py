"""Find the bug. The function below trains weights in BF16 with AdamW, and without FP32 masters. An update that is
smaller than half the distance to a weight's neighbour would be lost, so it is rounded stochastically: up or down at
random, the nearer one more often. It runs, and its loss falls as that of an FP32 run. Yet one of its arguments does
nothing.

OneTrainer, which fine-tunes models that make pictures, rounds the steps of Adam and AdamW in this way. In September
2025 somebody read its optimizers one beside the other, and reported two of them. Adafactor, in the next file, did it
right.

    the issue               https://github.com/Nerogar/OneTrainer/issues/996
    stochastic rounding     https://github.com/pytorch/pytorch/issues/120376
    BF16 without masters    https://arxiv.org/abs/2010.06192

What was made smaller: the model, and the time. A rate of 1e-4 and a decay of 0.01 take a millionth of a weight in each
step, and it shows after a hundred thousand of them. Here rate · decay is 0.001, and 400 steps are enough. BF16's
neighbours are still further apart: 1/256 to 1/128 of a weight.

Predict before you look: how much of a weight is left after 400 steps, if each takes 0.001 of it? And how many weights
will differ between a run with that decay and a run without any, both with the same random numbers?

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import copy
import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import fail, lent, wrong
from tests.exercises.rank_kit import metered
from tests.exercises.tasks import bug_decay

PLAN = [
    "What must hold: on average over the random numbers, a run is that of torch.optim.AdamW in FP32.",
    "In each step a weight loses rate · decay of itself, also if its gradient is 0. What Adam adds does not depend on "
    "the decay.",
    "The weights stay BF16, 2 bytes each, and the moments FP32, 8 bytes a weight. There is no FP32 copy of the weights "
    "from one step to the next.",
    "Each step draws new random numbers, from the generator that is given.",
]
HINTS = [
    "Take a weight of 1. What are its neighbours in BF16? A step wants 0.999 of it: in which dtype is that computed, "
    "and what becomes of it there?",
    "Nothing is lost as long as a number is FP32. There may be more than one rounding to BF16 in a step; which of them "
    "is not stochastic?",
    "Do all of the step in FP32, the decay as well, and let `stochastic` round the result, once.",
]
AFTER = (
    "Two cures are in OneTrainer itself: Adafactor decays in FP32 before the one rounding, as you do now, and CAME "
    "rounds the decay stochastically by itself. torchao's AdamW also does the whole step in FP32 before it rounds. "
    "With FP32 masters there is no such bug, because the master keeps what is small; that is what their 4 bytes "
    "buy. The same border loses whatever is added in small steps: an average of weights (EMA) in BF16, with "
    "0.9999, hardly moves. Read next: section 1 of notebooks/04b_masters_sums_bytes.ipynb, whose figure has the "
    "border, and precision/master.py."
)
TAKEAWAY = (
    "What is smaller than the format's step is lost, however often it comes; run once with the option and once "
    "without, and count what differs."
)
BUGGY = (
    (
        "            exact = weight.detach().float() * (1 - rate * decay) - update\n",
        "            weight.data.mul_(1 - rate * decay)\n            exact = weight.detach().float() - update\n",
    ),
)
EXACT, ROUND = BUGGY[0][0], "stochastic(exact, generator)"
WRONG = [
    wrong("decays-in-bf16", *BUGGY),
    wrong("shrinks-the-update", (
          EXACT, "            exact = (weight.detach().float() - update) * (1 - rate * decay)\n")),
    wrong("weights-in-fp32", (EXACT, "            weight.data = weight.data.float() * (1 - rate * decay)\n"
          "            exact = weight.detach() - update\n")),
    wrong("rounds-to-nearest", (ROUND, "exact.bfloat16()")),
    wrong("rounds-one-way", (ROUND, "(exact.view(torch.int32) & -(2**16)).view(torch.float32)")),
    wrong("the-same-draws", (ROUND, "stochastic(exact, torch.Generator().manual_seed(0))")),
    wrong("decays-the-gradient", (EXACT, EXACT.replace(" * (1 - rate * decay)", "")), (
          "        for weight, gradient, (mean", "        gradients = [g.float() + decay * w.detach().float() for g, w "
          "in zip(gradients, weights)]\n        for weight, gradient, (mean")),
    wrong("decays-once", (EXACT, EXACT.replace(" * (1 - rate * decay)", "")), ("    return losses",
          "    for weight in weights:\n        weight.data.copy_(stochastic(weight.detach().float() * (1 - rate * "
          "decay) ** step, generator))\n    return losses"), says="decays-at-the-end"),
]  # fmt: skip
RATE, DECAY, STEPS = 0.002, 0.5, 400


class Weights(nn.Module):
    """Its loss is slope · Σ w: with slope 0, nothing but decay moves it."""

    def __init__(self, values: torch.Tensor, slope: float) -> None:
        super().__init__()
        self.values, self.slope = nn.Parameter(values.bfloat16()), slope
        self.means: list[float] = []  # before each step

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        self.means.append(self.values.detach().float().mean().item())
        return (self.values.float() * self.slope).sum()


class Model(nn.Module):
    """Two layers, which compute in FP32 with the weights that they have."""

    def __init__(self, generator: torch.Generator, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, width, generator=generator).bfloat16())
        self.second = nn.Parameter(torch.randn(width, 1, generator=generator).bfloat16())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss((x @ self.first.float()).tanh() @ self.second.float() / 4, y)


def data(steps: int, generator: torch.Generator) -> list[Any]:
    xs = [torch.randn(32, 3, generator=generator) for _ in range(steps)]
    return [(x, x.prod(1, keepdim=True).tanh() + x[:, :1]) for x in xs]


class Run:
    """The answer's losses; and the weights at its end, in FP32."""

    def __init__(self, model: nn.Module, batches: Any, rate: float, decay: float, seed: int = 0) -> None:
        self.model = lent(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses = bug_decay.train_in_bf16(self.model, iter(batches), rate, decay, self.generator)
        self.weights = parameters_to_vector(self.model.parameters()).detach().float()


def in_fp32(model: nn.Module, batches: Any, rate: float, decay: float) -> tuple[list[float], torch.Tensor]:
    """(losses, weights) of PyTorch's AdamW."""
    model, losses = copy.deepcopy(model).float(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    for x, y in batches:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters_to_vector(model.parameters()).detach()


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model, batches = Model(generator), data(STEPS, generator)
    want_losses, want = in_fp32(model, batches, RATE, DECAY)
    run, without = Run(model, batches, RATE, DECAY), Run(model, batches, RATE, 0.0)
    differ = int((run.weights != without.weights).sum())
    said = (
        f"{fell(run.losses)} in {STEPS} steps, and in FP32 to {want_losses[-1]:.3f}. But the weights' norm is "
        f"{run.weights.norm():.3f} at the end, and {want.norm():.3f} in FP32. Of {len(want)} weights {differ} "
        "differ from those of a run with decay = 0"
    )
    decay_alone(said)
    update_alone()
    if abs(run.weights.norm() / want.norm() - 1) > 0.05:
        fail("values", f"{said}.")
    late, want_late = (torch.tensor(losses[-50:]).mean() for losses in (run.losses, want_losses))
    if abs(late - want_late) > 0.1 * want_late:
        fail("values", f"The mean loss of the last 50 steps is {late:.4f}, and in FP32 it is {want_late:.4f}.")
    check_masters()
    if any(weight.dtype != torch.bfloat16 for weight in run.model.parameters()):
        fail("weights-in-fp32", "At the end there are weights in FP32, 4 bytes each. They must stay BF16.")


def check_masters() -> None:
    """Between two steps somebody sets the weights to 1, as a restart does: from then on they decay from there."""
    model = Weights(torch.full((4000,), 2.0), 0.0)

    def batches():
        for step in range(60):
            if step == 30:
                model.values.data.fill_(1.0)
            yield torch.ones(1), torch.ones(1)

    bug_decay.train_in_bf16(model, batches(), RATE, DECAY, torch.Generator().manual_seed(0))
    mean, want = model.values.detach().float().mean().item(), (1 - RATE * DECAY) ** 30
    if abs(mean - want) > 0.05:
        fail(
            "keeps-masters",
            f"Before step 30 the weights were set to 1, and at the end, after 60, they were {mean:.2f}, not "
            f"{want:.2f}: a copy from before was used. A master would be right, too, but it costs 4 bytes a weight, "
            "which stochastic rounding saves.",
        )


def decay_alone(said: str) -> None:
    """4,000 weights from 0.5 to 2 whose gradient is 0: what is left of each after 100 steps."""
    before = torch.exp2(torch.linspace(-1, 1, 4000)).bfloat16().float()
    run = Run(Weights(before, 0.0), [(before, before)] * 100, RATE, DECAY)
    left = run.weights / before
    want, mean = (1 - RATE * DECAY) ** 100, left.mean().item()
    assert isinstance(run.model, Weights)
    half = run.model.means[50] / before.mean().item() if len(run.model.means) > 50 else mean
    alone = (
        f"Weights whose gradient is 0 lost {1 - mean:.1%} in 100 steps, and each step should take {RATE * DECAY:.1%}"
    )
    if torch.equal(run.weights, before):
        nearest = Run(Weights(before, 1.0), [(before, before)] * 100, 1e-4, 0.0)
        if torch.equal(nearest.weights, before):
            fail(
                "rounds-to-nearest",
                "Neither decay nor a step of 0.0001 moves a weight of 1: rounded to the nearest "
                "BF16 number, each of them is lost. `stochastic` rounds so that the mean stays.",
            )
        fail(
            "decays-in-bf16",
            f"{said}. {alone}. None came: if 0.1 % is left out, or rounded to the nearest, nothing is left of "
            "it, because BF16's neighbours are 0.4 to 0.8 % of a weight apart.",
        )
    if abs(mean - want) < 0.01 and abs(half - want**0.5) > 0.01:
        fail(
            "decays-at-the-end",
            f"After 50 of 100 steps weights whose gradient is 0 had lost {1 - half:.1%}, and at "
            f"the end {1 - mean:.1%}. Each step takes its part: the next loss depends on it.",
        )
    if left.std() > 0.1:
        fail(
            "the-same-draws",
            f"{alone}. Some lost {1 - left.min().item():.0%} and some {1 - left.max().item():.0%}: each "
            "weight has the same luck in every step. Draw anew.",
        )
    if mean > 1:
        fail("grows", f"Weights whose gradient is 0 grew by {mean - 1:.1%} in 100 steps: they should lose.")
    if mean < 0.01:
        fail("forgets-the-rate", f"{alone}. With decay = {DECAY} they lost {DECAY:.0%} in each: the rate was left out.")
    small, large = ((before - run.weights)[part].mean().item() for part in (before < 0.6, before > 1.8))
    if large < 1.5 * small:
        fail(
            "decays-the-gradient",
            f"Weights below 0.6 lost {small:.3f}, and those above 1.8 {large:.3f}, about the same: Adam divides a "
            "gradient by its size, so a decay inside the gradient loses its own. AdamW takes it from the weight.",
        )
    if mean < want - 0.05:
        fail(
            "rounds-one-way",
            f"{alone}. BF16's step is four to eight times as large, and each weight took one in "
            "every step: round up as well.",
        )
    if abs(mean - want) > 0.01:
        fail("values", f"{alone}: {1 - want:.1%} in all.")


def update_alone() -> None:
    """With a gradient of 1 Adam moves each weight by the rate, which is a fortieth of BF16's step here."""
    before = torch.ones(4000) * 1.5
    moved = (before - Run(Weights(before, 1.0), [(before, before)] * 100, 2e-4, 0.0).weights).mean().item()
    if not 0.8 < moved / 0.02 < 1.2:
        fail(
            "loses-the-update",
            f"With a gradient of 1 and a rate of 0.0002, 100 steps should move a weight by 0.0200 on "
            f"average. They moved it by {moved:.4f}.",
        )
    ends = Run(Weights(before, 1.0), [(before, before)], 0.01, 50.0).weights.mean().item()
    if abs(ends - 0.74) > 0.002:
        fail(
            "shrinks-the-update",
            f"A weight of 1.5 loses half of itself by decay, and Adam takes 0.01: 0.740 should be left on average, and "
            f"{ends:.3f} is. Decay takes its part of the weight, and not of what Adam adds.",
        )


class Case(NamedTuple):
    rate: float
    decay: float
    steps: int
    slope: float
    largest: float
    seed: int


def draw(random: Random) -> list[Case]:
    """slope: of the loss, the same for all weights, which are between 0 and `largest`."""
    ways = itertools.product((1e-4, 1e-2), (0.0, 0.1, 5.0), (0.0, 1e-6, 1.0))
    rows = deal(random, ways, [19, 60], [1.0, 100.0])
    return [Case(rate, decay, steps, slope, largest, seed) for rate, decay, slope, steps, largest, seed in rows]


def result(case: Case) -> Any:
    """Not the weights themselves, since there are many right ways to draw. Their mean has little luck in it."""
    before = torch.rand(20_000, generator=torch.Generator().manual_seed(case.seed)) * case.largest
    given = Weights(before, case.slope), [(before, before)] * case.steps, case.rate, case.decay, case.seed
    (run,), meters = metered(1, lambda _: Run(*given))
    few = Weights(before[:2000], case.slope), [(before, before)] * 3, case.rate, case.decay
    one, other = (Run(*few, case.seed + i).weights for i in range(2))
    left = run.weights.double().mean().item() / before.bfloat16().double().mean().item()
    return {
        "mean weight, of what it was": left,
        "losses": len(run.losses),
        "with a generator of another seed the weights are the same": one.equal(other),
        **meters,
    }


def tolerance(case: Case) -> float:
    """Of 20,000 weights, each a few hundredths of itself away from the exact number."""
    return 5e-3
