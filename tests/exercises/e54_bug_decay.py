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

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, lent, wrong
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
    wrong("decays-in-bf16", "Weights whose gradient is 0 lose nothing: if 0.1 % is left out, or rounded to the "
          "nearest, nothing is left of it, because BF16's neighbours are 0.4 to 0.8 % of a weight apart.", *BUGGY),
    wrong("shrinks-the-update", "Decay takes its part of the weight, and not of what Adam adds.",
          (EXACT, "            exact = (weight.detach().float() - update) * (1 - rate * decay)\n")),
    wrong("weights-in-fp32", "There are weights in FP32, 4 bytes each. They must stay BF16.",
          (EXACT, "            weight.data = weight.data.float() * (1 - rate * decay)\n"
           "            exact = weight.detach() - update\n")),
    wrong("rounds-to-nearest", "Neither decay nor a small step moves a weight: rounded to the nearest BF16 number, "
          "each of them is lost. `stochastic` rounds so that the mean stays.", (ROUND, "exact.bfloat16()")),
    wrong("rounds-one-way", "BF16's step is larger than what decay takes, and each weight took one in every step: "
          "round up as well.", (ROUND, "(exact.view(torch.int32) & -(2**16)).view(torch.float32)")),
    wrong("the-same-draws", "Some weights lost much and some nothing: each has the same luck in every step. Draw "
          "anew.", (ROUND, "stochastic(exact, torch.Generator().manual_seed(0))")),
    wrong("decays-the-gradient", "Adam divides a gradient by its size, so a decay inside the gradient loses its own. "
          "AdamW takes it from the weight.", (EXACT, EXACT.replace(" * (1 - rate * decay)", "")),
          ("        for weight, gradient, (mean", "        gradients = [g.float() + decay * w.detach().float() for g, "
           "w in zip(gradients, weights)]\n        for weight, gradient, (mean")),
    wrong("decays-at-the-end", "Half-way the weights have lost nothing. Each step takes its part: the next loss "
          "depends on it.", (EXACT, EXACT.replace(" * (1 - rate * decay)", "")), ("    return losses",
           "    for weight in weights:\n        weight.data.copy_(stochastic(weight.detach().float() * (1 - rate * "
           "decay) ** step, generator))\n    return losses")),
]  # fmt: skip


class Weights(nn.Module):
    """Its loss is slope · Σ w: with slope 0, nothing but decay moves it."""

    def __init__(self, values: torch.Tensor, slope: float) -> None:
        super().__init__()
        self.values, self.slope = nn.Parameter(values.bfloat16()), slope
        self.means: list[float] = []  # before each step

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        self.means.append(self.values.detach().float().mean().item())
        return (self.values.float() * self.slope).sum()


class Run:
    """The answer's losses; and the weights at its end, in FP32."""

    def __init__(self, model: nn.Module, batches: Any, rate: float, decay: float, seed: int = 0) -> None:
        self.model = lent(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses = bug_decay.train_in_bf16(self.model, iter(batches), rate, decay, self.generator)
        self.weights = parameters_to_vector(self.model.parameters()).detach().float()


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
    plain = [Case(0.002, 0.5, 60, 0.0, 1.0, 0), Case(0.0001, 0.0, 60, 1.0, 1.0, 0)]
    return plain + [Case(rate, decay, steps, slope, largest, seed) for rate, decay, slope, steps, largest, seed in rows]


def result(case: Case) -> Any:
    """Not the weights themselves, since there are many right ways to draw. Their mean has little luck in it."""
    before = torch.rand(20_000, generator=torch.Generator().manual_seed(case.seed)) * case.largest
    given = Weights(before, case.slope), [(before, before)] * case.steps, case.rate, case.decay, case.seed
    (run,), meters = metered(1, lambda _: Run(*given))
    few = Weights(before[:2000], case.slope), [(before, before)] * 3, case.rate, case.decay
    one, other = (Run(*few, case.seed + i).weights for i in range(2))
    mean, large = before.bfloat16().double().mean().item(), before > before.median()
    left = [part.double().mean().item() / mean for part in (run.weights, run.weights[large], run.weights[~large])]
    spread = (run.weights - before)[large].std().item() / mean
    return {
        "mean weight, of what it was": left[0],
        "mean of those that were large, and small": left[1:],
        "mean weight half-way": run.model.means[case.steps // 2] / mean,  # type: ignore[operator]
        "how far apart their luck is": AtMost(spread + 0.02, 1.5),
        "losses": len(run.losses),
        "dtypes of the weights": [weight.dtype for weight in run.model.parameters()],
        "with a generator of another seed the weights are the same": one.equal(other),
        **meters,
    }


def tolerance(case: Case) -> float:
    """Of 20,000 weights, each a few hundredths of itself away from the exact number."""
    return 5e-3
