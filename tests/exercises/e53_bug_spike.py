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
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import Diagnosis, fail, lent, ranks, recognise, wrong
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
    wrong("rank-0-decides", *BUGGY),
    wrong("a-rank-skips-alone", (AGREE, "spike")),
    wrong("last-rank-decides", (AGREE, "broadcast(torch.tensor(int(spike)), comm, root=comm.size - 1)"),
          says="one-rank-decides"),
    wrong("all-must-agree", (AGREE, 'all_reduce(torch.tensor(int(spike)), comm, "min")')),
    wrong("mean-hides-it", ("        spike =", '        everywhere = all_reduce(loss.detach(), comm, "mean")\n'
          "        spike ="), (SPIKE, SPIKE.replace("loss.", "everywhere.")), (AGREE, "spike")),
    wrong("nan-passes", ("not loss.isfinite() or ", "")),
    wrong("remembers-the-spike", (SKIP, SKIP.replace("            continue", KEEP.replace("  kept", "      kept")
          + "            continue"))),
    wrong("sum-of-gradients", ('parameter.grad, comm, "mean"', 'parameter.grad, comm, "sum"')),
]  # fmt: skip
STEPS, SPOILT, TIMES, FACTOR = 40, 12, -50.0, 4.0
RATE, EPS = 0.2, 1.0  # with a small eps Adam would hide a gradient that is only too large


class Model(nn.Module):
    """Fits a plane. It notes its losses, and the parameters before each step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.plane = nn.Linear(2, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.plane.weight)
        self.losses: list[float] = []
        self.before: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.plane(x), y)
        self.losses.append(loss.item())
        self.before.append(parameters_to_vector(self.parameters()).detach().clone())
        return loss


class Run(NamedTuple):
    """Of a rank. before: the parameters before each step; after: at the end."""

    left_out: list[int]
    losses: list[float]
    before: list[torch.Tensor]
    after: torch.Tensor

    def stood(self) -> bool:
        """Whether the spoilt step left the parameters where they were."""
        return self.before[SPOILT].equal(self.before[SPOILT + 1])


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


def train(comm, batches, factor, dtype):
    model = lent(Model(dtype))
    if comm.rank:
        nn.init.ones_(model.plane.weight)  # all begin with rank 0's
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
    left_out = bug_spike.train_without_spikes(model, optimizer, iter(batches[comm.rank]), factor, comm)
    return Run(left_out, model.losses, model.before, parameters_to_vector(model.parameters()).detach())


def run(batches: list[Any], factor: float = FACTOR, dtype: torch.dtype = torch.float32) -> list[Run]:
    """Of each rank. A `Diagnosis` if they no longer fit together."""
    try:
        return ranks(len(batches), train, batches, factor, dtype)
    except Diagnosis as diagnosis:
        if diagnosis.name in ("deadlock", "mismatch"):
            fail(
                "a-rank-skips-alone",
                "In a run with a spike on one rank the ranks no longer fit together: that rank left the step out, and "
                "the others wait for its gradient. All must decide the same, before the first collective of the step.",
            )
        raise


def on_one_process(batches: list[Any], left_out: list[int], times: int = 1) -> tuple[list[float], torch.Tensor]:
    """With the whole batch, and without the steps that are left out: the losses, and the parameters.

    times: how many times too large the gradient is.
    """
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
    for step, parts in enumerate(zip(*batches)):
        if step not in left_out:
            optimizer.zero_grad()
            (model(*(torch.cat(both) for both in zip(*parts))) * times).backward()
            optimizer.step()
    return model.losses, parameters_to_vector(model.parameters()).detach()


def check() -> None:
    calm = data(2, STEPS, {})
    sums = (
        on_one_process(calm, [], times=2)[1],
        "The gradients of 2 ranks were added up. The step is that of their mean.",
    )
    for rank, of_rank in enumerate(run(calm)):
        recognise(
            of_rank.after,
            on_one_process(calm, [])[1],
            {"sum-of-gradients": sums},
            f"Without a spike: the parameters of rank {rank}, against one process with the whole batch",
            1e-4,
        )
    first, second, both = (
        run(data(2, STEPS, {(SPOILT, rank): TIMES for rank in spoilt})) for spoilt in ([0], [1], [0, 1])
    )
    who_decides(first, second, both)
    batches = data(4, STEPS, {(SPOILT, 2): 2.5})
    small = run(batches)
    if small[0].left_out != [SPOILT]:
        own, usual = small[2].losses[SPOILT], median(small[2].losses[:SPOILT])
        of_all = sum(of.losses[SPOILT] for of in small) / len(small)
        fail(
            "mean-hides-it",
            f"On 4 ranks the loss of rank 2 was {own:.1f} in step {SPOILT}, and its usual loss is {usual:.1f}: a "
            f"spike. The mean over the ranks was {of_all:.1f}, and the step was taken. One rank's spike is enough.",
        )
    recognise(
        small[0].after,
        on_one_process(batches, [SPOILT])[1],
        {},
        f"The parameters of a run on 4 ranks, against one process that leaves out step {SPOILT}",
        1e-4,
    )
    if not bool(run(data(2, STEPS, {(2, 1): math.nan}))[0].after.isfinite().all()):
        fail(
            "nan-passes",
            "In step 2 the loss of rank 1 is NaN, and the parameters are NaN afterwards: it is a spike, "
            "however few losses were before. (NaN is never larger than anything.)",
        )
    ill = list(range(SPOILT, SPOILT + 16))
    found = run(data(2, STEPS, {(step, 1): TIMES for step in ill}))[0].left_out
    if found != ill:
        fail(
            "remembers-the-spike",
            f"From step {ill[0]} to {ill[-1]} the targets of rank 1 are multiplied by {TIMES:g}, and "
            f"{len(set(ill) - set(found))} of these steps were taken. The loss of a step that is left out must not "
            "count for what is usual, or a spike becomes usual.",
        )


def who_decides(first: list[Run], second: list[Run], both: list[Run]) -> None:
    """Runs on 2 ranks, in which step 12 is spoilt on rank 0; on rank 1; on both."""
    twin, _ = on_one_process(data(2, STEPS, {(SPOILT, 1): TIMES}), [SPOILT])
    late = [mean(losses[-10:]) for losses in (twin, *(of.losses for of in second))]
    said = (
        f"{fell(second[0].losses)} on rank 0 in {STEPS} steps, and the ranks end alike. But in step {SPOILT} the "
        f"targets of rank 1 are multiplied by {TIMES:g}: its loss is {second[1].losses[SPOILT]:,.0f}, while rank "
        f"0's is {second[0].losses[SPOILT]:.1f}. Over the last 10 steps the mean loss is {mean(late[1:]):.2f}. On "
        f"one process that leaves this step out it is {late[0]:.2f}"
    )
    found = [runs[0].left_out for runs in (first, second, both)]
    if found == [[SPOILT], [], [SPOILT]] and not second[0].stood():
        fail(
            "rank-0-decides",
            f"{said}. Here no step was left out. If rank 0's targets are the spoilt ones, step {SPOILT} is left out.",
        )
    if found == [[], [SPOILT], [SPOILT]] and second[1].left_out == [SPOILT]:
        fail(
            "one-rank-decides",
            f"Now a spike on rank 1 is left out. But if rank 0's loss is the spike, "
            f"{first[0].losses[SPOILT]:,.0f}, no step is left out.",
        )
    if found == [[], [], [SPOILT]]:
        fail("all-must-agree", f"{said}. Here the step is left out only if both ranks have a spike. One is enough.")
    for words, runs in (("on rank 0", first), ("on rank 1", second), ("on both ranks", both)):
        if [of.left_out for of in runs] != [[SPOILT]] * 2:
            if runs[0].stood():
                fail(
                    "reports-its-own",
                    f"Step {SPOILT}, with a spike {words}, was left out. Returned are "
                    f"{runs[0].left_out} on rank 0 and {runs[1].left_out} on rank 1.",
                )
            fail(
                "values",
                f"With a spike {words} in step {SPOILT} alone, rank 0 says that {len(runs[0].left_out)} steps were "
                f"left out, the first being {runs[0].left_out[:1] or 'none'}.",
            )
        if not runs[0].stood():
            fail(
                "leaves-a-trace",
                f"Step {SPOILT}, with a spike {words}, is in the list of what was left out. But the parameters "
                f"moved by {float((runs[0].before[SPOILT + 1] - runs[0].before[SPOILT]).norm()):.3f} in it: no rank "
                "may step.",
            )


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
    "between": it is one."""
    ways = itertools.product((1, 2, 3, 4), ("no", "small", "large", "NaN", "infinite", "twice"))
    rows = deal(random, ways, [3.0, 10.0], [8, 14], [torch.float32, torch.float64])
    long, half = Case(2, "first large", 20.0, 200, torch.float32, 1), Case(2, "half large", 3.0, 8, torch.float32, 4)
    rest = [Case(6, "large", 10.0, 8, torch.float32, 1), long, half, half._replace(spoilt="between")]
    return [*map(Case._make, rows), *rest]


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
    if case.spoilt == "between":
        spoilt = {(step, rank): 5.0 if step == 6 else 3.0 for step in (0, 1, 2, 6) for rank in range(case.ranks)}
    batches = data(case.ranks, case.steps, spoilt, case.dtype, case.seed)

    def on_rank(comm: Any) -> dict[str, Any]:
        of = train(comm, batches, case.factor, case.dtype)
        return {"left out": of.left_out, "parameters": of.after}

    runs, meters = metered(case.ranks, on_rank)
    return by_rank(runs) | meters


def tolerance(case: Case) -> float:
    return 1e-4 if case.dtype == torch.float32 else 1e-9
