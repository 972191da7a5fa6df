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

import contextlib
import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from minizero import barrier
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal, dealt
from tests.exercises.kit import AtMost, Diagnosis, fail, ranks, recognise, size, wrong
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
    "question whether there is anything to do is Unit.replica_is_stale in minizero/engines/unit.py, with the same two "
    "reasons. The ranks of unit.comm need not be all: with a sharding factor they are the ranks of one group. "
    "PyTorch's FSDP empties and refills storages in the same way. Read next: minizero/engines/prefetch.py, and Zhao et "
    'al., 2023, "PyTorch FSDP", sections 3.2 and 3.3.'
)
STALE = "unit.version != unit.shard._version"
EMPTY = "not unit.replica.untyped_storage().nbytes()"
IF = f"if {STALE} or {EMPTY}:"
GATHER = "all_gather(mine, unit.comm, out=unit.replica)"
ROUND = "mine.copy_(unit.shard)"
POINT = "unit.point_parameters_at(unit.replica)"
WRONG = [
    wrong("gathers-always", (IF, "if True:")),
    wrong("whole-is-enough", (IF, f"if {EMPTY}:")),
    wrong("trusts-the-version", (IF, f"if {STALE}:")),
    wrong("parameters-dangle", (POINT, "pass")),
    wrong("forgets-the-shard", (ROUND, "pass")),
    wrong("gathers-into-nothing", (GATHER, "all_gather(mine, unit.comm)")),
    wrong("another-buffer", (GATHER, "unit.replica = all_gather(mine, unit.comm)")),
    wrong("extra-buffer", (GATHER, "unit.replica.copy_(all_gather(mine, unit.comm))")),
]  # fmt: skip


def check() -> None:
    try:
        ranks(4, on_rank)
    except RuntimeError as error:
        if "out of bounds for storage" in str(error):
            fail(
                "storage-too-small",
                "unit.replica was cut while its storage was smaller than its shape needs. First give it memory: "
                "unit.replica.nbytes is how much, and .resize_ of a storage counts bytes, not numbers.",
            )
        raise
    try:
        ranks(4, after_a_step)
    except Diagnosis as diagnosis:
        if diagnosis.name in ("deadlock", "mismatch"):
            fail(
                "ranks-disagree",
                "The step changed no number of rank 0's chunk. Rank 0 then sent nothing, and the others wait "
                "for it. Decide by what is the same on all ranks: that a step was taken, not which numbers it changed.",
            )
        raise
    ranks(4, in_half)
    train_as_one()


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((8, 8), (7,))]  # 71: one is missing


def whole(comm, of: list[torch.Tensor]) -> torch.Tensor:
    return F.pad(torch.cat([value.reshape(-1) for value in of]), (0, -sum(v.numel() for v in of) % comm.size))


def on_rank(comm) -> None:
    unit, r = zero3.Unit(values(), comm), comm.rank
    want, buffer, storage, before = whole(comm, values()), unit.replica, unit.replica.untyped_storage(), comm.bytes_sent
    # The replica's new memory must not hold the right numbers by chance, from a tensor that was freed.
    used = [torch.full_like(want, torch.nan) for _ in range(64)]
    del used
    zero3.unshard(unit)
    sent = comm.bytes_sent - before
    if unit.replica is not buffer or storage.nbytes() < buffer.untyped_storage().nbytes():
        fail(
            "another-buffer",
            "unit.replica is another tensor now, or has another storage: what autograd has saved are views of the old "
            "one. Give the storage that is there its memory back, and fill it.",
        )
    if storage.nbytes() < buffer.nbytes:
        fail("no-memory", f"The replica's storage has {storage.nbytes()} bytes, not {buffer.nbytes}.")
    right = [torch.equal(*pair) for pair in zip(buffer.chunk(comm.size), want.chunk(comm.size))]
    enough = want.nbytes * (comm.size - 1) // comm.size
    if not all(right) and sent > enough:
        fail(
            "sums", f"The replica is a sum over ranks, and {size(sent)} were sent: gather the chunks, do not add them."
        )
    if right == [rank == r for rank in range(comm.size)]:
        if sent == 0:
            fail("only-its-own", f"Rank {r} has its own chunk and none of the others': gather them.")
        fail(
            "gathers-into-nothing",
            f"Rank {r} sent {size(sent)}, and the replica still has only its own chunk: what was gathered went "
            "into another tensor.",
        )
    if not any(right):
        fail(
            "forgets-the-shard",
            "Nothing of what was gathered is a parameter: first put the shard's values into this rank's chunk of the "
            "replica.",
        )
    recognise(buffer, want, {}, f"The replica on rank {r}")
    if sent > enough:
        fail("sends-twice", f"Rank {r} sent {size(sent)} for a unit of {size(want.nbytes)}: gather it once.")
    if [p.shape for p in unit.parameters] != [v.shape for v in values()]:
        fail(
            "parameters-dangle",
            "The replica is whole, and the layer's parameters are still empty: make them views of it.",
        )
    before = comm.bytes_sent
    unit.point_parameters_at(None)
    zero3.unshard(unit)
    if [p.shape for p in unit.parameters] != [v.shape for v in values()]:
        fail(
            "points-only-when-it-gathers",
            "The replica was whole, so nothing had to be sent. But the layer's parameters were empty, and they still "
            "are: make them views of the replica in any case.",
        )
    if comm.bytes_sent > before:
        fail(
            "gathers-always",
            f"The unit was whole, and nothing had changed, but rank {r} sent {size(comm.bytes_sent - before)} again. "
            "Remember from which version of the shard the replica was made.",
        )


def after_a_step(comm) -> None:
    unit = zero3.Unit(values(), comm)
    zero3.unshard(unit)
    with torch.no_grad():
        unit.shard.add_(comm.rank)  # on rank 0 all numbers stay as they were
    before, want = comm.bytes_sent, whole(comm, values())
    want += torch.arange(comm.size).repeat_interleave(len(want) // comm.size)
    zero3.unshard(unit)
    barrier(comm)  # no rank says what it found as long as another waits
    if comm.bytes_sent == before:
        fail(
            "whole-is-enough",
            "The optimizer has made a step, and the replica, which was whole, was left with the old parameters: whole "
            "is not up to date. unit.shard._version says that something was written.",
        )
    recognise(unit.replica, want, {}, "The replica after an optimizer's step")
    unit.replica.untyped_storage().resize_(0)
    before = comm.bytes_sent
    with contextlib.suppress(RuntimeError):  # from PyTorch: no memory, and a view is wanted
        zero3.unshard(unit)
    if comm.bytes_sent == before:
        fail(
            "trusts-the-version",
            "The replica's memory was given back after forward, and backward finds it empty: the version of the shard "
            "is the same, but the numbers are gone. Look at the storage, too.",
        )
    recognise(unit.replica, want, {}, "The replica in backward")


def in_half(comm) -> None:
    large = [torch.linspace(0, 1, 12_000)]
    unit = zero3.Unit(large, comm, torch.float16)
    before = comm.bytes_sent
    with Ledger() as ledger:
        zero3.unshard(unit)
    sent, enough = comm.bytes_sent - before, 2 * 12_000 * (comm.size - 1) // comm.size
    if sent > enough:
        fail(
            "sends-fp32",
            f"In FP16 rank {comm.rank} sent {size(sent)} for a unit, where {size(enough)} are enough: round "
            "first, then send the 16-bit numbers.",
        )
    recognise(unit.replica, large[0].half(), {}, "The FP16 replica")
    if ledger.peak["total"] > 1.5 * unit.replica.nbytes:
        fail(
            "extra-buffer",
            f"It took {size(ledger.peak['total'])} for a replica of {size(unit.replica.nbytes)}: a second one. "
            "Gather into the replica itself.",
        )


# Training, with units 0 1 2 1 0 in forward: some are used twice.

ORDER = (0, 1, 2, 1, 0)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, weight, bias))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y - 1).square().mean()


def start() -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The parameters of three units, and inputs of two steps of two micro-batches on four ranks."""
    generator = torch.Generator().manual_seed(1)
    units = [[torch.randn(shape, generator=generator) / 3 for shape in ((7, 7), (7,))] for _ in range(3)]
    return units, torch.randn(2, 2, 4, 5, 7, generator=generator)


def on_four(comm) -> list[torch.Tensor]:
    parameters, inputs = start()
    units = [zero3.Unit(each, comm) for each in parameters]
    for micro_batches in inputs:
        for x in micro_batches:
            zero3.step([(units[i], layer) for i in ORDER], x[comm.rank], loss_of)
        for unit in units:
            assert unit.average is not None
            unit.shard -= 0.1 * unit.average
            unit.average = None
    return [unit.shard for unit in units]


def train_as_one() -> None:
    """The same in one process, to compare with."""
    parameters, inputs = start()
    for each in parameters:
        for parameter in each:
            parameter.requires_grad_()
    flat = [parameter for each in parameters for parameter in each]
    for micro_batches in inputs:
        total = torch.zeros(())
        for x in micro_batches.flatten(0, 1):
            for i in ORDER:
                x = layer(x, *parameters[i])
            total = total + loss_of(x) / 4
        with torch.no_grad():
            for parameter, gradient in zip(flat, torch.autograd.grad(total, flat)):
                parameter -= 0.1 * gradient
    results = ranks(4, on_four)
    for i, each in enumerate(parameters):
        want = torch.cat([parameter.detach().reshape(-1) for parameter in each])
        got = torch.cat([shards[i] for shards in results])[: len(want)]
        recognise(got, want, {}, f"Unit {i} after two steps of two micro-batches", tolerance=1e-5)


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
    return [
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
        for number, event in enumerate(case.events, 1):
            if event == EMPTIED:
                unit.replica.untyped_storage().resize_(0)
            elif event == LET_GO:
                unit.point_parameters_at(None)
            elif event == ELSEWHERE:
                unit.point_parameters_at(torch.zeros_like(unit.replica))
            elif event == STEP:
                unit.shard += rank_kit.whole(case.seed + number, unit.shard.shape, torch.float32)
                unit.shard /= 3
            else:
                before = comm.bytes_sent
                with Ledger() as ledger, torch.set_grad_enabled("grad" in event):
                    zero3.unshard(unit)
                beside = ledger.peak["total"] - replica.nbytes  # which it counts if it was resized
                found |= {
                    f"event {number}, bytes sent": comm.bytes_sent - before,
                    f"event {number}, bytes beside the replica": AtMost(max(beside, replica.nbytes // comm.size), 1.0),
                    f"event {number}, replica": unit.replica.clone(),
                    f"event {number}, replica is the same tensor": unit.replica is replica,
                    f"event {number}, bytes of the storage of before": storage.nbytes(),
                    f"event {number}, shard": unit.shard.clone(),
                    f"event {number}, parameters": [p.detach().clone() for p in unit.parameters],
                    f"event {number}, parameters are views of the replica": all(
                        p.untyped_storage().data_ptr() == storage.data_ptr() for p in unit.parameters
                    ),
                }
        return found

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
