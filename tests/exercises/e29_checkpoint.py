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
from tests.exercises.kit import AtMost, wrong

PLAN = [
    "The inputs again, cut off from the graph that they came from, each requiring a gradient if it did before.",
    "Run fn on them, inside ctx.replay.again() and with grad mode on: backward runs without it.",
    "Outside of that block, since autocast is for a forward: go backward from the outputs, with `gradients`.",
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
    wrong("forgets-grad-mode", "What the second run gave has no graph: backward runs without grad mode, so turn it "
          "on.", ("with ctx.replay.again(), torch.enable_grad():", "with ctx.replay.again():")),
    wrong("another-dropout", "The gradients are those of another mask, mode or autocast: the second run must draw the "
          "same numbers, in the state that the first one found.",
          ("with ctx.replay.again(), torch.enable_grad():", "with torch.enable_grad():")),
    wrong("does-not-detach", "Backward went on from the block's input into the graph before it, which will go backward "
          "by itself: cut the inputs off with detach().", (DETACH, "list(ctx.saved_tensors)")),
    wrong("ignores-the-gradients", "The gradients that came from behind are not used: pass `gradients` on.",
          (BACK, "torch.autograd.backward(outputs, torch.ones_like(outputs))")),
    wrong("returns-too-few", "backward returns one gradient for each argument of forward: None for fn comes first.",
          ("return None, *(", "return (*("), ("for tensor in tensors)", "for tensor in tensors),)")),
    wrong("keeps-the-tape", "After backward something of the second run is still held: nothing of it may be kept.",
          (BACK, "torch.autograd.backward(outputs, gradients, retain_graph=True)\n"
           "    ctx.fn.__dict__.setdefault('kept', []).append(outputs)")),
    wrong("runs-again", "The function ran once too often: once in forward, once in backward.",
          (BACK, "ctx.fn(*tensors)\n    " + BACK)),
    wrong("requires-all-gradients", "One of the inputs has whole numbers, or needs no gradient: each input requires "
          "one as it did before.", ("requires_grad_(tensor.requires_grad)", "requires_grad_(True)")),
]  # fmt: skip


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
    plain = [((True,), None, 0), ((True, True), 1, 2)]
    first = [Case(*way, "nothing", 0.5, False, False, True, torch.float32, 0.0, 0) for way in plain]
    return first + [
        Case(need, whole, outputs, *rest) for need, outputs, whole, *rest in deal(random, [*ways] * 2, *columns)
    ]


RUNS: list[dict[str, Any]] = []  # no attribute of the module: the second run would be taken out of that again


class Tells(nn.Module):
    """A layer with something random, a batch norm, and a large activation. It notes what each run finds."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 64), nn.Dropout(case.dropout)
        self.norm = nn.BatchNorm1d(64) if case.norm else nn.Identity()
        self.outputs = case.outputs

    def forward(self, *tensors: torch.Tensor) -> Any:
        RUNS.append(
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
        if hidden.requires_grad:
            hidden.register_hook(lambda _: RUNS.append({"autocast in backward": torch.is_autocast_enabled("cpu")}))
        results = tuple((hidden * (i + 2)).sin() for i in range(max(1, self.outputs)))
        return results if self.outputs else results[0]


def result(case: Case) -> Any:
    """The gradients, what is kept, and what the runs of the function found."""
    RUNS.clear()
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
        "the runs": [*RUNS],
        "the next random number": float(torch.rand(())),
        "the buffers": list(block.buffers()),
    }


def tolerance(case: Case) -> float:
    return 1e-2 if case.autocast else 1e-5 if case.dtype == torch.float32 else 1e-10
