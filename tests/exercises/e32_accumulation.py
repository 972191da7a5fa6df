"""A batch that does not fit is cut into micro-batches, whose gradients add up. The loss of a batch is a mean over its
tokens, so each micro-batch counts by its tokens, not as one of k:

    L = Σ nᵢ Lᵢ / Σ nᵢ          Lᵢ: mean loss of micro-batch i; nᵢ: its targets, those that are not -100

Activations exist for one micro-batch at a time: each goes backward before the next goes forward.
`_backward(model, micro_batch, weight)` does that: it adds the gradient of weight · loss to .grad and returns weight ·
loss. A micro-batch is a pair (x, y). One without any target has a mean of 0/0; it must add nothing.

What surrounds the loop is given: it refuses what is no window, counts the targets, and hands an engine, whose ranks
must agree, to `_accumulate_on_ranks`. The loop is yours, also for a micro-batch without a target, and in 16 bits.
"""

import copy
import itertools
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, Zero1, Zero2, Zero3
from minizero import accumulate as module
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, lent, value_or_error, wrong

PLAN = [
    "Given: `window`, the list of the micro-batches; `counts`, how many targets each of them has; `total`, how many "
    "all of them have.",
    "For each micro-batch that has targets: _backward with the weight of its share; add up what it returns. In "
    "16 bits the sums of gradients should be FP32: `with sums_in_fp32(model):` around the loop does that.",
    "Return the loss of the window: a tensor without a graph.",
]
HINTS = [
    "targets_in(micro_batch) is (y != IGNORED).sum(): not all of y are targets.",
    "weight = targets / total: the weights add up to 1.",
    "loss = torch.zeros(()) and loss += _backward(…) keeps no graph, since _backward returns a detached value.",
]
AFTER = (
    "The package makes a list of the window before anything runs, because every weight needs all counts. A "
    "micro-batch without targets is skipped, and not weighted by 0, since 0 times NaN is NaN. The loss stays a "
    "tensor, so the loop waits for no GPU. In 16 bits the gradients add up in FP32, and are rounded once, at the end. "
    "Read next: `_accumulate_on_ranks` in minizero/accumulate.py, where a rank without a micro-batch takes part with "
    "weight 0."
)
GAP = (
    (
        "    loss = torch.zeros((), device=[*model.parameters()][-1].device)  # where the model ends\n"
        "    with sums_in_fp32(model) if len(window) > 1 else contextlib.nullcontext():\n"
        "        for micro_batch, targets in zip(window, counts):\n"
        "            if targets:  # without a target the mean is 0/0; the micro-batch adds nothing\n"
        "                loss += _backward(model, micro_batch, targets / total)\n"
        "    return loss",
        "    # Steps 2 and 3: the loop.\n    raise NotImplementedError",
    ),
)
LOOP = "loss += _backward(model, micro_batch, targets / total)"
WRONG = [
    wrong("mean-of-means", "It is the mean of the micro-batches' means: a token in a short one weighs more. Weight by "
          "targets.", ("targets / total)", "1 / len(window))")),
    wrong("sums-the-means", "The means were added up, unweighted: Σ nᵢ Lᵢ / Σ nᵢ.", ("targets / total)", "1.0)")),
    wrong("forgets-to-divide", "It is too large by the number of targets: divide by it.",
          ("targets / total)", "float(targets))")),
    wrong("counts-ignored", "Positions with target -100 were counted: count those that have one.",
          ("(micro_batch, count)", "(micro_batch, lambda pair: pair[1].numel())")),
    wrong("nan-without-targets", "A micro-batch without targets has a mean of 0/0, which is NaN. Leave it out.",
          ("if targets:", "if True:")),
    wrong("all-at-once", "Go backward after each micro-batch, so that its activations are gone before the next.",
          (LOOP, "loss = loss + model(*micro_batch) * (targets / total)"),
          ("    return loss", "    loss.backward()\n    return loss.detach()")),
    wrong("returns-the-last", "What is returned is the last micro-batch's share, and not the loss of the window.",
          ("loss += _backward", "loss = _backward")),
    wrong("keeps-a-graph", "The loss that was returned still has a graph, which keeps memory: detach it.",
          (LOOP,
           LOOP.replace("+=", "= loss +") + "\n                " "loss = loss + 0 * next(model.parameters()).sum()")),
]  # fmt: skip


class Small(nn.Module):
    """A mean loss, as a tensor or in an object; the first target of a row is not seen if `shifts`."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        self.layer, self.shifts, self.calls = nn.Linear(4, 6), shifts, 0

    def forward(self, x, labels):
        self.calls += 1
        seen = labels[:, 1:] if self.shifts else labels
        scores = self.layer(x)[:, -seen.shape[1] :].flatten(0, 1)
        loss = F.cross_entropy(scores, seen.flatten())
        return SimpleNamespace(loss=loss) if self.shifts else loss


class Averages(Small):
    """As PyTorch's DDP looks from outside."""

    def no_sync(self) -> None: ...


class Shards(Small):
    """As PyTorch's FSDP looks from outside."""

    def set_requires_gradient_sync(self) -> None: ...


def errors() -> dict[str, Any]:
    """What is refused, and how often the model has run by then."""
    x, y = torch.ones(2, 7, 4), torch.ones(2, 7, dtype=torch.long)
    model = Small(False)
    two, wrappers = [(x, y)] * 2, (nn.ReLU(), Averages(False), Shards(False))
    windows: list[Any] = [[], [(x, y), {"labels": y, "num_items_in_batch": 3}], [(x, y), x]]  # the last: a lone tensor
    ways: list[Any] = [(model, two, {"count": count}) for count in (lambda _: -1, lambda _: torch.nan)]
    ways += [(model, window, {}) for window in windows] + [(each, two, {}) for each in wrappers]
    seen = []
    for wrapped, window, options in ways:
        try:
            module.accumulate(wrapped, window, **options)
            seen.append("no error")
        except (TypeError, ValueError) as error:
            seen.append(type(error).__name__)
    return {"what is refused, of eight": seen, "forwards": model.calls}


class Weights(nn.Module):
    """Single weights of these dtypes. The gradient of each is x."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1, dtype=dtype) for dtype in dtypes)

    def forward(self, x, y):
        return sum((weight * x.to(weight.dtype)).float().sum() for weight in self.weights)


def small_sums() -> dict[str, Any]:
    """What becomes of small gradients beside a .grad of 1, in 2, 3, … micro-batches, for weights of some dtypes."""
    half, short, full = torch.bfloat16, torch.float16, torch.float32
    seen = {}
    for dtypes in ((half,), (short,), (full, half), (half, full), (full, short, half)):
        model = Weights(*dtypes)
        for count, weight in zip((2, 3, 17), model.weights):
            weight.grad = torch.ones_like(weight)
            few = [(torch.full((1,), 0.75 * torch.finfo(weight.dtype).eps), torch.zeros(1, dtype=torch.long))] * count
            module.accumulate(model, few)
            seen[f"{count} of them beside a .grad in {weight.dtype}, of {dtypes}"] = weight.grad
    return seen


ENGINES: dict[str, Any] = {"DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}


class Case(NamedTuple):
    ranks: int
    engine: str
    form: str
    micro_batches: int
    dtype: torch.dtype
    no_sync: bool
    empty: float
    of_nan: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """form: dicts are counted by a `count` of their own; of errors and small sums nothing is drawn. empty: without any
    target. of_nan: the last x, of a module."""
    wrapped = [*((2, engine) for engine in ENGINES), (3, random.choice([*ENGINES]))]
    ways = [
        (*first, *rest)
        for first in [(1, "none")] * 4 + wrapped
        for rest in itertools.product(("pairs", "dicts"), range(1, 6, 1 if first[0] == 1 else 2))
    ]
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    columns = dtypes, [False, True], [0.0, 0.0, 0.4, 1.0], [False, False, False, True]
    plain = Case(1, "none", "pairs", 5, torch.float32, True, 0.4, False, 1)
    fixed = [plain, plain._replace(form="small sums"), plain._replace(form="errors")]
    return fixed + [Case(*row) for row in deal(random, ways, *columns)]


def result(case: Case) -> Any:
    """An engine computes in FP32 here. Each of its ranks has another window, and rank 0's has a target."""
    if case.form in ("errors", "small sums"):
        return errors() if case.form == "errors" else small_sums()
    dicts, dtype = case.form == "dicts", case.dtype if case.ranks == 1 else torch.float32
    generator = torch.Generator().manual_seed(case.seed)
    model = Small(dicts).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if case.ranks == 1:
        model.unused = nn.Parameter(torch.ones(1, dtype=dtype))
    model = lent(model)
    windows = [[drawn_window(case, generator, dtype, rank) for rank in range(case.ranks)] for _ in "ab"]
    options: dict[str, Any] = {"no_sync": case.no_sync}
    if dicts:
        options["count"] = lambda given: (given["labels"][:, 1:] != -100).sum()
    if case.ranks == 1:
        for parameter in model.layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Ledger(model) as ledger:
            losses = [value_or_error(module.accumulate, model, iter(window), **options) for (window,) in windows]
        return {
            "the gradients, added to ones": [parameter.grad for parameter in model.layer.parameters()],
            "forwards": model.calls,
            "bytes of activations at the peak": AtMost(ledger.peak["activations"]),
            "the losses of two windows": losses,
            "a loss has a graph": any(getattr(loss, "requires_grad", False) for loss in losses),
            "the gradient of a parameter that is not used": model.unused.grad,
        }

    def on_rank(comm) -> dict[str, Any]:
        engine = ENGINES[case.engine](copy.deepcopy(model), comm)
        before = comm.bytes_sent
        losses = [module.accumulate(engine, window[comm.rank], **options) for window in windows]
        gradients = [parameter.grad for parameter in engine.parameters()]
        sent = comm.bytes_sent - before
        return {"the losses of two windows": losses, "the gradients": gradients, "bytes sent": sent}

    seen, meters = rank_kit.metered(case.ranks, on_rank)
    return rank_kit.by_rank(seen) | meters


def drawn_window(case: Case, generator: torch.Generator, dtype: torch.dtype, rank: int) -> list[Any]:
    window: list[Any] = []
    for number in range(case.micro_batches + rank):
        rows = int(torch.randint(1, 4, (), generator=generator))
        x = torch.randn(rows, 7, 4, generator=generator).to(dtype)
        y = torch.randint(6, (rows, 7), generator=generator)
        y[torch.rand(rows, 7, generator=generator) < 0.4] = -100
        if float(torch.rand((), generator=generator)) < case.empty and (case.ranks == 1 or number or rank):
            y[:] = -100
        elif case.ranks > 1:
            y[0, 3] = 1
        if case.of_nan and case.ranks == 1 and number == case.micro_batches - 1:
            x[:] = torch.nan  # with targets it makes the loss NaN, without it counts for nothing
        window.append({"x": x, "labels": y} if case.form == "dicts" else (x, y))
    return window


def tolerance(case: Case) -> float:
    return 1e-2 if case.dtype == torch.bfloat16 else 1e-5
