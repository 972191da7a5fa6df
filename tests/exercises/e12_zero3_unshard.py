"""ZeRO stage 3: between two uses a rank has only its own chunk of a unit's parameters. Before the unit
computes, in forward and again in backward, the replica is put together from all ranks' chunks: it is unsharded.

    unit.master     this rank's chunk, FP32: what the optimizer updates
    unit.replica    the replica, in the computing dtype; its memory has just been given back, with anything in it
    unit.comm       the ranks that share the unit: with a sharding factor fewer than self.comm has

    sent in a step: (N-1)/N of Ψ in forward, as much in backward
"""

import torch

from minizero import GPT, Zero3
from minizero.memory import Ledger
from tests.exercises.kit import fail, ranks, recognise, size, wrong
from tests.exercises.training import SMALL, check_training, train

PLAN = [
    "This rank's chunk of unit.replica, as a view.",
    "Round the master into it: copy_ rounds to the dtype of what it fills.",
    "Gather all chunks, of the ranks in unit.comm, into unit.replica (out=…, label=unit.name).",
]
HINTS = [
    "unit.chunk(unit.replica) is the view.",
    "What travels is `mine`, in the computing dtype: in 16 bits half as much as the masters would be.",
    "all_gather(mine, unit.comm, out=unit.replica, label=unit.name): `mine` is this rank's part of `out` already.",
]
GATHER = "all_gather(mine, unit.comm, out=unit.replica, label=unit.name)"
ROUND = "mine.copy_(unit.master)"
WRONG = [
    wrong("forgets-the-master", (ROUND, "pass")),
    wrong("only-its-own", (GATHER, "pass")),
    wrong("gathers-into-nothing", (GATHER, "all_gather(mine, unit.comm, label=unit.name)")),
    wrong("sends-fp32", (GATHER, "unit.replica.copy_(all_gather(unit.master, unit.comm, label=unit.name))")),
    wrong("another-buffer", (GATHER, "unit.replica = all_gather(mine, unit.comm, label=unit.name)")),
    wrong("all-ranks", (GATHER, GATHER.replace("unit.comm", "self.comm"))),
    wrong("sums", (GATHER, "from minizero.ranks.collectives import all_reduce\n    "
          "unit.replica.copy_(all_reduce(torch.nan_to_num(unit.replica, 1.0), unit.comm))")),
    wrong("extra-buffer", (GATHER, "unit.replica.copy_(all_gather(mine, unit.comm, label=unit.name))")),
    wrong("keeps-a-copy", (GATHER, GATHER + "\n    unit.copy = unit.replica.clone()"), says="extra-buffer"),
    wrong("sends-twice", (GATHER, GATHER + f"\n    {GATHER}")),
]  # fmt: skip


def check() -> None:
    ranks(4, on_rank)
    ranks(4, in_half)
    try:
        results = ranks(4, in_groups)
    except ValueError as error:
        if "all_gather: out must be" in str(error):
            fail(
                "all-ranks",
                "With a sharding factor of 2 it gathers from all 4 ranks: a unit is shared by the ranks in unit.comm.",
            )
        raise
    check_training(results, "ZeRO-3 with a sharding factor")
    check_training(ranks(4, train, Zero3, 2), "ZeRO-3")


def fresh(comm, **options):
    """A model, one of its units with nothing in the replica, and what should be in it."""
    module = GPT(SMALL)
    model = Zero3(module, comm, prefetch=0, **options)
    unit = model.units[1]
    plain = dict(GPT(SMALL).named_parameters())
    want = torch.zeros(unit.size)
    for view, name in zip(unit.layout.views(want), unit.layout.names):
        view.copy_(plain[name].detach())
    model.make_room(unit)
    unit.replica.fill_(torch.nan)
    return model, unit, want


def on_rank(comm) -> None:
    model, unit, want = fresh(comm)
    buffer, before = unit.replica, comm.bytes_sent
    model.fill(unit)
    sent, r = comm.bytes_sent - before, comm.rank
    if unit.replica is not buffer:
        fail(
            "another-buffer",
            "unit.replica is another tensor now: the parameters, and what autograd has saved, are views of the old "
            "one. Fill the buffer that is there: out=unit.replica.",
        )
    missing = buffer.isnan().view(comm.size, -1).any(1)
    if bool(missing.all()):
        fail(
            "forgets-the-master",
            "Nothing of what was gathered is a parameter: first put the master's values into this rank's chunk "
            "of the replica.",
        )
    if not missing[r] and int(missing.sum()) == comm.size - 1:
        if sent == 0:
            fail("only-its-own", f"Rank {r} has its own chunk and none of the others': gather them.")
        fail(
            "gathers-into-nothing",
            f"Rank {r} sent {size(sent)}, and the replica still has only its own chunk: what was gathered went "
            "into another tensor. Give the replica as out=.",
        )
    if not torch.equal(buffer, want) and sent > 1.2 * want.nbytes * (comm.size - 1) / comm.size:
        fail(
            "sums", f"The replica is a sum over ranks, and {size(sent)} were sent: gather the chunks, do not add them."
        )
    recognise(buffer, want, {}, f"The replica on rank {r}")
    if sent > want.nbytes * (comm.size - 1) // comm.size:
        fail("sends-twice", f"Rank {r} sent {size(sent)} for a unit of {size(want.nbytes)}: gather it once.")


def in_half(comm) -> None:
    model, unit, want = fresh(comm, dtype=torch.float16)
    before = comm.bytes_sent
    with Ledger() as ledger:
        model.fill(unit)
    sent, enough = comm.bytes_sent - before, 2 * unit.size * (comm.size - 1) // comm.size
    if sent > enough:
        fail(
            "sends-fp32",
            f"In FP16 rank {comm.rank} sent {size(sent)} for a unit, where {size(enough)} are enough: round "
            "first, then send the 16-bit numbers.",
        )
    recognise(unit.replica, want.half(), {}, "The FP16 replica")
    if ledger.peak["total"] > unit.replica.nbytes // 2:
        fail(
            "extra-buffer",
            f"It took {size(ledger.peak['total'])} beside the replica of {size(unit.replica.nbytes)}: a second one. "
            "Gather into the replica itself, with out=.",
        )


def in_groups(comm):
    return train(comm, lambda module, comm, dtype: Zero3(module, comm, sharding_factor=2), 2)
