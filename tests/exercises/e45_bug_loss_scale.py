"""Find the bug. The function below trains in FP16, with a loss scaler, and clips the gradient. It runs, its loss falls,
and its log is right: the losses and the norms in it are the true ones. Yet what it does to the gradients has little to
do with max_norm.

PyTorch Lightning had this until the autumn of 2021. One user saw that "the loss converged very slow". Others found that
GPTs learnt much worse in 16 bits than in 32, or that the norm after clipping to 1 was "super small". The same was
reported for PyTorch's own example of minGPT.

    three issues            https://github.com/Lightning-AI/pytorch-lightning/issues/9330, …/9599 and …/9694
    its correction          https://github.com/Lightning-AI/pytorch-lightning/pull/9606
    PyTorch's example       https://github.com/pytorch/examples/issues/1196

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from precision.scaling import DynamicLossScaler, StaticLossScaler
from tests.exercises.draws import deal
from tests.exercises.kit import lent, wrong
from tests.exercises.rank_kit import metered
from tests.exercises.tasks import bug_loss_scale

PLAN = [
    "What must hold: but for rounding, a run is the same with any scale. The scale is there against underflow only.",
    "What the optimizer gets has at most the norm max_norm, and is the gradient itself if that is short enough. "
    "A gradient that is there before the call counts for nothing.",
    "The log shows the loss and the norm of its gradient: as large as they are without a scale.",
    "A step whose gradient has inf or NaN changes no parameter, and the scaler hears of it.",
]
HINTS = [
    "The gradient of loss · s is s times the gradient. What does clipping compare with max_norm, and what is left of "
    "max_norm when the scaler has divided?",
    "A scaler divides the gradients once for each step: in step(), if nobody asked for it before.",
    "scaler.unscale_(optimizer) divides at once. step() then knows that it was done. Exercise 25 is that function.",
]
AFTER = (
    "PyTorch's torch.amp.GradScaler has the same four calls, and the same order is right there: scale, unscale_, "
    "clip, step. Lightning clipped in a hook that came before the one that unscaled, and its correction moved the "
    "hook. With SGD a run nearly stands still; Adam divides by the usual size of a gradient, so it learns on, with "
    "all gradients of one length. Accumulation has the same trap: unscale_ comes after the last micro-batch, since "
    "those before it still have the scale. In BF16 there is no scaler, and so no such bug. Read next: "
    "precision/scaling.py, whose step() and unscale_() refuse to be called in another order."
)
TAKEAWAY = (
    "Whatever compares a gradient with a number comes after the scale is taken out: "
    "first unscale, then clip, then step."
)
BUGGY = (
    ("        scaler.unscale_(optimizer)\n", ""),
    ("max_norm)\n        scaler", "max_norm) / scaler.get_scale()\n        scaler"),
)
UNSCALE = "        scaler.unscale_(optimizer)\n"
WRONG = [
    wrong("clips-what-is-scaled", "The gradients are still multiplied by the scale when they are clipped, so all of "
          "them are cut: unscale first.", *BUGGY),
    wrong("divides-twice", "The scale was taken out of the gradients twice: the scaler does not know that you "
          "divided.", (UNSCALE, "        for p in model.parameters():\n            p.grad /= scaler.get_scale()\n")),
    wrong("does-not-clip", "A gradient that is too long was not clipped before the step.",
          ("model.parameters(), max_norm)", "model.parameters(), float('inf'))")),
    wrong("steps-past-the-scaler", "A gradient overflowed in FP16, and the optimizer stepped with it: only the scaler "
          "knows that it must not.",
          ("        scaler.step(optimizer)\n        scaler.update()\n",
           "        optimizer.step()\n        scaler.update()\n")),
    wrong("drops-the-scale", "The loss is not scaled. Gradients of about 1e-8 are 0 in FP16, and the scale is there to "
          "save them.", ("scaler.scale(loss).backward()", "scaler.scale(loss)\n        loss.backward()"), (UNSCALE, ""),
          ("scaler.step(optimizer)", "optimizer.step()"), ("        scaler.update()\n", "")),
    wrong("never-updates", "The scale never changes: the scaler must hear of each step.",
          ("        scaler.update()\n", "        scaler._progress.clear()\n")),
    wrong("logs-a-norm-too-small", "The norm in the log was divided by the scale once more.",
          ("norm.item()))", "norm.item() / scaler.get_scale()))")),
    wrong("logs-the-scaled-loss", "The loss in the log is the scaled one.",
          ("log.append((loss.item()", "log.append((scaler.scale(loss).item()")),
]  # fmt: skip
RATE = 0.02


class Model(nn.Module):
    """Two layers, whose products are in FP16. weight: of the loss; a small one makes small gradients."""

    def __init__(self, generator: torch.Generator, weight: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 8, generator=generator))
        self.second = nn.Parameter(torch.randn(8, 1, generator=generator))
        self.weight = weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = (x.half() @ self.first.half()).tanh() @ self.second.half()
        return F.mse_loss(out.float(), y) * self.weight


def data(steps: int, generator: torch.Generator) -> list[Any]:
    """Batches of which every third one has much larger gradients."""
    xs = [torch.randn(16, 3, generator=generator) for _ in range(steps)]
    return [(x, x.sum(1, keepdim=True) * (1 if step % 3 else 4)) for step, x in enumerate(xs)]


class Run:
    """The answer's training: log, parameters, the norms that reached the optimizer, and the scale at the end."""

    def __init__(self, model: nn.Module, batches: Any, max_norm: float, scale: float, interval: int):
        model = lent(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # it counts for nothing
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = torch.optim.Adam(groups, lr=RATE)
        growing = DynamicLossScaler(init_scale=scale, growth_interval=interval or 1)
        scaler = growing if interval else StaticLossScaler(scale)
        self.norms: list[float] = []

        def watch(*_: Any) -> None:
            self.norms.append(float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))

        optimizer.register_step_pre_hook(watch)
        self.log = bug_loss_scale.train_scaled(model, optimizer, scaler, iter(batches), max_norm)
        self.parameters = torch.cat([p.detach().view(-1) for p in model.parameters()])
        self.scale = scaler.get_scale()


class Case(NamedTuple):
    scale: float
    interval: int
    max_norm: float
    steps: int
    spoilt: bool
    seed: int
    weight: float = 1.0


def draw(random: Random) -> list[Case]:
    """interval: after so many updates the scale grows; with 0 it stays. spoilt: the gradient of one step has inf.
    weight: of the loss; a small one makes gradients that are 0 in FP16 without a scale."""
    ways = itertools.product((1.0, 64.0, 4096.0), (0, 2, 2000), (0.1, 10.0, 1000.0))
    plain = [Case(1024.0, 2000, 10.0, 3, False, 0), Case(2.0**24, 2000, 2.0, 5, False, 0, 2.0**-26)]
    return plain + [Case(*row) for row in deal(random, ways, [2, 5, 10], [False, True])]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model, batches = Model(generator, case.weight), data(case.steps, generator)
    if case.spoilt:
        place = case.seed % case.steps
        batches[place] = batches[place][0], batches[place][1] + torch.inf
    (run,), meters = metered(1, lambda _: Run(model, batches, case.max_norm, case.scale, case.interval))
    return {"log": run.log, "parameters": run.parameters, "scale": run.scale, "steps": len(run.norms), **meters}


def tolerance(case: Case) -> float:
    """An answer may clip to max_norm · scale, and then unscale. PyTorch's 1e-6 counts less there, and sometimes a
    weight rounds the other way in FP16."""
    return 4e-3
