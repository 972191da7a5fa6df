"""Find the bug. The function below trains on several ranks. Now and then a batch is spoilt, such as a measurement in
the wrong unit, and its loss is a spike. Then the step shall be left out. The function runs, its loss falls, and all
ranks hold the same parameters, bit for bit. Yet there are spikes whose step is taken.

WeatherGenerator, a model of the atmosphere that ECMWF and others train, had this until August 2026. A spike
that was not left out went "straight into the all-reduce". The log of spikes did not have it, either.

    the issue               https://github.com/ecmwf/WeatherGenerator/issues/2724
    its correction          https://github.com/ecmwf/WeatherGenerator/pull/2718
    what it was to protect  https://github.com/ecmwf/WeatherGenerator/pull/2356

What was made smaller: the model, which fits a plane, and the precision. WeatherGenerator trains with a loss scaler,
which refused a step with NaN, without a word in the log; here is none. The rule for a spike is theirs, in fewer words.

Predict before you look: 40 steps on 2 ranks, and in step 12 the targets of one rank are multiplied by -50. Is the step
left out if it is rank 0's? And if it is rank 1's?

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
from tests.exercises.tasks import bug_spike

PLAN = [
    "What must hold: if the loss of any rank is a spike, no rank takes the step. The list that is returned is the same "
    "on all ranks.",
    "Each rank compares its own loss with its own usual loss. NaN and infinity are spikes from the first step on.",
    "A step that is left out leaves no trace: not in the parameters, not in Adam's moments, not in the usual loss.",
    "Without a spike, a run is that of one process with the whole batch. All ranks make the same calls in each step.",
]
HINTS = [
    "Which ranks see the spoilt examples? Which ranks use the gradient that is made of them?",
    "A gradient that went into an all-reduce is on all ranks. So whose loss must the decision know, and who must know "
    "the decision?",
    'Each rank has 0 or 1. all_reduce(…, comm, "max") is 1 on all ranks if it is 1 on one of them. broadcast sends '
    "what rank 0 has.",
]
AFTER = (
    "WeatherGenerator's correction is your line: every rank checks its own loss, and the flags are combined with "
    "an all-reduce MAX. A loss scaler needs the same: if a rank skips a step for an overflow that only it saw, the "
    "ranks part; so precision.DynamicLossScaler takes `combine=`. In metaseq, which trained OPT, a test drew "
    "such spikes at random, and each worker left out other steps (its pull request 521). The rule behind all of "
    "them: whatever decides if a rank goes on is either computed from the same numbers everywhere, or agreed on. "
    "Read next: `found_inf` in precision/scaling.py, and section 2 of notebooks/04_mixed_precision.ipynb."
)
TAKEAWAY = (
    "A loss belongs to one rank, its gradient to all: whoever skips a step must ask every rank, and tell every rank."
)
BUGGY = (('all_reduce(torch.tensor(int(spike)), comm, "max")', "broadcast(torch.tensor(int(spike)), comm)"),)
AGREE = BUGGY[0][0]
SPIKE = "not loss.isfinite() or len(kept) >= 5 and loss.item() > factor * median(kept)"
SKIP = "            left_out.append(step)\n            continue\n"
KEEP = "        kept.append(loss.item())\n"
WRONG = [
    wrong("rank-0-decides", "A spike on another rank than 0 is not left out. Its gradient is on all ranks, so each "
          "rank's loss must be asked.", *BUGGY),
    wrong("a-rank-skips-alone", "In a run with a spike on one rank the ranks no longer fit together: that rank left "
          "the step out, and the others wait for its gradient. All must decide the same, before the first collective "
          "of the step.", (AGREE, "spike")),
    wrong("usual-for-all", "The usual loss is the mean of all ranks' losses, so a rank with small ones has no spike. "
          "Each rank compares its own loss with its own usual loss.",
          (KEEP, '        kept.append(all_reduce(loss.detach(), comm, "mean").item())\n')),
    wrong("all-must-agree", "The step is left out only if several ranks have a spike: one is enough.",
          (AGREE, 'all_reduce(torch.tensor(int(spike)), comm, "min")')),
    wrong("mean-hides-it", "The mean of the losses hides the spike of one rank: one rank's spike is enough.",
          ("        spike =", '        everywhere = all_reduce(loss.detach(), comm, "mean")\n        spike ='),
          (SPIKE, SPIKE.replace("loss.", "everywhere.")), (AGREE, "spike")),
    wrong("nan-passes", "A loss of NaN or infinity is a spike from the first step on. (NaN is never larger than "
          "anything.)", ("not loss.isfinite() or ", "")),
    wrong("remembers-the-spike", "The loss of a step that is left out counts for what is usual, so a spike becomes "
          "usual.",
          (SKIP, SKIP.replace("            continue", KEEP.replace("  kept", "      kept") + "            continue"))),
    wrong("sum-of-gradients", "The gradients of the ranks were added up: the step is that of their mean.",
          ('parameter.grad, comm, "mean"', 'parameter.grad, comm, "sum"')),
]  # fmt: skip
RATE, EPS = 0.2, 1.0  # with a small eps Adam would hide a gradient that is only too large


class Model(nn.Module):
    """Fits a plane."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.plane = nn.Linear(2, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.plane.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.plane(x), y)
        return loss


def data(
    size: int, steps: int, spoilt: dict[tuple[int, int], float], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[list[Any]]:
    """Of each rank its batches. spoilt: {(step, rank): what its targets are multiplied by}.

    To be learnt: y = 3 x₀ - 2 x₁, with noise, so that the usual loss does not fall to 0.
    """
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[Any]] = [[] for _ in range(size)]
    for step, rank in itertools.product(range(steps), range(size)):
        x, noise = (torch.randn(16, n, generator=generator).to(dtype) for n in (2, 1))
        y = 3 * x[:, :1] - 2 * x[:, 1:] + noise
        batches[rank].append((x, y * spoilt.get((step, rank), 1.0)))
    return batches


class Case(NamedTuple):
    ranks: int
    spoilt: str
    factor: float
    steps: int
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    """spoilt: what happens to a rank in a step, both drawn; "twice": to two of them; "first large": in the first 110
    steps the losses are large, and one at the end is no spike, next to these;
    "half large": so many that the usual loss is between the large and the small ones, and a large one no spike.
    "between": it is one; "uneven": a rank has large losses, and another one's spike is none beside these; "early":
    there is no usual loss in step 4, and there is one in step 5."""
    ways = itertools.product((1, 2, 3, 4), ("no", "small", "large", "NaN", "infinite", "twice"))
    rows = deal(random, ways, [3.0, 10.0], [8, 14], [torch.float32, torch.float64])
    long, half = Case(2, "first large", 20.0, 200, torch.float32, 1), Case(2, "half large", 3.0, 8, torch.float32, 4)
    rest = [Case(6, "large", 10.0, 8, torch.float32, 1), long, half, half._replace(spoilt="between")]
    rest += [half._replace(spoilt="uneven")]
    rest += [Case(2, "for long", 4.0, 40, torch.float32, 1), Case(4, "small", 4.0, 40, torch.float32, 4)]
    plain = [Case(n, "large", 4.0, 12, torch.float32, seed) for n, seed in ((2, 5), (2, 6))]  # rank 1, rank 0
    return [*plain, half._replace(spoilt="early"), *map(Case._make, rows), *rest]


def result(case: Case) -> Any:
    random = Random(case.seed)
    times = {"small": 2.5, "large": -40.0, "NaN": math.nan, "infinite": math.inf, "twice": -40.0}.get(case.spoilt, 1.0)
    places = [(random.randrange(case.steps), random.randrange(case.ranks)) for _ in range(2)]
    spoilt = dict.fromkeys(places[: 2 if case.spoilt == "twice" else 1], times)
    if case.spoilt == "first large":
        hot = {(step, rank): 3.0 for step in range(110) for rank in range(case.ranks)}
        spoilt = hot | {(case.steps - 2, rank): 3.5 for rank in range(case.ranks)}
    if case.spoilt == "half large":
        spoilt = dict.fromkeys(itertools.product((0, 1, 2, 6), range(case.ranks)), 3.0)
    if case.spoilt == "for long":
        spoilt = {(step, case.ranks - 1): -50.0 for step in range(12, 28)}
    if case.spoilt == "between":
        spoilt = {(step, rank): 5.0 if step == 6 else 3.0 for step in (0, 1, 2, 6) for rank in range(case.ranks)}
    if case.spoilt == "uneven":
        spoilt = {(step, 1): 3.0 for step in range(8)} | {(6, 0): 3.0}
    if case.spoilt == "early":
        spoilt = dict.fromkeys([(4, 0), (5, 0), (5, 1)], -40.0)
    batches = data(case.ranks, case.steps, spoilt, case.dtype, case.seed)

    def on_rank(comm: Any) -> dict[str, Any]:
        model = lent(Model(case.dtype))
        if comm.rank:
            nn.init.ones_(model.plane.weight)  # all begin with rank 0's
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
        left_out = bug_spike.train_without_spikes(model, optimizer, iter(batches[comm.rank]), case.factor, comm)
        return {"left out": left_out, "parameters": parameters_to_vector(model.parameters()).detach()}

    runs, meters = metered(case.ranks, on_rank, slack=6000)  # whatever finds the median
    return by_rank(runs) | meters


def tolerance(case: Case) -> float:
    return 1e-4 if case.dtype == torch.float32 else 1e-9
