"""Find the bug. The function below accumulates gradients on several ranks. The micro-batches of a window have equally
many targets, so each loss may be divided by their number. To save messages, gradients are sent once in a window, as
with no_sync. It runs, and its loss falls. Yet after some steps the ranks no longer hold one model.

This happened to FunASR, a toolkit for speech recognition, until August 2026, with PyTorch's DDP. A reviewer ran the old
code and the new one on two ranks, and compared the gradients of a step. The check repeats these numbers.

    the report, and its correction   https://github.com/modelscope/FunASR/pull/3472

What was made smaller: the all-reduce is written by hand, in place of DDP and its no_sync, and FunASR's loop is spread
over three functions. The model of the check is a single number. The reviewer's model is not in the report.

Predict before you look: does rank 0's loss fall? Which micro-batches, of which ranks, are in a step of rank 0? What
would you measure to see that something is wrong? And with which window would you see nothing?

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
from tests.exercises.kit import Tolerance, fail, lent, ranks, recognise, wrong
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
    wrong("averages-the-first", *BUGGY),
    wrong("averages-nothing", (SEND, "")),
    wrong("steps-too-early", (LAST, "        if number % window == 0:\n")),
    wrong("counts-from-one", ("enumerate(micro_batches)", "enumerate(micro_batches, 1)"), says="steps-too-early"),
    wrong("averages-the-last-alone", (BACKWARD, "        before = [p.grad for p in model.parameters()]\n"
          f"        optimizer.zero_grad()\n{BACKWARD}"), (LAST + SEND, f"{LAST}{SEND}        for p, gradient in "
          "zip(model.parameters(), before):\n            p.grad = p.grad if gradient is None else p.grad + gradient\n"
          f"{LAST}")),
    wrong("forgets-the-others", (BACKWARD, f"        optimizer.zero_grad()\n{BACKWARD}")),
    wrong("not-divided", ("model(x, y) / window", "model(x, y)")),
    wrong("sums-over-ranks", ('all_reduce(parameter.grad, comm, "mean")', 'all_reduce(parameter.grad, comm, "sum")'),
          says="not-divided"),
    wrong("sends-each-time", (LAST + SEND, SEND.replace("            for", "        for").replace(
          "                assert", "            assert").replace("                parameter.grad =",
          "            parameter.grad =") + LAST)),
    wrong("averages-the-parameters", (SEND, ""), (STEP, STEP + """            for parameter in model.parameters():
                parameter.data = all_reduce(parameter.data, comm, "mean")
""")),
    wrong("steps-with-the-rest", ("    return losses", f"    if (number + 1) % window:\n{SEND}{STEP}"
          '            losses.append(all_reduce(total, comm, "mean").item())\n    return losses')),
    wrong("keeps-a-gradient", ("    optimizer.zero_grad()\n    for", "    for")),
    wrong("reports-its-own-loss", ('all_reduce(total, comm, "mean")', "total")),
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


def train(comm, model, micro_batches, window, optimizer, options, left_over=False):
    """Losses, parameters, and the bytes that this rank sent. left_over: there is a gradient before."""
    model = lent(model)
    if left_over:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = comm.bytes_sent
    stepper = optimizer(model.parameters(), **options)
    losses = bug_held_back.train_held_back(model, stepper, iter(micro_batches[comm.rank]), window, comm)
    return losses, parameters_to_vector(model.parameters()).detach(), comm.bytes_sent - before


def on_one_process(model, micro_batches, window, optimizer, options) -> tuple[list[float], torch.Tensor]:
    """Plain training, with a window of all ranks as one batch."""
    model, losses = copy.deepcopy(model), []
    stepper = optimizer(model.parameters(), **options)
    for start in range(0, len(micro_batches[0]) - window + 1, window):
        pairs = [pair for rank in micro_batches for pair in rank[start : start + window]]
        x, y = (torch.cat(parts) for parts in zip(*pairs))
        stepper.zero_grad()
        loss = model(x, y)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses, parameters_to_vector(model.parameters()).detach()


def with_averaged_parameters(model, micro_batches, window, optimizer, options) -> torch.Tensor:
    """The parameters if each rank steps by its own gradient, and the ranks then average what came out."""
    copies = [copy.deepcopy(model) for _ in micro_batches]
    steppers = [optimizer(each.parameters(), **options) for each in copies]
    for start in range(0, len(micro_batches[0]) - window + 1, window):
        for each, stepper, rank in zip(copies, steppers, micro_batches):
            stepper.zero_grad()
            each(*(torch.cat(parts) for parts in zip(*rank[start : start + window]))).backward()
            stepper.step()
        mean = torch.stack([parameters_to_vector(each.parameters()).detach() for each in copies]).mean(0)
        for each in copies:
            nn.utils.vector_to_parameters(mean.clone(), each.parameters())
    return mean


def data(size: int, count: int, rows: int, generator: torch.Generator) -> list[list[Any]]:
    """For each rank its micro-batches. To be learnt: y = x₀ x₁ - x₂."""
    xs = torch.randn(size, count, rows, 3, generator=generator)
    return [[(x, (x[:, 0] * x[:, 1] - x[:, 2])[:, None]) for x in rank] for rank in xs]


def with_which_gradient(before: str) -> None:
    """One step of two ranks with two micro-batches each, whose halves are 1 and 2, and 3 and 5."""
    given = [[(torch.tensor(x), torch.tensor(x)) for x in rank] for rank in ((2.0, 4.0), (6.0, 10.0))]
    runs = ranks(2, train, One(), given, 2, torch.optim.SGD, dict(lr=1.0))
    got = -torch.cat([parameters for _, parameters, _ in runs])
    said = (
        f"{before}. Take one step of two micro-batches on 2 ranks, with gradients, divided by the window, of 1 and 2 "
        f"on rank 0, and of 3 and 5 on rank 1. Rank 0 steps with {got[0]:.1f} and rank 1 with {got[1]:.1f}. Both "
        "should step with (1 + 2 + 3 + 5) / 2 = 5.5"
    )
    mistakes = {
        "averages-the-first": ((4, 7), f"{said}."),
        "averages-nothing": ((3, 8), f"{said}. Each steps with its own sum: nothing was averaged."),
        "steps-too-early": (
            (2, 2),
            f"{said}. The ranks agree now, and are wrong: the step came after the first micro-batch, and the second "
            "waits for the next window.",
        ),
        "averages-the-last-alone": (
            (4.5, 6.5),
            f"{said}. Only the second micro-batch was averaged. The first is in .grad, too, and must be sent with it.",
        ),
        "forgets-the-others": ((3.5, 3.5), f"{said}. This is the mean of the last micro-batches alone, 2 and 5."),
        "not-divided": ((11, 11), f"{said}. It is twice that: a mean is missing, over the window or over the ranks."),
    }
    recognise(got, torch.tensor([5.5, 5.5]), mistakes, said, tolerance=1e-5)


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model, given = Model(8, generator), data(2, 4 * 60, 4, generator)
    how = (4, torch.optim.Adam, dict(lr=0.02))
    (losses, got, sent), (_, other, _) = ranks(2, train, model, given, *how)
    want_losses, want = on_one_process(model, given, *how)
    if not isinstance(losses, list) or len(losses) not in (60, 61):
        fail("no-losses", "Expected the loss of each of the 60 windows.")
    apart = float((got - other).norm() / want.norm())
    drift = f"the parameters of the two ranks are {apart:.1%} of their length apart" if apart else "the ranks agree"
    with_which_gradient(f"{fell(losses)} in 60 steps, and in one process to {want_losses[-1]:.3f}. After them {drift}")
    averaged = with_averaged_parameters(model, given, *how)
    words = "The parameters after 60 steps of Adam, against one process with the whole batch"
    mistakes = {
        "averages-the-parameters": (
            averaged,
            "The ranks agree, and with SGD all is well. But Adam divides each gradient by its usual size before it "
            "steps. So the mean of two steps is not the step of the mean: average gradients, before the step.",
        )
    }
    recognise(got, want, mistakes, words, 1e-3)
    rings = 60 * 2 * sum(-(-p.numel() // 2) * 4 for p in model.parameters())
    if sent > rings + 60 * 32:
        fail(
            "sends-each-time",
            f"Rank 0 sent {sent:,} bytes in 60 windows of 4 micro-batches, where an all-reduce of the gradients in "
            f"each window takes {rings:,}. The numbers are right, but accumulation saves no message.",
        )
    if abs(losses[0] - want_losses[0]) > 1e-4:
        fail(
            "reports-its-own-loss", f"The first window's loss is {want_losses[0]:.4f}, and {losses[0]:.4f} is returned."
        )
    check_ends(model, given)


def check_ends(model: nn.Module, given: Any) -> None:
    """Six micro-batches are one window of 4 and a rest; and a gradient that was there before."""
    how = (4, torch.optim.SGD, dict(lr=0.1))
    few = [rank[:6] for rank in given]
    losses, got, _ = ranks(2, train, model, few, *how)[0]
    _, want = on_one_process(model, few, *how)
    if len(losses) != 1 or not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
        fail(
            "steps-with-the-rest",
            f"Six micro-batches in windows of 4: {len(losses)} losses came back, or the parameters are not those of "
            "one step. The last two fill no window, so they make no step.",
        )
    _, got, _ = ranks(2, train, model, few, *how, True)[0]
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
        fail("keeps-a-gradient", "A gradient that was in .grad before the call is in the first step.")


class Case(NamedTuple):
    ranks: int
    window: int
    rest: int
    optimizer: str
    gradient_before: bool
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    """rest: micro-batches that fill no window, if the window has more than so many."""
    ways = [*itertools.product((1, 2, 3), (1, 2, 5)), (6, 2), (2, 40)]
    columns = [0, 1], ["SGD", "Adam"], [False, True], [torch.float32, torch.float64]
    return [Case(*row) for row in deal(random, ways, *columns)]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model = Model(4, generator, case.dtype)
    given = data(case.ranks, 3 * case.window + case.rest * (case.window > 1), 3, generator)
    options = getattr(torch.optim, case.optimizer), dict(lr=0.05), case.gradient_before
    runs, meters = metered(case.ranks, lambda comm: train(comm, model, given, case.window, *options)[:2])
    return by_rank([{"losses": torch.tensor(losses), "parameters": each} for losses, each in runs]) | meters


def tolerance(case: Case) -> Tolerance:
    return {torch.float64: 1e-7, torch.float32: 1e-3}
