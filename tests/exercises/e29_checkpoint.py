"""Recomputation: forward keeps only a block's inputs; backward runs the block again, now with a tape, and goes backward
through that at once. Its activations live only while its own backward runs, for one more forward. The dozen lines of
the lesson have one input, one output, and other random numbers in the second run. Yours serve several of both, some
without a gradient, and draw the same numbers again.

`ByFunction` is one node of the graph; its forward ran fn without a tape, and left in ctx:

    ctx.fn               the function; it returns a tensor, or a tuple of them
    ctx.saved_tensors    its inputs
    ctx.replay           `with ctx.replay.again():` sets random generators and autocast back to the first run's

`gradients` are those of the outputs. Returned are those of forward's arguments: None for fn, then one for each
tensor. The gradients of the parameters that fn uses go into their .grad by themselves.
"""

from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from minizero.memory import Ledger
from minizero.recompute import by_function
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, recognise, size, wrong

PLAN = [
    "The inputs again, cut off from the graph that they came from, each requiring a gradient if it did before.",
    "Run fn on them, inside ctx.replay.again() and with grad mode on: backward runs without it.",
    "Go backward from the outputs, with `gradients`.",
    "Return None, and the gradients that have arrived at the inputs.",
]
HINTS = [
    "tensor.detach().requires_grad_(tensor.requires_grad) is the same data at the beginning of a new graph.",
    "with ctx.replay.again(), torch.enable_grad(): …",
    "torch.autograd.backward(outputs, gradients) also reaches the parameters; torch.autograd.grad for the inputs "
    "would not.",
]
AFTER = (
    "This way is short, and has limits. If no input requires a gradient, the parameters get none; there is no second "
    "derivative; and all of fn runs twice. The package's full version keeps the plain graph and drops only what it "
    "saves. Its second forward stops as soon as it has the last tensor that backward needs. PyTorch's checkpoint has "
    "both ways: `use_reentrant=True` is yours. Read next: `by_hooks` in minizero/recompute/two_ways.py."
)
DETACH = "[tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]"
BACK = "torch.autograd.backward(outputs, gradients)"
WRONG = [
    wrong("forgets-grad-mode", ("with ctx.replay.again(), torch.enable_grad():", "with ctx.replay.again():")),
    wrong("another-dropout", ("with ctx.replay.again(), torch.enable_grad():", "with torch.enable_grad():")),
    wrong("does-not-detach", (DETACH, "list(ctx.saved_tensors)")),
    wrong("ignores-the-gradients", (BACK, "torch.autograd.backward(outputs, torch.ones_like(outputs))")),
    wrong("returns-too-few", ("return None, *(", "return (*("), ("for tensor in tensors)", "for tensor in tensors),)")),
    wrong("keeps-the-tape", (BACK, "torch.autograd.backward(outputs, gradients, retain_graph=True)\n    "
                                   "ctx.fn.__dict__.setdefault('kept', []).append(outputs)")),
    wrong("runs-again", (BACK, "ctx.fn(*tensors)\n    " + BACK)),
    wrong("requires-all-gradients", ("requires_grad_(tensor.requires_grad)", "requires_grad_(True)")),
]  # fmt: skip


ERRORS = [
    (
        "forgets-grad-mode",
        "does not require grad",
        "What the second run gave has no graph: backward runs without grad mode, so turn it on.",
    ),
    (
        "does-not-detach",
        "a second time",
        "Backward went on from the block's input into the graph before it, which will go backward by itself: cut "
        "the inputs off with detach().",
    ),
    (
        "returns-too-few",
        "incorrect number of gradients",
        "backward returns one gradient for each argument of forward: None for fn comes first.",
    ),
]


class Block(nn.Sequential):
    """Layers with something random in them, and a large activation."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16), nn.Dropout(dropout))


def run(checkpointed: bool, dropout: float) -> tuple[list[torch.Tensor | None], int, int]:
    """Gradients of the input and the parameters; bytes of activations at their peak, and at the end."""
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(3)]
    start = torch.randn(64, 16, requires_grad=True)
    first = nn.Linear(16, 16)
    model = nn.ModuleList([first, *blocks])
    with Ledger(model) as ledger:
        x = first(start)
        for block in blocks:
            x = by_function(block, x) if checkpointed else block(x)
        (x * torch.linspace(0, 1, 16)).sum().backward()
        del x
        held = ledger.current["total"] - ledger.current["parameters"] - ledger.current["gradients"]
    gradients = [start.grad, *(p.grad for p in model.parameters())]
    return gradients, ledger.peak["total"], held


def check() -> None:
    compare(0.0)
    several()
    much, little, held = compare(0.5)
    if held > 64 * 16 * 4 * 2:
        fail("keeps-the-tape", f"After backward {size(held)} are still held: nothing of the second run may be kept.")
    if little > 0.75 * much:
        fail(
            "retains-the-graph",
            f"The peak is {size(little)}, and {size(much)} without recomputation, although nothing is held at the end. "
            "Backward must free the tape of the second run as it goes through it: is there a retain_graph=True, or a "
            "variable with a tensor from inside fn?",
        )


def compare(dropout: float) -> tuple[int, int, int]:
    """The gradients must be right. Returns the peak without recomputation, the peak with it, and what it still held."""
    want, much, _ = run(False, dropout)
    try:
        got, little, held = run(True, dropout)
    except RuntimeError as error:
        for name, part, words in ERRORS:
            if part in str(error):
                fail(name, words)
        raise
    if all(g is None for g in got[3:]):
        fail("forgets-the-parameters", "The block's parameters have no gradients: go backward to them too.")
    for g, w in zip(got, want):
        assert w is not None  # without recomputation each has a gradient
        if g is None or not torch.allclose(g, w, rtol=1e-4, atol=1e-5 * float(w.abs().max())):
            if dropout:
                fail(
                    "another-dropout",
                    "With dropout the gradients are those of another mask: the second run must draw the same numbers.",
                )
            if g is None:
                fail("no-gradient", "An input got no gradient: cut off from its graph, it must require one as before.")
            weight = got[-1]
            if weight is not None and torch.allclose(weight, torch.full_like(weight, float(weight[0])), rtol=1e-4):
                fail(
                    "ignores-the-gradients",
                    "The gradients that came from behind are not used: pass `gradients` on.",
                )
            recognise(g, w, {}, "A gradient", tolerance=1e-4)
    return much, little, held


def several() -> None:
    """A function of two tensors and a tensor of whole numbers, with two results, that counts its runs."""
    runs = []

    def fn(a, b, index):
        runs.append(torch.is_grad_enabled())
        return a * b, (a + b)[index]

    index = torch.tensor([0, 2])
    a, b = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0], requires_grad=True)
    try:
        product, total = by_function(fn, a, b, index)
        (product.sum() + 10 * total.sum()).backward()
    except RuntimeError as error:
        if "floating point" not in str(error):
            raise
        fail(
            "requires-all-gradients",
            "One of the inputs has whole numbers, and cannot require a gradient: each input as it was before.",
        )
    if b.grad is None or a.grad is None:
        fail("first-input-only", "Of two inputs one got no gradient: return one for each tensor.")
    if torch.equal(a.grad, torch.tensor([4.0, 5.0, 6.0])):
        fail("first-output-only", "Of two outputs only the first went backward: give all outputs, and all gradients.")
    recognise(a.grad, torch.tensor([14.0, 5.0, 16.0]), {}, "The gradient of the first of two inputs")
    recognise(b.grad, torch.tensor([11.0, 2.0, 13.0]), {}, "The gradient of the second of two inputs")
    if len(runs) != 2:
        fail("runs-again", f"The function ran {len(runs)} times: once in forward, once in backward.")


class Case(NamedTuple):
    needs: tuple[bool, ...]
    whole: int | None
    outputs: int
    twice: str
    dropout: float
    norm: bool
    autocast: bool
    module: bool
    dtype: torch.dtype
    spoilt_by: float
    seed: int


def draw(random: Random) -> list[Case]:
    """needs: which inputs require a gradient; before number `whole` stands a tensor of whole numbers. outputs: 0 is
    one that stands in no tuple. twice: what is done a second time."""
    needs = [(True,), (True, True), (True, False), (False, True), (True, True, True), (False, True, False)]
    ways = [(need, outputs) for need in needs for outputs in range(4)]
    columns = (
        [None, 0, 1],
        ["nothing", "backward", "a derivative", "the call", "an input"],
        [0.0, 0.5],
        [False, True],
        [False, True],
        [False, True],
        [torch.float32, torch.float64],
        [0.0, 0.0, 0.0, torch.nan, torch.inf],
    )
    return [Case(need, whole, outputs, *rest) for need, outputs, whole, *rest in deal(random, [*ways] * 2, *columns)]


class Tells(nn.Module):
    """A layer with something random, a batch norm, and a large activation. It notes what each run finds."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 64), nn.Dropout(case.dropout)
        self.norm = nn.BatchNorm1d(64) if case.norm else nn.Identity()
        self.outputs = case.outputs
        self.runs: list[dict[str, Any]] = []

    def forward(self, *tensors: torch.Tensor) -> Any:
        self.runs.append(
            {
                "grad mode": torch.is_grad_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "inputs that require a gradient": [x.requires_grad for x in tensors],
            }
        )
        index = [x for x in tensors if not x.is_floating_point()]
        first, *others = [x for x in tensors if x.is_floating_point()]
        total = first + sum(2 * x for x in others[:1])  # a third is not used
        hidden = self.dropout(self.norm(self.layer(total[index[0][:5]] if index else total))).tanh()
        results = tuple((hidden * (i + 2)).sin() for i in range(max(1, self.outputs)))
        return results if self.outputs else results[0]


def result(case: Case) -> Any:
    """The gradients, what is kept, and what the runs of the function found."""
    torch.manual_seed(case.seed)
    block = Tells(case).to(case.dtype)
    start = torch.randn(8, 4, dtype=case.dtype, requires_grad=True)
    inputs = [(start * (i + 1)).detach().requires_grad_(need) for i, need in enumerate(case.needs)]
    first = next(i for i, need in enumerate(case.needs) if need)
    given = [start.sin() if i == first else x for i, x in enumerate(inputs)]  # one has a graph behind it
    if case.twice == "an input":
        given.append(given[first])
    if case.whole is not None:
        given.insert(case.whole, torch.tensor([1, 0, 3, 3, 7] * 2**13))  # large, and nobody needs a copy of it
    fn = block if case.module else lambda *tensors: block(*tensors)
    with Ledger() as ledger:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            out = by_function(fn, *given)
            again = by_function(fn, *given) if case.twice == "the call" else ()
        out, again = ((x,) if isinstance(x, torch.Tensor) else x for x in (out, again))
        loss = sum((x.double() * (i + 1)).square().sum() for i, x in enumerate((*out[-2:], *again)))
        loss = loss + out[-1][0, 0] * case.spoilt_by  # type: ignore[misc]
        if case.twice == "a derivative":
            (slope,) = torch.autograd.grad(loss, start, create_graph=True)
            try:
                slope.sum().backward()
            except RuntimeError as error:
                return type(error).__name__
            return "no error"
        loss.backward(retain_graph=case.twice == "backward")
        if case.twice == "backward":
            loss.backward()
        with_outputs = ledger.current["total"]
        del out, again, loss
        held = ledger.current["total"]
    return {
        "the gradients": [x.grad for x in (start, *inputs, *block.parameters())],
        "bytes at the peak": AtMost(ledger.peak["total"], 1.5, 0.02),
        "bytes that are held as long as the outputs are": AtMost(with_outputs),
        "bytes that are held afterwards": AtMost(held),
        "the runs": block.runs,
        "the next random number": float(torch.rand(())),
        "the buffers": list(block.buffers()),
    }


def tolerance(case: Case) -> float:
    return 1e-2 if case.autocast else 1e-5 if case.dtype == torch.float32 else 1e-10
