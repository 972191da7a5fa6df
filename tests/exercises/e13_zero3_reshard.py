"""ZeRO stage 3: when a unit has computed, its replica must go, or every rank soon holds all parameters. But
autograd has saved views of it for backward: setting the parameters to something else frees nothing, because
those views keep the storage alive. So the storage itself is emptied; before backward it is given memory again
and filled.

    unit.replica    the replica; `unit.replica.untyped_storage()` is its memory, `.resize_(bytes)` changes how much
    unit.master     this rank's chunk, which stays
    unit.point_parameters_at(None)   makes the parameters empty, so that using one is an error and not nonsense
"""

from typing import Any, cast

import torch

from minizero import GPT, Zero3
from minizero.memory import Ledger
from tests.exercises.kit import fail, ranks, size, wrong
from tests.exercises.training import PSI, SMALL, check_training, part, train

PLAN = ["Empty the storage of the replica: 0 bytes.", "Make the module's parameters empty."]
HINTS = [
    "`del`, or assigning a new tensor, only drops one reference of several. The storage has a method to change "
    "its size.",
    "unit.replica.untyped_storage().resize_(0)",
]
EMPTY = "unit.replica.untyped_storage().resize_(0)"
WRONG = [
    wrong("frees-nothing", (EMPTY, "pass")),
    wrong("zeros", (EMPTY, "unit.replica.zero_()")),
    wrong("another-buffer", (EMPTY, "unit.replica = torch.empty(0, dtype=unit.dtype)")),
    wrong("parameters-dangle", ("unit.point_parameters_at(None)", "pass")),
    wrong("frees-the-shard", (EMPTY, EMPTY + "\n    unit.master.untyped_storage().resize_(0)")),
    wrong("half-of-it", ("resize_(0)", "resize_(unit.replica.nbytes // 2)")),
]


class Unit:
    """As much of a unit as the method needs."""

    name, dtype, size = "blocks.0", torch.float32, 12_000

    def __init__(self) -> None:
        self.replica = torch.ones(self.size)
        self.master = self.replica[:3000].clone()
        self.parameters = [torch.nn.Parameter(torch.empty(0))]
        self.point_parameters_at(self.replica)

    def point_parameters_at(self, flat):
        self.parameters[0].data = torch.empty(0, 0) if flat is None else flat.view(3, 4000)


def check() -> None:
    releases()
    for rank, held in enumerate(ranks(4, step)):
        if held > 1.5 * 4 * PSI / 4:
            fail("frees-nothing", f"Rank {rank} holds {size(held)} of parameters after a step, all of them.")
    check_training(ranks(4, train, Zero3, 2), "ZeRO-3")


def releases() -> None:
    unit = Unit()
    buffer, view = unit.replica, unit.replica[:10]  # as autograd has one
    Zero3.release(cast(Zero3, None), cast(Any, unit))
    held = buffer.untyped_storage().nbytes()
    if unit.replica is not buffer:
        fail(
            "another-buffer",
            f"unit.replica is a new tensor, and the old one's {size(held)} live on in the views that autograd has "
            "saved: empty the storage that is there.",
        )
    if not unit.master.untyped_storage().nbytes():
        fail("frees-the-shard", "This rank's own chunk, unit.master, was emptied too: nobody has it any more.")
    if held == 48_000 and not view.any():
        fail("zeros", f"The replica is full of zeros now, and still has its {size(held)}: give the memory back.")
    if held == 48_000:
        fail(
            "frees-nothing",
            f"A rank still holds all {size(held)} of the unit's replica after its forward: empty the storage. "
            "Autograd's views keep it alive.",
        )
    if held:
        fail("half-of-it", f"{size(held)} of the replica are still there: give all of it back, 0 bytes.")
    if any(p.numel() for p in unit.parameters):
        fail(
            "parameters-dangle",
            "The parameters still point into memory that is gone: make them empty, so that using one is an error.",
        )


def step(comm) -> int:
    model = Zero3(GPT(SMALL), comm, prefetch=0)
    with Ledger(model) as ledger:
        model(*part(comm)).backward()
    return ledger.current["parameters"]
