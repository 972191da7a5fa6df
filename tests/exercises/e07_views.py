"""A unit (say, a transformer block) has many parameters, but one flat buffer, so that one message moves them all. The
parameters are views into it, each in its own shape: writing to the buffer is writing to them.

    flat      | 0 1 2 3 4 5 | 6 7 | 8 9 10 11 | 0 0 0 0 |    12 elements, 4 more for 8 ranks: chunks of 2
    shapes      (2, 3)        (2,)  (2, 2)      padding

Three things make it harder than it looks. Two modules may share one parameter: it is *tied*, and there only once. A
parameter may lie in memory in another order than its rows say, as a transposed one does. And the model, autograd and
an optimizer hold the parameters already: these must be the same objects afterwards.

    parameter.data = view     lets a parameter have other memory, and perhaps another shape; it stays the same object
    x.view(shape)             the same memory in another shape; x.reshape(-1): flat, row by row, a copy if it must be
"""

import weakref
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, recognise, wrong
from tests.exercises.tasks import flat as task

PLAN = [
    "The buffer has the values of all parameters, in their order, row by row. A tied parameter is in it once.",
    "`ranks` divides its length. No more zeros than needed, and all of them at the end.",
    "Each parameter keeps its shape, its values and its gradient, and has no memory of its own: what is written into "
    "the buffer is in the parameter.",
    "The parameters are the same objects as before. The buffer is plain memory: it has no gradient.",
]
HINTS = [
    "Go through the parameters twice: first to know how long the buffer is and what is in it, then to say where each "
    "parameter lies. Where one ends, the next one begins.",
    "How do you see that two entries of the list are the same parameter? Not by their values. How do you copy without "
    "autograd taking note of it? And which lengths are already divided by `ranks`?",
    "dict.fromkeys(parameters) has each object once, in order. .detach() leaves autograd out, -n % ranks is what is "
    "missing, torch.cat makes the buffer, flat[a:b].view(shape) is a view.",
]
AFTER = (
    "In the package these are three parts. Layout (minizero/engines/layout.py) knows shapes and offsets, without "
    "any memory, because a gradient's buffer is cut at the same places. `Unit.flatten` in minizero/engines/unit.py "
    "fills the buffer in FP32 and sends rank 0's values to all. `point_parameters_at` makes the views, and in stage"
    " 3 it does so again at each use. A parameter that is tied between two blocks belongs to neither: "
    "minizero/engines/units.py gives it to the root unit, which stays gathered while both compute. Read next:"
    ' "Units" in notebooks/02b_zero_engines.ipynb, and Zhao et al., 2023, "PyTorch FSDP", section 3.2.'
)
ONCE = "list(dict.fromkeys(parameters))"
ROWS = "parameter.detach().reshape(-1)"
MISSING = "-sum(len(value) for value in values) % ranks"
CAT = "torch.cat([*values, values[0].new_zeros(missing)])"
VIEW = "parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)"
WRONG = [
    wrong("ties-twice", (ONCE, "list(parameters)")),
    wrong("memory-order", (ROWS, "parameter.detach().as_strided((parameter.numel(),), (1,))")),
    wrong("no-padding", (MISSING, "0")),
    wrong("pads-each", ("for parameter in distinct]\n", "for parameter in distinct]\n    values = [torch.cat([v, "
          "v.new_zeros(-len(v) % ranks)]) for v in values]\n"), ("offset += parameter.numel()",
          "offset += -(-parameter.numel() // ranks) * ranks")),
    wrong("padding-first", (CAT, "torch.cat([values[0].new_zeros(missing), *values])"), ("offset = 0",
                            "offset = missing"), says="padding-not-behind"),
    wrong("copies", (VIEW, VIEW + ".clone()")),
    wrong("loses-the-shape", (VIEW, VIEW.replace(".view(parameter.shape)", ""))),
    wrong("in-the-graph", (ROWS, "parameter.reshape(-1)")),
]  # fmt: skip


class Tied(nn.Module):
    """20 + 12 + 12 + 3 = 47 elements; the last weight is the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(5, 4))
        self.turned = nn.Parameter(torch.randn(3, 4).t())  # its rows are columns in memory
        self.twin = nn.Parameter(self.turned.detach().contiguous())  # the same values, but another parameter
        self.bias = nn.Parameter(torch.randn(3))
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.first @ self.turned @ self.twin.t() + self.bias.sum())
        return hidden @ self.last.t()


def check() -> None:
    model = Tied()
    parameters = [model.first, model.turned, model.twin, model.bias, model.last]
    values = [p.detach().clone() for p in parameters[:4]]
    x = torch.linspace(-1, 1, 10).view(2, 5)
    model(x).sum().backward()
    before, gradients = model(x).detach(), [p.grad.clone() for p in parameters if p.grad is not None]
    try:
        flat = task.flatten(parameters, 8)
    except RuntimeError as error:
        if "must match the size of tensor" in str(error):
            fail(
                "compares-numbers",
                f"{error}. Two parameters of different shapes met. If you asked `p in found`: `in` compares with ==, "
                "which compares the numbers of two tensors. Ask whether it is the same object, with `is` or a dict.",
            )
        raise
    if not isinstance(flat, torch.Tensor):
        fail("not-a-tensor", f"Expected the flat buffer, got {type(flat).__name__}. Is there a return?")
    if flat.requires_grad:
        fail("in-the-graph", "Autograd keeps the buffer's history: it is memory, no result. Copy without autograd.")
    want = torch.cat([value.reshape(-1) for value in values] + [torch.zeros(1)])
    if len(flat) != len(want):
        length_is_wrong(len(flat))
    if not flat.any():
        fail("loses-the-values", "The buffer is all zeros: the model has lost its parameters.")
    if flat[0] == 0 and torch.equal(flat[1:], want[:-1]):
        fail("padding-not-behind", "The zeros stand at the beginning: they belong to the end of the last chunk.")
    turned = torch.cat([values[0].reshape(-1), values[1].t().reshape(-1), *(v.reshape(-1) for v in values[2:])])
    memory = "A transposed parameter went into the buffer in the order of its memory: go row by row, in its shape."
    mistakes = {"memory-order": (torch.cat([turned, torch.zeros(1)]), memory)}
    if torch.equal(flat.sort().values, want.sort().values):
        order = "All values are in the buffer, in another order than that of the parameters. A set has no order."
        mistakes["another-order"] = (flat, order)
    recognise(flat, want, mistakes, "The buffer")
    offset = 0
    for parameter, value in zip(parameters, values):
        place = flat[offset : offset + value.numel()]
        if parameter.shape != value.shape:
            fail(
                "loses-the-shape",
                f"A parameter of shape {tuple(value.shape)} came out as {tuple(parameter.shape)}: view it so.",
            )
        if parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            fail(
                "copies",
                "A parameter has memory of its own: what is written into the buffer never reaches the model.",
            )
        if parameter.data_ptr() != place.data_ptr():
            fail(
                "another-place",
                f"The parameter that begins at element {offset} of the buffer is a view of another place.",
            )
        rows = "A matrix came out with rows and columns exchanged."
        mistakes = {"transposes": (place.view(*reversed(value.shape)).permute(*reversed(range(value.dim()))), rows)}
        recognise(parameter.detach(), value, mistakes, f"The parameter of shape {tuple(value.shape)}")
        offset += value.numel()
    in_training(model, x, before, gradients, flat)
    divided = task.flatten([nn.Parameter(torch.ones(2, 8))], 8)
    if len(divided) != 16:
        fail(
            "pads-a-whole-multiple",
            f"16 elements became {len(divided)}: 8 ranks divide 16 already. Append nothing then.",
        )
    half = task.flatten([nn.Parameter(torch.ones(3, dtype=torch.float16))], 2)
    if half.dtype != torch.float16:
        fail("in-fp32", f"Parameters of float16 got a buffer of {half.dtype}: twice the bytes.")


def length_is_wrong(length: int) -> None:
    known = {
        72: ("ties-twice", "a tied parameter, of 20, is in it twice: the second place would never be read"),
        40: ("same-values-are-one", "two parameters with the same values became one: they will be trained apart"),
        47: ("no-padding", "8 ranks do not divide it: what is missing is zeros at the end"),
        64: ("pads-each", "zeros stand between the parameters, or there are too many: pad once, at the end"),
    }
    name, words = known.get(length, ("values", "47 elements and one zero are expected"))
    fail(name, f"The parameters have 47 elements, for 8 ranks, and the buffer has {length}: {words}.")


def in_training(
    model: nn.Module, x: torch.Tensor, before: torch.Tensor, gradients: list[torch.Tensor], flat: torch.Tensor
) -> None:
    """The model computes what it did; its gradients come; an optimizer's write to the buffer is seen."""
    recognise(model(x).detach(), before, {}, "What the model computes afterwards", tolerance=1e-6)
    for parameter in model.parameters():
        parameter.grad = None
    model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        if parameter.grad is None:
            fail("no-gradient", "A parameter of the model gets no gradient any more: it is another object than before.")
        recognise(parameter.grad, gradient, {}, "A gradient afterwards", tolerance=1e-5)
    flat.zero_()
    if model(x).any():
        fail("copies", "Zeros in the buffer do not reach the model: a parameter has memory of its own.")


class Case(NamedTuple):
    """shapes: with the layout of each in memory. order: in which they come; a tied one comes more than once."""

    ranks: int
    dtype: torch.dtype
    tied: int
    frozen: bool
    shapes: list[tuple[tuple[int, ...], str]]
    order: list[int]
    seed: int


def draw(random: Random) -> list[Case]:
    cases, shapes = [], [*rank_kit.SHAPES, (0, 2)]
    ways = [(n,) for n in [*rank_kit.SIZES, *rank_kit.SIZES, 32]]
    for *row, seed in deal(random, ways, rank_kit.FLOATS, [0, 1, 2], [False, False, True]):
        specs = [(random.choice(shapes), random.choice(rank_kit.LAYOUTS)) for _ in range(random.randint(2, 5))]
        order = [*range(len(specs)), *random.choices(range(len(specs)), k=row[2])]
        cases.append(Case(*row, specs, random.sample(order, len(order)), seed))  # type: ignore[call-arg]
    return cases


def result(case: Case) -> dict[str, Any]:
    """After a call, and after one for one rank more. Then the buffer is written, and the parameters are read."""
    distinct = [
        nn.Parameter(rank_kit.whole(case.seed + i, shape, case.dtype, layout, special=rank_kit.SPECIAL))
        for i, (shape, layout) in enumerate(case.shapes)
    ]
    distinct[0].requires_grad_(not case.frozen)
    gradients = [torch.ones_like(p) if i % 2 else None for i, p in enumerate(distinct)]
    for parameter, gradient in zip(distinct, gradients):
        parameter.grad = gradient
    parameters, found, buffers = tuple(distinct[i] for i in case.order), dict[str, Any](), []
    for ranks in (case.ranks, case.ranks + 1):
        before = [weakref.ref(p.untyped_storage()) for p in parameters if p.numel()]
        with Ledger() as ledger:
            flat = task.flatten(parameters, ranks)
        elsewhere = [p.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for p in distinct if p.numel()]
        buffers.append(flat)
        found |= {
            f"the buffer for {ranks} ranks": flat.clone(),
            f"bytes in the memory of the buffer for {ranks} ranks": flat.untyped_storage().nbytes(),
            f"bytes that flatten took for {ranks} ranks": AtMost(ledger.peak["total"], 3.5, 0.02),
            f"bytes that flatten left for {ranks} ranks": AtMost(ledger.current["total"], 1),
            f"parameters outside of the buffer for {ranks} ranks": sum(elsewhere),
            f"for {ranks} ranks the parameters": [p.clone() for p in distinct],
            f"for {ranks} ranks they have their gradients": [p.grad is g for p, g in zip(distinct, gradients)],
            f"for {ranks} ranks they are contiguous": [p.is_contiguous() for p in distinct],
        }
        if len(buffers) == 1:
            found["pieces of the old memory that live"] = sum(memory() is not None for memory in before)
    placed = [nn.Parameter(p.detach().to("meta")) for p in distinct]
    found["the device, where the parameters are on `meta`"] = task.flatten(placed, case.ranks).device.type
    first, flat = buffers
    flat.copy_(torch.arange(len(flat)))
    written = [p.detach().clone() for p in distinct]
    return found | {"the first buffer in the end": first, "the parameters after a write into the buffer": written}
