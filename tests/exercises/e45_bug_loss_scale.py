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

import copy
import itertools
import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from precision.scaling import DynamicLossScaler, StaticLossScaler
from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import fail, lent, recognise, wrong
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
CLIP = "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
UNSCALE = "        scaler.unscale_(optimizer)\n"
WRONG = [
    wrong("clips-what-is-scaled", *BUGGY),
    wrong("unscales-too-late", (UNSCALE + CLIP, CLIP + UNSCALE), says="clips-what-is-scaled"),
    wrong("divides-twice", (UNSCALE, "        for p in model.parameters():\n"
          "            p.grad /= scaler.get_scale()\n")),
    wrong("clips-after-the-step", (CLIP + "        scaler.step(optimizer)\n", "        scaler.step(optimizer)\n"
          + CLIP), says="does-not-clip"),
    wrong("does-not-clip", ("model.parameters(), max_norm)", "model.parameters(), float('inf'))")),
    wrong("clips-each-number", (CLIP, CLIP.replace("clip_grad_norm_", "get_total_norm").replace(
          "model.parameters(), max_norm", "[p.grad for p in model.parameters()]")
          + "        torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)\n"), says="does-not-clip"),
    wrong("steps-past-the-scaler", ("        scaler.step(optimizer)\n        scaler.update()\n",
                                    "        optimizer.step()\n        scaler.update()\n")),
    wrong("drops-the-scale", ("scaler.scale(loss).backward()", "scaler.scale(loss)\n        loss.backward()"),
          (UNSCALE, ""), ("scaler.step(optimizer)", "optimizer.step()"), ("        scaler.update()\n", "")),
    wrong("never-updates", ("        scaler.update()\n", "        scaler._progress.clear()\n")),
    wrong("a-scale-of-its-own", (UNSCALE, ""), ("(model.parameters(), max_norm)",
          "(model.parameters(), max_norm * 1024) / scaler.get_scale()")),
    wrong("logs-a-norm-too-small", ("norm.item()))", "norm.item() / scaler.get_scale()))")),
    wrong("logs-the-scaled-loss", ("log.append((loss.item()", "log.append((scaler.scale(loss).item()")),
]  # fmt: skip
RATE, SCALE = 0.02, 1024.0


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

    def __init__(self, model: nn.Module, batches: Any, max_norm: float, scale: float = SCALE, interval: int = 2000):
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


def by_hand(model: nn.Module, batches: Any, max_norm: float) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """(log, parameters), with a scale that is taken out of each gradient at once."""
    model, log = copy.deepcopy(model), []
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    for x, y in batches:
        loss = model(x, y)
        gradients = [g / SCALE for g in torch.autograd.grad(loss * SCALE, parameters)]
        norm = float(torch.cat([g.view(-1) for g in gradients]).norm())
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient * min(1.0, max_norm / (norm + 1e-6))
        optimizer.step()
        log.append((loss.item(), norm))
    return log, torch.cat([p.detach().view(-1) for p in parameters])


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model, batches = Model(generator), data(31, generator)
    want_log, want = by_hand(model, batches, 10.0)
    run = Run(model, batches, 10.0)
    true = [norm for _, norm in want_log]
    check_norms(
        run, true, f"{fell([loss for loss, _ in run.log])} in 31 steps, and should fall to {want_log[-1][0]:.3f}"
    )
    recognise(run.parameters, want, {}, "The parameters after 31 steps, against a run without a scaler", 1e-3)
    loss, norm = run.log[0]
    if abs(loss / want_log[0][0] - 1) > 1e-3:
        fail("logs-the-scaled-loss", f"The first loss is {want_log[0][0]:.4f}, and {loss:.4f} is in the log.")
    if abs(norm / true[0] - 1) > 1e-3:
        fail("logs-a-norm-too-small", f"The first gradient's norm is {true[0]:.4f}, and {norm:.6f} is in the log.")
    check_underflow()
    check_overflow(model, batches)


def check_norms(run: Run, true: list[float], before: str) -> None:
    """What the optimizer got in the first two steps, of which the first gradient is too long, and the second is not."""
    long, short = true[0], true[1]
    assert long > 10 > short
    got = torch.tensor(run.norms[:2])
    if len(run.norms) < 31:
        fail("steps-missing", f"In 31 steps, none of which overflows, the optimizer stepped {len(run.norms)} times.")
    said = (
        f"{before}. But max_norm is 10, and the first two gradients have norms {long:.3f} and {short:.3f}. "
        f"So the optimizer should get gradients of norm 10.000 and {short:.3f}. It got {got[0]:.6f} and {got[1]:.6f}"
    )
    mistakes = {
        "clips-what-is-scaled": (
            torch.tensor([10 / SCALE] * 2),
            f"{said}: 10 divided by the scale, {SCALE:g}, in both.",
        ),
        "divides-twice": (torch.tensor([10, short]) / SCALE, f"{said}: the scale, {SCALE:g}, was taken out twice."),
        "does-not-clip": (torch.tensor([long, short]), f"{said}: the long one was not clipped before the step."),
    }
    recognise(got, torch.tensor([10.0, short]), mistakes, said, tolerance=1e-3)


def check_overflow(model: nn.Module, batches: Any) -> None:
    """In the third of four steps a target is so large that the scaled gradient has inf."""
    batches = [*batches[:2], (batches[0][0], batches[0][1] + 2000), batches[3]]
    run = Run(model, batches, 10.0)
    if len(run.norms) > 3 or not bool(run.parameters.isfinite().all()):
        fail(
            "steps-past-the-scaler",
            "A gradient overflowed in FP16, and the optimizer stepped with it: only the scaler knows that it must not.",
        )
    if run.scale == SCALE:
        fail(
            "never-updates", f"A gradient overflowed, and the scale is {SCALE:g} as before: the scaler must hear of it."
        )
    want_log, want = by_hand(model, [batches[0], batches[1], batches[3]], 10.0)
    words = (
        "With a step that was skipped, so that the scale is 512 afterwards, the parameters are others than without it"
    )
    if not torch.allclose(run.parameters, want, rtol=1e-3, atol=1e-3):
        fail("a-scale-of-its-own", f"{words}: does each step use the scale of that moment?")
    if not math.isclose(run.log[3][1], want_log[2][1], rel_tol=1e-2):
        fail("a-scale-of-its-own", f"After a step that was skipped the norm in the log is {run.log[3][1]:.4f}.")


def check_underflow() -> None:
    """A loss of which the gradients in FP16 are all 0 without a scale."""
    generator = torch.Generator().manual_seed(0)
    model, batches = Model(generator, 2.0**-26), data(5, generator)
    before = torch.cat([p.detach().view(-1) for p in model.parameters()])
    if torch.equal(Run(model, batches, 2.0, 2.0**24).parameters, before):
        fail(
            "drops-the-scale",
            "Gradients of about 1e-8 are 0 in FP16, and the model learns nothing: the scale is there to save them.",
        )


class Case(NamedTuple):
    scale: float
    interval: int
    max_norm: float
    steps: int
    spoilt: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """interval: after so many updates the scale grows; with 0 it stays. spoilt: the gradient of one step has inf."""
    ways = itertools.product((1.0, 64.0, 4096.0), (0, 2, 2000), (0.1, 10.0, 1000.0))
    return [Case(*row) for row in deal(random, ways, [2, 5, 30], [False, True])]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model, batches = Model(generator), data(case.steps, generator)
    if case.spoilt:
        place = case.seed % case.steps
        batches[place] = batches[place][0], batches[place][1] + torch.inf
    (run,), meters = metered(1, lambda _: Run(model, batches, case.max_norm, case.scale, case.interval))
    return {"log": run.log, "parameters": run.parameters, "scale": run.scale, "steps": len(run.norms), **meters}


def tolerance(case: Case) -> float:
    return 1e-3
