"""ZeRO stage 1 begins where the model is wrapped: every rank keeps all parameters, but its optimizer gets only its own
chunk of them, so that Adam's states are 8Ψ/N bytes, not 8Ψ. `keep` is called for each unit with all its values.

    full            rank 0's values, flat, as long as unit.size; FP32, but of a frozen unit in unit.dtype already
    unit.replica    what the module's parameters are views of, in the computing dtype unit.dtype
    unit.master     what the optimizer's parameters are cut from: this rank's chunk, in the dtype of `full`

In FP32 the master is a view into the replica, and costs nothing. In 16 bits it is a chunk of its own: a view of
`full` would keep all of `full` alive.
"""

import copy
import weakref
from random import Random
from typing import Any, NamedTuple

import torch

from minizero import Zero1
from minizero.engines.any_model.unit import Unit
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, ranks, wrong

PLAN = [
    "unit.replica: `full` in unit.dtype (`full` itself, if that is its dtype). unit.point_parameters_at(unit.replica) "
    "makes the parameters views of it.",
    "unit.master: this rank's chunk of `full`. A view of `full.data`, if the replica is `full`; else a copy of the "
    "chunk.",
    "unit.cut_shards() makes the optimizer's parameters from it.",
]
HINTS = [
    "full.to(unit.dtype) is `full` itself where the dtype is FP32 already.",
    "unit.chunk(full) is this rank's chunk, as a view.",
    "unit.replica is full tells whether the two are one: then no copy is needed. `.data` gives the view a count of "
    "writes of its own: a gather into the replica is no write to the master.",
]
AFTER = (
    "In FP32 the master is a view of the replica, so the optimizer's step writes into the parameters themselves. In "
    "16 bits the package cuts the master from `full`, and not from the replica, which has lost the low bits. It "
    "clones the chunk, because a view would keep all of `full` alive. `cut_shards` may make several parameters of one "
    "chunk: with `group_by` they get options of their own, such as no weight decay. Read next: `Unit.cut_shards` in "
    "minizero/engines/any_model/unit.py."
)
MASTER = "unit.chunk(full.data) if unit.replica is full else unit.chunk(full).clone()"
WRONG = [
    wrong("shards-nothing", "A rank's optimizer gets all parameters, and would keep Adam's states for all of them: "
          "unit.master must be this rank's chunk.", (MASTER, "full")),
    wrong("everyone-takes-chunk-0", "Every rank took chunk 0: take your own.",
          (MASTER, "full.chunk(unit.comm.size)[0]")),
    wrong("parameters-are-elsewhere", "The module's parameters are not views of unit.replica: what is gathered there "
          "would never be used.", ("    unit.point_parameters_at(unit.replica)\n", "")),
    wrong("copies-in-fp32", "In FP32 the master is a view into the replica, and no copy: 4Ψ bytes are enough.",
          (MASTER, "unit.chunk(full).clone()")),
    wrong("keeps-the-whole", "In 16 bits a view of `full` keeps all of it alive: copy the chunk.",
          (MASTER, "unit.chunk(full)")),
    wrong("cut-from-the-replica", "In 16 bits the master has no more bits than the replica, which was rounded: cut it "
          "from `full`, in FP32.", (MASTER, "unit.chunk(unit.replica)")),
    wrong("no-parameters", "The optimizer gets no parameters at all: call unit.cut_shards().",
          ("    unit.cut_shards()", "    pass")),
]  # fmt: skip


class Case(NamedTuple):
    ranks: int
    sharding_factor: int
    dtype: torch.dtype
    neighbours: bool
    frozen: bool
    sizes: tuple[int, int]
    grouped: bool
    seed: int


def draw(random: Random) -> list[Case]:
    """neighbours: a group's ranks are; else as many ranks lie between them as there are groups. frozen: the unit does
    not train. sizes: of the matrix of a linear layer. grouped: its matrix and its bias get options of their own."""
    factors = [(n, factor) for n in rank_kit.SIZES for factor in {1, 2, n} if n % factor == 0]
    ways = [(*way, dtype) for way in factors for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    columns = [False, True], [False, False, True], [(3, 5), (1, 1), (8, 4), (2, 11)], [False, True]
    plain = Case(4, 4, torch.float16, True, False, (3, 5), False, 1)
    return [plain, *(Case(*row) for row in deal(random, ways, *columns))]


def group_of(case: Case, comm: Any) -> Any:
    groups = case.ranks // case.sharding_factor
    return comm.split(comm.rank // case.sharding_factor if case.neighbours else comm.rank % groups)


def unit_of(case: Case, comm: Any, inside: Any, module: torch.nn.Module) -> tuple[Unit, torch.Tensor]:
    """A unit of one linear layer, and all of its values."""
    module, by_dimension = copy.deepcopy(module), (lambda _, p: p.dim()) if case.grouped else None
    unit = Unit("drawn", module, dict(module.named_parameters()), comm, inside, case.dtype, by_dimension)
    full = unit.from_rank_0(comm)
    return unit, full.to(unit.dtype) if case.frozen else full


def layer(case: Case) -> torch.nn.Module:
    """Made before there are ranks: they share the random numbers."""
    module, generator = torch.nn.Linear(*case.sizes), torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
        module.weight[0, 0] = Random(case.seed).choice((1.0, *rank_kit.SPECIAL))
    return module.requires_grad_(not case.frozen)


def result(case: Case) -> dict[str, Any]:
    module = layer(case)

    def on_rank(comm) -> dict[str, Any]:
        unit, full = unit_of(case, comm, group_of(case, comm), module)
        before = comm.bytes_sent
        with Ledger() as ledger:
            Zero1.keep(None, unit, full)  # type: ignore[arg-type]
        replica, master, given = (x.untyped_storage().data_ptr() for x in (unit.replica, unit.master, full))
        kept, same = weakref.ref(full), replica == given
        del full
        return {
            "the replica": unit.replica,
            "the parameters": unit.parameters,
            "the parameters are views of the replica": all(
                p.untyped_storage().data_ptr() == replica for p in unit.parameters
            ),
            "the replica lies in the full buffer": same,
            "the master": unit.master.detach(),
            "the master lies in the replica": master == replica,
            "the full buffer is kept": kept() is not None and not same,
            "bytes that the master keeps alive": AtMost(unit.master.untyped_storage().nbytes()),
            "the optimizer's parameters": unit.shards,
            "the optimizer's parameters lie in the master": all(
                shard.numel() == 0 or shard.untyped_storage().data_ptr() == master for shard in unit.shards
            ),
            "the groups of the optimizer's parameters": unit.groups,
            "bytes at the peak": AtMost(ledger.peak["total"]),
            "bytes sent": comm.bytes_sent - before,
        }

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
