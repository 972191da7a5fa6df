"""ZeRO stage 3: between two uses a rank has only its own chunk of a unit's parameters. Before a layer computes, in
forward and again in backward, the replica is put together from all ranks' chunks: it is unsharded. Here is a stage 3
without an engine. It calls `unshard(unit)` before each use, whatever the unit's state is.

    unit.shard        this rank's chunk, FP32, which the optimizer updates in place
    unit.replica      all chunks, flat, in the computing dtype; its storage is empty (0 bytes), or still full
    unit.comm         the ranks that share the unit; rank r owns chunk r
    unit.version      yours, -1 at first: no other function looks at it
    unit.point_parameters_at(flat)          makes the layer's parameters views of `flat`
    all_gather(chunk, comm, out=…)          `chunk` may be this rank's part of `out`
    x.untyped_storage()                     .nbytes() is its size in bytes, .resize_(bytes) changes it
    x._version                              how often x was written in place; optimizer.step() counts on every rank

A tensor keeps its shape if its storage is empty. Cutting it then (chunk, view) raises an error. Writing to it crashes
Python.
"""

import math
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from minizero.ranks import collectives
from tests.exercises import rank_kit
from tests.exercises.draws import deal, dealt
from tests.exercises.kit import AtMost, ranks, wrong
from tests.exercises.tasks import zero3

PLAN = [
    "Afterwards the parameters are views of unit.replica, which has what all ranks' shards have now, rounded to its "
    "dtype.",
    "It is the same tensor as before, with memory of its own: autograd has saved views of it for backward.",
    "The storage may be full, and nothing was written to the shards since: then nothing is sent.",
    "It may be full of what was there before the optimizer's step. Then, and if it is empty, every chunk is sent "
    "once, in the computing dtype.",
    "All ranks must come to the same answer, or some wait for ever. A rank's own numbers are no sign: a step may leave "
    "one rank's chunk as it was.",
    "Beside the replica there is at most one chunk more.",
]
HINTS = [
    "There are two parts: is there anything to do, and doing it. The first has two reasons, of which either is enough: "
    "no memory, or an old replica. Which of the things in the list tell you so, on all ranks alike?",
    "Doing it has an order, because each step needs the one before: memory, this rank's chunk (a view of the "
    "replica, so that rounding writes into place), the others' chunks. Then remember of which version it is.",
    "unit.replica.nbytes is what the storage needs. `mine = unit.replica.chunk(unit.comm.size)[unit.comm.rank]`; "
    "mine.copy_ rounds. Compare unit.version with unit.shard._version.",
]
AFTER = (
    "The package cuts your function in two: `make_room` and `fill` in minizero/engines/zero3.py. Then prefetch.py can "
    "let another thread fill a unit while this one computes, and memory is given only by the thread that computes. The "
    "question whether there is anything to do is Unit.replica_is_stale in minizero/engines/core.py, one comparison, "
    "since `release` sets the version to -1. The ranks of unit.comm need not be all: with a sharding "
    "factor they are the ranks of one group. PyTorch's FSDP empties and refills storages in the same way. Read next: "
    'minizero/engines/any_model/prefetch.py, and Zhao et al., 2023, "PyTorch FSDP", sections 3.2 and 3.3.'
)
STALE = "unit.version != unit.shard._version"
EMPTY = "not unit.replica.untyped_storage().nbytes()"
IF = f"if {STALE} or {EMPTY}:"
GATHER = "all_gather(mine, unit.comm, out=unit.replica)"
ROUND = "mine.copy_(unit.shard)"
POINT = "unit.point_parameters_at(unit.replica)"
WRONG = [
    wrong("gathers-always", "The unit was whole, and nothing had changed, but it was gathered again. Remember from "
          "which version of the shard the replica was made.", (IF, "if True:")),
    wrong("whole-is-enough", "The optimizer has made a step, and the replica, which was whole, was left with the old "
          "parameters: whole is not up to date. unit.shard._version says that something was written.",
          (IF, f"if {EMPTY}:")),
    wrong("trusts-the-version", "The replica's memory was given back after forward, and backward finds it empty: the "
          "version of the shard is the same, but the numbers are gone. Look at the storage, too.",
          (IF, f"if {STALE}:")),
    wrong("parameters-dangle", "The replica is whole, and the layer's parameters are still empty: make them views of "
          "it.", (POINT, "pass")),
    wrong("forgets-the-shard", "Nothing of what was gathered is a parameter: first put the shard's values into this "
          "rank's chunk of the replica.", (ROUND, "pass")),
    wrong("gathers-into-nothing", "The replica still has only its own chunk: what was gathered went into another "
          "tensor.", (GATHER, "all_gather(mine, unit.comm)")),
    wrong("another-buffer", "unit.replica is another tensor now, or has another storage: what autograd has saved are "
          "views of the old one. Give the storage that is there its memory back, and fill it.",
          (GATHER, "unit.replica = all_gather(mine, unit.comm)")),
    wrong("extra-buffer", "There is a second replica for a moment. Gather into the replica itself.",
          (GATHER, "unit.replica.copy_(all_gather(mine, unit.comm))")),
]  # fmt: skip


EMPTIED, STEP = "the memory is given back", "the optimizer writes"
LET_GO, ELSEWHERE = "the parameters are emptied", "the parameters are views of another tensor"


class Case(NamedTuple):
    """events: before and between the calls of unshard. halves: every second rank shares."""

    ranks: int
    dtype: torch.dtype
    halves: bool
    elements: int
    events: list[str]
    seed: int


def draw(random: Random) -> list[Case]:
    dtypes, ways = [torch.float32, torch.float16, torch.bfloat16], [(n,) for n in rank_kit.SIZES]
    rows = deal(random, ways, dtypes, [False, False, True], [1, 5, 24, 40])
    events = ["unshard", "unshard with grad mode", EMPTIED, LET_GO, ELSEWHERE, STEP]
    plain = ["unshard", "unshard", LET_GO, "unshard", STEP, "unshard", EMPTIED, "unshard"]
    return [Case(4, torch.float16, False, 40, plain, 1)] + [
        Case(n, dtype, halves, elements, ["unshard", *dealt(random, events, 10), STEP, "unshard"], seed)
        for n, dtype, halves, elements, seed in rows
    ]


def result(case: Case) -> dict[str, Any]:
    """After each unshard: what the unit has, where it lies, and the bytes sent and needed."""

    def on_rank(world) -> dict[str, Any]:
        comm = world.split(world.rank % 2) if case.halves else world
        start = torch.linspace(-1, 1, case.elements) * (1 + case.seed % 7)
        start[case.seed % case.elements] = Random(case.seed).choice((1.0, -0.0, math.inf, math.nan))
        unit, found = zero3.Unit([start, torch.ones(2, 3)], comm, case.dtype), dict[str, Any]()
        replica, storage = unit.replica, unit.replica.untyped_storage()
        for _ in range(300):  # steps before: of larger counts Python makes a new number each time
            unit.shard.mul_(1)
        for number, event in enumerate(case.events, 1):
            if event == EMPTIED:
                unit.replica.untyped_storage().resize_(0)
            elif event == LET_GO:
                unit.empty_parameters()
            elif event == ELSEWHERE:
                unit.point_parameters_at(torch.zeros_like(unit.replica))
            elif event == STEP:
                unit.shard += rank_kit.whole(case.seed + number, unit.shard.shape, torch.float32)
                unit.shard /= 3
            else:
                right = collectives.all_gather(unit.shard.to(case.dtype), comm)
                used = [torch.full_like(right, math.nan) for _ in range(64)]
                del used  # so that new memory does not hold the right numbers by chance
                before = comm.bytes_sent
                with Ledger() as ledger, torch.set_grad_enabled("grad" in event):
                    zero3.unshard(unit)
                beside = ledger.peak["total"] - replica.nbytes  # which it counts if it was resized
                found |= {
                    f"event {number}, bytes sent": comm.bytes_sent - before,
                    f"event {number}, bytes beside the replica": AtMost(max(beside, replica.nbytes // comm.size), 1.0),
                    f"event {number}, chunks of the replica that are right": same_bits(unit.replica, right, comm.size),
                    f"event {number}, replica is the same tensor": unit.replica is replica,
                    f"event {number}, bytes of the storage of before": storage.nbytes(),
                    f"event {number}, shard": unit.shard.clone(),
                    f"event {number}, parameters, and where they begin in their memory": [
                        (tuple(p.shape), p.storage_offset()) for p in unit.parameters
                    ],
                    f"event {number}, parameters are views of the replica": all(
                        p.untyped_storage().data_ptr() == storage.data_ptr() for p in unit.parameters
                    ),
                }
        return found

    return rank_kit.by_rank(ranks(case.ranks, on_rank))


def same_bits(tensor: torch.Tensor, other: torch.Tensor, parts: int) -> list[bool]:
    """Part by part. What is wrong is not shown: it may be what lay in memory before."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype or not tensor.untyped_storage().nbytes():
        return [False] * parts
    pairs = zip(*(each.detach().view(torch.uint8).chunk(parts) for each in (tensor, other)))
    return [torch.equal(*pair) for pair in pairs]
