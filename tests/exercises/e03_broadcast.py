"""One rank has a tensor that all need: at the start of a run, the parameters. Sent to one rank after the other it takes
N-1 steps, and all the while others wait who could help. In a binomial tree each rank that has it passes it on:

    N = 8, root 0     step 1   0 → 1
                      step 2   0 → 2   1 → 3
                      step 3   0 → 4   1 → 5   2 → 6   3 → 7          log2 N steps

With another root count from there: position = (rank - root) modulo N, so that the root stands at position 0.
"""

from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from minizero.ranks import tree
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, Diagnosis, ranks, wrong

PLAN = [
    "Refuse a root that does not exist with a `ValueError` that names it.",
    'All else inside `with agreement(comm, "broadcast", tensor, root=root, label=label):` – all ranks first say '
    "what they are about to do.",
    "Make `result`, a contiguous copy of `tensor`, with one rank, too: the input is left alone, and receivers need a "
    "place to fill. (The clone of a transposed tensor is transposed.)",
    "Count positions from the root. Positions below `reach` have the tensor; reach is 1 at first.",
    "While reach is less than comm.size: position p < reach sends to position p + reach, if that exists; "
    "position p in reach … 2·reach - 1 receives from position p - reach. Then reach doubles. (A tensor without "
    "elements is not sent.)",
    "Return `result`.",
]
HINTS = [
    "comm.send(result, dst) and comm.recv(result, src) take ranks, not positions; both count modulo comm.size.",
    "The rank that stands `reach` positions further is (comm.rank + reach) % comm.size, whoever the root is.",
    "In each step a rank sends, or receives, or (while its turn has not come) does nothing: if … elif …",
]
AFTER = (
    "Before anything is sent, the ranks agree on operation, shape, dtype and root. If one rank names another root, "
    "all of them get an error that says so, instead of waiting for each other. Positions are counted from the root, "
    "so one loop serves every root. A number of ranks that is no power of 2 needs no case of its own: a partner that "
    "does not exist is left out. Read next: `agreement` in minizero/ranks/agreement.py."
)
WRONG = [
    wrong("root-is-always-zero", "With another root than 0 the ranks get the wrong tensor: count positions from the "
          "root.", ("(comm.rank - root) % comm.size", "comm.rank")),
    wrong("root-does-all", "One rank sends to the others, one after the other. In a tree none sends more than log2 N "
          "times, since those who have the tensor help.",
          ("if position < reach and position + reach < comm.size:\n"
           "                comm.send(result, (comm.rank + reach) % comm.size)\n"
           "            elif reach <= position < 2 * reach:\n                comm.recv(result, (comm.rank - reach) % "
           "comm.size)\n            reach *= 2", "if position == 0:\n                comm.send(result, (comm.rank + "
           "reach) % comm.size)\n            elif position == reach:\n                comm.recv(result, root)\n"
           "            reach += 1")),
    wrong("overwrites-the-input", "A rank's own tensor was overwritten: receive into a copy.",
          ("tensor.contiguous().clone()", "tensor.contiguous()")),
    wrong("returns-its-own", "A rank returned its own tensor, not the root's: return what was received.",
          ("return result", "return tensor")),
]  # fmt: skip


class Case(NamedTuple):
    """groups: how many a world is split into, all of which broadcast."""

    ranks: int
    root: int
    groups: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: str
    differ_in: str
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [(n, root) for n in range(1, 9) for root in (*range(n), -1, n)]
    ways += [(n, random.randrange(n)) for n in (9, random.randint(10, 12))]
    shapes, differ_in = [*rank_kit.SHAPES, (0, 2)], [*["nothing"] * 5, "the root", "the label", "the shape"]
    seed = random.randrange(10**6)
    sets = [(layout, "nothing") for layout in rank_kit.LAYOUTS] + [("contiguous", what) for what in differ_in[5:]]
    whole = [Case(8, 0, 1, (6,), torch.float32, False, "contiguous", "nothing", 1)]
    whole += [whole[0]._replace(ranks=12, root=5)]
    whole += [Case(3, 1, 1, (4, 3, 2), torch.float32, False, layout, what, seed) for layout, what in sets]
    columns = [*rank_kit.DTYPES, torch.int8, torch.bool], [False, True], rank_kit.LAYOUTS, differ_in
    return whole + [Case(*row) for row in deal(random, ways, [1, 1, 2], shapes, *columns)]


def result(case: Case) -> Any:
    """differ_in: what the ranks do not agree on, and must notice before they send anything. -1 and N are no roots."""
    times = rank_kit.shared_times()

    def on_rank(world) -> Any:
        comm = rank_kit.group(world, case.groups)
        seed, special = case.seed + 2 * world.rank, rank_kit.SPECIAL
        mine, other = (rank_kit.whole(seed + i, case.shape, case.dtype, case.layout, special=special) for i in (0, 1))
        mine.requires_grad_(case.requires_grad and case.dtype.is_floating_point)
        mine = mine[None] if case.differ_in == "the shape" and comm.rank == 0 else mine
        earlier = tree.broadcast(other, comm)
        told: list[tuple[str, str]] = []
        comm.observers.append(lambda operation, label, _: told.append((operation, label)))
        watch = rank_kit.Watch(comm, times)
        root = (case.root + (comm.rank == 0)) % comm.size if case.differ_in == "the root" else case.root
        label = f"rank {comm.rank}" if case.differ_in == "the label" else "all ranks"
        try:
            with Ledger() as ledger:
                got = tree.broadcast(mine, comm, root, label=label)
        except ValueError as error:
            return type(error).__name__
        return {
            "the result": got,
            "contiguous": got.is_contiguous(),
            "the input afterwards": mine,
            "the memory in which the input lies": rank_kit.memory(mine),
            "another memory than the input's": got.data_ptr() != mine.data_ptr() or not mine.numel(),
            "the result of the call before": earlier,
            "the collectives and their labels": told,
            "the bytes that it took": AtMost(ledger.peak["total"]),
            "hops in a row": watch.hops,
            "bytes sent": watch.sent,
            "messages": watch.messages,
        }

    try:
        seen = ranks(case.ranks * case.groups, on_rank)
    except Diagnosis as diagnosis:
        if diagnosis.name != "mismatch" or case.differ_in == "nothing":
            raise
        return "an error"
    if case.differ_in != "nothing" and case.ranks > 1:
        return "no error, though the ranks differ"
    if "ValueError" in seen:
        return rank_kit.by_rank(seen)
    hops, *sums = ([rank.pop(name) for rank in seen] for name in ("hops in a row", "bytes sent", "messages"))
    together = {"bytes that all ranks sent": sum(sums[0]), "messages of all ranks": sum(sums[1])}
    return {"the most hops in a row": max(hops), **together, **rank_kit.by_rank(seen)}
