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
from tests.exercises.kit import AtMost, wrong
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
    "any memory, because a gradient's buffer is cut at the same places. `Unit.from_rank_0` in minizero/engines/core.py "
    "fills the buffer in FP32 and sends rank 0's values to all. `point_parameters_at` makes the views, and in stage"
    " 3 it does so again at each use. A parameter that is tied between two blocks belongs to neither: "
    "minizero/engines/any_model/units.py gives it to the root unit, which stays gathered while both compute. Read next:"
    ' "Units" in notebooks/02b_zero_engines.ipynb, and Zhao et al., 2023, "PyTorch FSDP", section 3.2.'
)
ONCE = "list(dict.fromkeys(parameters))"
ROWS = "parameter.detach().reshape(-1)"
MISSING = "-sum(len(value) for value in values) % ranks"
CAT = "torch.cat([*values, values[0].new_zeros(missing)])"
VIEW = "parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)"
WRONG = [
    wrong("ties-twice", "A tied parameter is in the buffer twice: the second place would never be read.",
          (ONCE, "list(parameters)")),
    wrong("memory-order", "A transposed parameter went into the buffer in the order of its memory: go row by row, in "
          "its shape.", (ROWS, "parameter.detach().as_strided((parameter.numel(),), (1,))")),
    wrong("no-padding", "The number of ranks does not divide the buffer: what is missing is zeros at the end.",
          (MISSING, "0")),
    wrong("pads-each", "Zeros stand between the parameters: pad once, at the end.",
          ("for parameter in distinct]\n", "for parameter in distinct]\n    values = [torch.cat([v, "
           "v.new_zeros(-len(v) % ranks)]) for v in values]\n"),
          ("offset += parameter.numel()", "offset += -(-parameter.numel() // ranks) * ranks")),
    wrong("padding-not-behind", "The zeros stand at the beginning: they belong to the end of the last chunk.",
          (CAT, "torch.cat([values[0].new_zeros(missing), *values])"), ("offset = 0", "offset = missing")),
    wrong("copies", "A parameter has memory of its own: what is written into the buffer never reaches the model.",
          (VIEW, VIEW + ".clone()")),
    wrong("loses-the-shape", "A parameter came out flat: view its place in the buffer in its shape.",
          (VIEW, VIEW.replace(".view(parameter.shape)", ""))),
    wrong("in-the-graph", "Autograd keeps the buffer's history: it is memory, no result. Copy without autograd.",
          (ROWS, "parameter.reshape(-1)")),
]  # fmt: skip


class Case(NamedTuple):
    """shapes: with the layout of each in memory. order: in which they come; a tied one comes more than once.

    special: "alias": a parameter of its own has the memory of the first one; "meta": all are on another device.
    """

    ranks: int
    dtype: torch.dtype
    tied: int
    frozen: bool
    shapes: list[tuple[tuple[int, ...], str]]
    order: list[int]
    seed: int
    special: str = ""


def draw(random: Random) -> list[Case]:
    plain = [((5, 4), "contiguous"), ((4, 3), "transposed"), ((3,), "contiguous")]
    cases, shapes = [Case(8, torch.float32, 1, False, plain, [0, 1, 2, 0], 1)], [*rank_kit.SHAPES, (0, 2)]
    cases += [cases[0]._replace(special="alias")]
    ways = [(n,) for n in [*rank_kit.SIZES, *rank_kit.SIZES, 32]]
    for *row, seed in deal(random, ways, rank_kit.FLOATS, [0, 1, 2], [False, False, True]):
        specs = [(random.choice(shapes), random.choice(rank_kit.LAYOUTS)) for _ in range(random.randint(2, 5))]
        order = [*range(len(specs)), *random.choices(range(len(specs)), k=row[2])]
        cases.append(Case(*row, specs, random.sample(order, len(order)), seed))  # type: ignore[call-arg]
    return [*cases, cases[0]._replace(special="meta")]


def result(case: Case) -> dict[str, Any]:
    """After a call, and after one for one rank more. Then the buffer is written, and the parameters are read."""
    distinct = [
        nn.Parameter(rank_kit.whole(case.seed + i, shape, case.dtype, layout, special=rank_kit.SPECIAL))
        for i, (shape, layout) in enumerate(case.shapes)
    ]
    distinct += [nn.Parameter(distinct[0].detach())] * (case.special == "alias")
    distinct[0].requires_grad_(not case.frozen)
    gradients = [torch.ones_like(p) if i % 2 else None for i, p in enumerate(distinct)]
    for parameter, gradient in zip(distinct, gradients):
        parameter.grad = gradient
    if case.special == "meta":
        return {"the device of the buffer": task.flatten([nn.Parameter(p.to("meta")) for p in distinct], 8).device.type}
    parameters, found, buffers = tuple(distinct[i] for i in case.order), dict[str, Any](), []
    parameters += tuple(distinct[len(case.shapes) :])
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
    first, flat = buffers
    flat.copy_(torch.arange(len(flat)))
    written = [p.detach().clone() for p in distinct]
    return found | {"the first buffer in the end": first, "the parameters after a write into the buffer": written}
