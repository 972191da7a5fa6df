"""A batch that does not fit is cut into micro-batches, whose gradients add up. The loss of a batch is a mean over its
tokens, so each micro-batch counts by its tokens, not as one of k:

    L = Σ nᵢ Lᵢ / Σ nᵢ          Lᵢ: mean loss of micro-batch i; nᵢ: its targets, those that are not -100

Activations exist for one micro-batch at a time: each goes backward before the next goes forward.
`_backward(model, micro_batch, weight)` does that: it adds the gradient of weight · loss to .grad and returns weight ·
loss. A micro-batch is a pair (x, y). One without any target has a mean of 0/0; it must add nothing.

What surrounds the loop is given: it refuses what is no window, counts the targets, and hands an engine, whose ranks
must agree, to `_accumulate_on_ranks`. The loop is yours, also for a micro-batch without a target, and in 16 bits.
"""

import contextlib
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
from tests.exercises.kit import fail, ranks, recognise, size, value_or_error, wrong

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
    wrong("two-sums-in-16-bits", ("if len(window) > 1 else", "if len(window) > 2 else"), says="sums-in-16-bits"),
    wrong("first-parameter-decides", ("if len(window) > 1", "if next(model.parameters()).dtype.itemsize == 2"),
          says="sums-in-16-bits"),
    wrong("checks-no-count", ("_checked_count(micro_batch, count)", "int(count(micro_batch))"), says="no-error"),
    wrong("hides-nan", ("    return loss", "    return loss.nan_to_num()"), says="random"),
    wrong("takes-fsdp", (' or hasattr(model, "set_requires_gradient_sync")', ""), says="no-error"),
    wrong("mean-of-means", ("targets / total)", "1 / len(window))")),
    wrong("sums-the-means", ("targets / total)", "1.0)")),
    wrong("forgets-to-divide", ("targets / total)", "float(targets))")),
    wrong("counts-ignored", ("(micro_batch, count)", "(micro_batch, lambda pair: pair[1].numel())")),
    wrong("nan-without-targets", ("if targets:", "if True:")),
    wrong("mean-of-means-and-nan", ("if targets:", "if True:"), ("targets / total)", "1 / len(window))"),
          says="mean-of-means"),
    wrong("sums-the-means-and-nan", ("if targets:", "if True:"), ("targets / total)", "1.0)"), says="sums-the-means"),
    wrong("all-at-once", (LOOP, "loss = loss + model(*micro_batch) * (targets / total)"),
          ("    return loss", "    loss.backward()\n    return loss.detach()")),
    wrong("last-only", ("if targets:", "model.zero_grad()\n            if targets:")),
    wrong("zeroes-before", ("    loss = torch.zeros", "    model.zero_grad()\n    loss = torch.zeros")),
    wrong("returns-the-last", ("loss += _backward", "loss = _backward")),
    wrong("forward-twice", (LOOP, "model(*micro_batch)\n                " + LOOP)),
    wrong("keeps-a-graph", (LOOP, LOOP.replace("+=", "= loss +") + "\n                "
                            "loss = loss + 0 * next(model.parameters()).sum()")),
    wrong("a-number", ("    return loss", "    return float(loss)")),
    wrong("sums-in-16-bits", ("with sums_in_fp32(model) if len(window) > 1 else ", "with ")),
]  # fmt: skip


class Model(nn.Module):
    """Scores for 8 words at each place, with a large activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = 0
        self.up, self.out = nn.Linear(4, 1024), nn.Linear(1024, 8)

    def forward(self, x, y):
        self.calls += 1
        scores = self.out(self.up(x).tanh()).flatten(0, 1)
        targets = y.flatten()
        chosen = F.log_softmax(scores, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        return -(chosen * (targets != -100)).sum() / (targets != -100).sum()  # 0/0 without targets


def window() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for rows, targets in ((1, 3), (2, 20), (1, 9), (1, 0), (2, 14)):
        y = torch.randint(8, (rows, 10), generator=generator)
        y.view(-1)[targets:] = -100
        pairs.append((torch.randn(rows, 10, 4, generator=generator), y))
    return pairs


def gradient(model: nn.Module) -> torch.Tensor:
    gradients = []
    for p in model.parameters():
        if p.grad is None:
            fail("no-gradient", "A parameter has no gradient: did each micro-batch with targets go backward?")
        gradients.append(p.grad.view(-1))
    return torch.cat(gradients)


def weighted(weights: list[float]) -> torch.Tensor:
    model = Model()
    for (x, y), weight in zip(window(), weights):
        if weight:
            (model(x, y) * weight).backward()
    return gradient(model)


def check() -> None:
    model = Model()
    x, y = (torch.cat(parts) for parts in zip(*window()))
    want_loss = model(x, y)
    want_loss.backward()
    want_loss = want_loss.detach()
    want = gradient(model)
    model = Model()
    with Ledger(model) as ledger:
        try:
            loss = module.accumulate(model, iter(window()))
        except ValueError as error:
            if "stands in" not in str(error):
                raise
            fail("nan-without-targets", "A micro-batch without targets has a mean of 0/0, which is NaN. Leave it out.")
    got = gradient(model)
    given, loss = loss, loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss or 0.0)
    if bool(got.isnan().any()):
        model, rest = Model(), [pair for pair in window() if (pair[1] != -100).any()]
        module.accumulate(model, rest)
        what = "The gradient is NaN, and without the micro-batch that has no target it is wrong as well"
        recognise(gradient(model), want, mistakes(rest, want), what, tolerance=1e-4)
        fail("nan-without-targets", "The gradients are NaN: without targets a mean is 0/0. Leave the micro-batch out.")
    recognise(got, want, mistakes(window(), want), "The gradient of the window", tolerance=1e-4)
    if ledger.peak["activations"] > 3 * 20 * 1024 * 4:
        fail(
            "all-at-once",
            f"{size(ledger.peak['activations'])} of activations at the peak: those of all micro-batches. Go "
            "backward after each, so that they are gone before the next.",
        )
    if abs(float(loss) - float(want_loss)) > 1e-4:
        fail("returns-the-last", f"The loss of the window is {float(want_loss):.4f}, not {float(loss):.4f}.")
    if not isinstance(given, torch.Tensor):
        fail("a-number", f"The loss came back as {type(given).__name__}: a tensor lets nobody wait for a GPU.")
    if given.requires_grad:
        fail("keeps-a-graph", "The loss that was returned still has a graph, which keeps memory: detach it.")
    if model.calls != 4:
        fail("forward-twice", f"The model ran {model.calls} times for 4 micro-batches that have targets: once each.")
    again = Model()
    for p in again.parameters():
        p.grad = torch.ones_like(p)
    module.accumulate(again, window())
    if torch.allclose(gradient(again), want, rtol=1e-3, atol=1e-6):
        fail("zeroes-before", "What was in .grad before is gone: add to it. zero_grad() is the caller's.")
    sums_stand_still()
    for rank, got in enumerate(ranks(2, on_ranks, Model())):
        recognise(got, want, {}, f"The gradient on rank {rank} of 2, of ZeRO-2 with different micro-batches", 1e-4)
    try:
        module.accumulate(nn.ReLU(), window())
    except TypeError:
        pass
    else:
        fail("no-error", "A module without parameters must be a TypeError: it has no gradients.")
    errors()
    for wrapper in (Averages(), Shards()):
        try:
            module.accumulate(wrapper, window())
        except TypeError:
            continue
        fail(
            "no-error",
            "A wrapper that averages over ranks by itself must be a TypeError: it has `no_sync`, or "
            "`set_requires_gradient_sync`.",
        )


def mistakes(given: list[Any], want: torch.Tensor) -> dict[str, tuple[Any, str]]:
    """What wrong weights make of the micro-batches. given: all of them, or those that have targets."""
    mean, places = 1 / len(given), sum(y.numel() for _, y in given)
    return {
        "mean-of-means": (
            weighted([mean, mean, mean, 0, mean]),
            "It is the mean of the micro-batches' means: a token in a short one weighs more. Weight by targets.",
        ),
        "counts-ignored": (
            weighted([y.numel() / places if (y != -100).any() else 0 for _, y in window()]),
            "Positions with target -100 were counted: count those that have one.",
        ),
        "sums-the-means": (weighted([1, 1, 1, 0, 1]), "The means were added up, unweighted: Σ nᵢ Lᵢ / Σ nᵢ."),
        "forgets-to-divide": (want * 46, "The gradient is 46 times too large, for 46 targets: divide by their number."),
        "last-only": (weighted([0, 0, 0, 0, 14 / 46]), "Only the last micro-batch counts: gradients add up in .grad."),
    }


class Averages(Model):
    """As PyTorch's DDP looks from outside."""

    def no_sync(self) -> None: ...


class Shards(Model):
    """As PyTorch's FSDP looks from outside."""

    def set_requires_gradient_sync(self) -> None: ...


def errors() -> None:
    x, y = window()[0]
    for what, given, count, error in (
        ("An empty window", [], module.targets_in, ValueError),
        ("A count of -1", [(x, y)] * 2, lambda _: -1, ValueError),
        ("A count of NaN", [(x, y)] * 2, lambda _: torch.nan, ValueError),
        (
            "A dict with num_items_in_batch",
            [(x, y), {"labels": y, "num_items_in_batch": 3}],
            module.targets_in,
            ValueError,
        ),
        ("A window whose second micro-batch is a lone tensor", [(x, y), x], module.targets_in, TypeError),
    ):
        model = Model()
        with contextlib.suppress(error):
            module.accumulate(model, given, count=count)
            fail("no-error", f"{what} must be a {error.__name__}: _checked_count and _check_window raise it.")
        if model.calls:
            fail("error-too-late", f"{what} is a {error.__name__}, before the model runs: check all counts first.")


class Weights(nn.Module):
    """Single weights of these dtypes. The gradient of each is x."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1, dtype=dtype) for dtype in dtypes)

    def forward(self, x, y):
        return sum((weight * x.to(weight.dtype)).float().sum() for weight in self.weights)


def sums_stand_still() -> None:
    half, short, full = torch.bfloat16, torch.float16, torch.float32
    for dtypes in ((half,), (short,), (full, half), (half, full), (full, short, half)):
        model = Weights(*dtypes)
        for count, weight in zip((2, 3, 17), model.weights):
            weight.grad = torch.ones_like(weight)
            few = [(torch.full((1,), 0.75 * torch.finfo(weight.dtype).eps), torch.zeros(1, dtype=torch.long))] * count
            module.accumulate(model, few)
            if weight.dtype != full and weight.grad.item() == 1:
                fail(
                    "sums-in-16-bits",
                    f"{count} small gradients beside a .grad of 1 got lost in {weight.dtype}, one by one, in a model "
                    f"of {' and '.join(map(str, dtypes))}: sums_in_fp32(model).",
                )


def on_ranks(comm, same_model):
    """What the optimizer of ZeRO-2 sees, put together: the ranks have 3 and 2 of the micro-batches."""
    model = Zero2(copy.deepcopy(same_model), comm)  # made before: threads share the random numbers
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.gather_state_dict()
    module.accumulate(model, window()[comm.rank :: 2])
    optimizer.step()
    after = model.gather_state_dict()
    return torch.cat([(before[name] - after[name]).view(-1) for name, _ in same_model.named_parameters()])


class Small(nn.Module):
    """A mean loss, as `Model`, of a tensor or in a dict; the first target of a row is not seen if `shifts`."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        self.layer, self.shifts, self.calls = nn.Linear(4, 6), shifts, 0

    def forward(self, x, labels):
        self.calls += 1
        seen = labels[:, 1:] if self.shifts else labels
        scores = self.layer(x)[:, -seen.shape[1] :].flatten(0, 1)
        loss = F.cross_entropy(scores, seen.flatten())
        return SimpleNamespace(loss=loss) if self.shifts else loss


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
    """form: dicts are counted by a `count` of their own. empty: without any target. of_nan: the last x, of a module."""
    wrapped = [*((2, engine) for engine in ENGINES), (3, random.choice([*ENGINES]))]
    ways = [
        (*first, *rest)
        for first in [(1, "none")] * 4 + wrapped
        for rest in itertools.product(("pairs", "dicts"), range(1, 6, 1 if first[0] == 1 else 2))
    ]
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    columns = dtypes, [False, True], [0.0, 0.0, 0.4, 1.0], [False, False, False, True]
    return [Case(*row) for row in deal(random, ways, *columns)]


def result(case: Case) -> Any:
    """An engine computes in FP32 here. Each of its ranks has another window, and rank 0's has a target."""
    dicts, dtype = case.form == "dicts", case.dtype if case.ranks == 1 else torch.float32
    generator = torch.Generator().manual_seed(case.seed)
    model = Small(dicts).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    windows = [[drawn_window(case, generator, dtype, rank) for rank in range(case.ranks)] for _ in "ab"]
    options: dict[str, Any] = {"no_sync": case.no_sync}
    if dicts:
        options["count"] = lambda given: (given["labels"][:, 1:] != -100).sum()
    if case.ranks == 1:
        model.unused = nn.Parameter(torch.ones(1, dtype=dtype))
        for parameter in model.layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        losses = [value_or_error(module.accumulate, model, iter(window), **options) for (window,) in windows]
        gradients = [parameter.grad for parameter in model.layer.parameters()]
        return {
            "the losses of two windows": losses,
            "the gradients, added to ones": gradients,
            "the gradient of a parameter that is not used": model.unused.grad,
            "forwards": model.calls,
        }

    def on_rank(comm) -> dict[str, Any]:
        engine = ENGINES[case.engine](copy.deepcopy(model), comm)
        before = comm.bytes_sent
        losses = [module.accumulate(engine, window[comm.rank], **options) for window in windows]
        gradients = [parameter.grad for parameter in engine.parameters()]
        sent = comm.bytes_sent - before
        return {"the losses of two windows": losses, "the gradients": gradients, "bytes sent": sent}

    return rank_kit.by_rank(ranks(case.ranks, on_rank))


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
