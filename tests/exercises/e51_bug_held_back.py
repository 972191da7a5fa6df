"""Find the bug. The function below accumulates gradients on several ranks. The micro-batches of a window have equally
many targets, so each loss may be divided by their number. To save messages, gradients are sent once in a window, as
with no_sync. It runs, and its loss falls. Yet after some steps the ranks no longer hold one model.

This happened to FunASR, a toolkit for speech recognition, until August 2026, with PyTorch's DDP. A reviewer ran the old
code and the new one on two ranks, and compared the gradients of a step. The first case of the check repeats it: with
gradients, divided by the window, of 1 and 2 on rank 0, and of 3 and 5 on rank 1, both ranks must step with
(1 + 2 + 3 + 5) / 2 = 5.5.

    the report, and its correction   https://github.com/modelscope/FunASR/pull/3472

What was made smaller: the all-reduce is written by hand, in place of DDP and its no_sync, and FunASR's loop is spread
over three functions. The first model is a single number. The reviewer's model is not in the report.

Predict before you look: does rank 0's loss fall? Which micro-batches, of which ranks, are in a step of rank 0? What
would you measure to see that something is wrong? And with which window would you see nothing?

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
from tests.exercises.tasks import bug_held_back

PLAN = [
    "What must hold: a step is that of one process which has the window's micro-batches of all ranks in one batch. "
    "After it all ranks hold the same parameters.",
    "Gradients are sent once in a window, and not with each micro-batch.",
    "A window may be a single micro-batch. A rest that fills no window makes no step. A gradient that is there before "
    "the call counts for nothing.",
    "What is returned is the mean loss of each window, over all ranks: the number that one process would log.",
]
HINTS = [
    "Take a window of 3, and write down for each of the three micro-batches: does it send, does it step?",
    "An all-reduce averages what is in .grad at that moment. What comes into .grad after it stays this rank's own.",
    "The optimizer steps with the micro-batch whose number + 1 is a multiple of the window: the numbers begin with 0. "
    "The gradients must be sent with the same one, before the step.",
]
AFTER = (
    "FunASR entered no_sync for all micro-batches but the first of a window, and stepped after the last. The "
    "correction is a + 1 in one condition; with a window of 1 both are the same. DDP never compares the replicas, and "
    "each rank's own loss falls, so nothing is to be seen but the drift. On shards even that is missing: each chunk "
    "comes from one rank, so the ranks would agree, and be wrong. Read next: "
    "minizero/engines/any_model/guards/no_sync.py, which raises an error if an optimizer steps while gradients "
    "are held back."
)
TAKEAWAY = (
    "Held-back gradients are sent with the last micro-batch of a window: sent with the first, each rank steps with its "
    "own, every loss falls, and the replicas drift apart."
)
BUGGY = (
    (
        "        if (number + 1) % window == 0:\n            for parameter",
        "        if number % window == 0:\n            for parameter",
    ),
    ("            optimizer.step()\n", "        if (number + 1) % window == 0:\n            optimizer.step()\n"),
)
LAST = "        if (number + 1) % window == 0:\n"
SEND = """            for parameter in model.parameters():
                assert parameter.grad is not None, "no gradient: was it stepped and cleared already?"
                parameter.grad = all_reduce(parameter.grad, comm, "mean")
"""
STEP = "            optimizer.step()\n"
BACKWARD = "        loss.backward()\n"
WRONG = [
    wrong("averages-the-first", "The gradients are sent with the first micro-batch of a window. What comes after it "
          "stays each rank's own: every loss falls, and the ranks drift apart.", *BUGGY),
    wrong("averages-nothing", "Each rank steps with its own sum: nothing was averaged.", (SEND, "")),
    wrong("steps-too-early", "The ranks agree, and are wrong: the step came after the first micro-batch, and the "
          "others wait for the next window.", (LAST, "        if number % window == 0:\n")),
    wrong("averages-the-last-alone", "Only the last micro-batch was averaged. All are in .grad, and must be sent "
          "together.",
          (BACKWARD,
           f"        before = [p.grad for p in model.parameters()]\n        optimizer.zero_grad()\n{BACKWARD}"),
          (LAST + SEND, f"{LAST}{SEND}        for p, gradient in "
           "zip(model.parameters(), before):\n            p.grad = p.grad if gradient is None else p.grad + gradient\n"
           f"{LAST}")),
    wrong("forgets-the-others", "This is the mean of the last micro-batches alone: the others were cleared.",
          (BACKWARD, f"        optimizer.zero_grad()\n{BACKWARD}")),
    wrong("not-divided", "The step is too long: a mean is missing, over the window or over the ranks.",
          ("model(x, y) / window", "model(x, y)")),
    wrong("sends-each-time", "The numbers are right, but gradients go out with each micro-batch: accumulation saves "
          "nothing.",
          (LAST + SEND, SEND.replace("            for", "        for").replace(
           "                assert", "            assert").replace("                parameter.grad =",
           "            parameter.grad =") + LAST)),
    wrong("averages-the-parameters", "With SGD all is well. But Adam divides each gradient by its usual size before it "
          "steps. So the mean of two steps is not the step of the mean: average gradients, before the step.",
          (SEND, ""), (STEP, STEP + """            for parameter in model.parameters():
                parameter.data = all_reduce(parameter.data, comm, "mean")
""")),
]  # fmt: skip


class One(nn.Module):
    """A model of one number, whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Model(nn.Module):
    """Two layers."""

    def __init__(self, width: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.to(self.first.weight.dtype), y.to(self.first.weight.dtype)
        return F.mse_loss(self.second(self.first(x).tanh()), y)


class Case(NamedTuple):
    ranks: int
    window: int
    rest: int
    optimizer: str
    gradient_before: bool
    dtype: torch.dtype
    seed: int


EXAMPLE = Case(2, 2, 0, "SGD", False, torch.float32, 0)


def draw(random: Random) -> list[Case]:
    """rest: micro-batches that fill no window, if the window has more than so many."""
    ways = [*itertools.product((1, 2, 3), (1, 2, 5)), (6, 2), (2, 40)]
    columns = [0, 1], ["SGD", "Adam"], [False, True], [torch.float32, torch.float64]
    return [
        EXAMPLE,
        EXAMPLE._replace(window=4, optimizer="Adam", seed=1),
        *map(Case._make, deal(random, ways, *columns)),
    ]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model: nn.Module = Model(4, generator, case.dtype)
    given = data(case.ranks, 3 * case.window + case.rest * (case.window > 1), 3, generator)
    if case == EXAMPLE:
        model, numbers = One(), torch.tensor([[2.0, 4.0], [6.0, 10.0]])
        given = [[(x, x) for x in rank] for rank in numbers]

    def train(comm: Any) -> dict[str, Any]:
        mine = lent(model)
        for parameter in mine.parameters():
            parameter.grad = torch.ones_like(parameter) if case.gradient_before else None
        stepper = getattr(torch.optim, case.optimizer)(mine.parameters(), lr=1.0 if case == EXAMPLE else 0.05)
        losses = bug_held_back.train_held_back(mine, stepper, iter(given[comm.rank]), case.window, comm)
        return {"parameters": parameters_to_vector(mine.parameters()).detach(), "losses": torch.tensor(losses)}

    runs, meters = metered(case.ranks, train)
    return by_rank(runs) | meters


def data(size: int, count: int, rows: int, generator: torch.Generator) -> list[list[Any]]:
    """For each rank its micro-batches. To be learnt: y = x₀ x₁ - x₂."""
    xs = torch.randn(size, count, rows, 3, generator=generator)
    return [[(x, (x[:, 0] * x[:, 1] - x[:, 2])[:, None]) for x in rank] for rank in xs]


def tolerance(case: Case) -> Tolerance:
    return {torch.float64: 1e-7, torch.float32: 1e-3}
