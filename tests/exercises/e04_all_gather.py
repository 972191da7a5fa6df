"""N ranks have a chunk each, and all need all of them: so ZeRO-3 puts a layer's parameters together. The ranks
stand in a ring and only pass to the right. In each of N-1 steps a rank sends on what it got in the step before:

    step 0   rank r sends its own chunk r          and receives chunk r-1 from the left
    step s   rank r sends chunk r-s                and receives chunk r-s-1             (all modulo N)

So every rank sends N-1 chunks of the N, which is the least: each chunk must reach N-1 others.

Before the first step a rank says what will come: comm.transport.soon(tensors, left) names the N-1 tensors that it is
going to receive from the left, in their order. Processes then begin to receive all of them at once.
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from minizero.ranks import collectives
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, ranks, wrong

PLAN = [
    "Who is on the left, who on the right? Modulo comm.size.",
    "In each of comm.size - 1 steps: which chunk goes out, which place in `chunks` is filled?",
    "comm.send_recv(outgoing, right, incoming, left) does both at the same time; incoming is filled in place.",
    "Before that loop: which places will it fill, in which order? Name all of them at once, by comm.transport.soon.",
]
HINTS = [
    "In step 0 rank r sends chunks[r]. What came in, from the left, was the left one's own: chunks[r - 1].",
    "In step 1 rank r passes that on: chunks[r - 1] goes out, chunks[r - 2] comes in.",
    "Index (comm.rank - step) % comm.size goes out. One less comes in: a list of these, over all steps, is for `soon`.",
]
AFTER = (
    "The package has your loop, and your line before it. After `soon` processes on a CPU post all receives at once, "
    "and each message finds its place ready. What has come round the ring has passed through every rank, so it also "
    "proves that all ranks agree: one exchange of messages is saved. Threads ignore the call, and the ring is right "
    "without it. Read next: `soon` in minizero/ranks/processes/transport.py."
)
SOON = "comm.transport.soon([chunks[(comm.rank - step - 1) % comm.size] for step in range(comm.size - 1)], left)"
LOOP = "for step in range(comm.size - 1):\n        # First"
WRONG = [
    wrong("one-step-short", "A chunk is missing: N ranks need N-1 steps.",
          (LOOP, "for step in range(comm.size - 2):\n        # First")),
    wrong("one-step-too-many", "N-1 steps are enough: the last one brought what it had already.",
          (LOOP, "for step in range(comm.size):\n        # First")),
    wrong("resends-its-own", "A rank sends its own chunk again: after step 0 pass on what came in.",
          ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[comm.rank]")),
    wrong("fills-the-wrong-place", "All chunks are there, and in the wrong places: what comes from the left in step 0 "
          "is the left rank's chunk.",
          ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[(comm.rank + step) % comm.size]"),
          ("incoming = chunks[(comm.rank - step - 1) % comm.size]",
           "incoming = chunks[(comm.rank + step + 1) % comm.size]")),
    wrong("extra-buffers", "There is memory beside the chunks: receive into the place where the chunk belongs.",
          ("comm.send_recv(outgoing, right, incoming, left)", "fresh = torch.empty_like(incoming)\n"
           "        comm.send_recv(outgoing, right, fresh, left)\n        incoming.copy_(fresh)")),
    wrong("sends-fp32", "The chunks are sent as FP32: send them as they are.",
          ("comm.send_recv(outgoing, right, incoming, left)", "fresh = torch.empty(incoming.shape)\n"
           "        comm.send_recv(outgoing.float(), right, fresh, left)\n        incoming.copy_(fresh)")),
    wrong("announces-too-few", "Before the loop comm.transport.soon(tensors, left) names all N-1 tensors that are to "
          "come, in their order.", (SOON, "pass")),
    wrong("not-a-ring", "A rank sends to several ranks. In a ring each sends to its neighbour only, always the same.",
          ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[comm.rank]"),
          ("comm.send_recv(outgoing, right, incoming, left)",
           "comm.send_recv(outgoing, (right + step) % comm.size, incoming, (left - step) % comm.size)")),
]  # fmt: skip


class Case(NamedTuple):
    """groups: how many a world is split into, all of which gather. one_buffer: the chunks are views of one tensor."""

    ranks: int
    one_buffer: bool
    groups: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product(range(1, 9), [False, True], [1, 2]), (random.randint(9, 12), False, 1)]
    rows = deal(random, ways, rank_kit.SHAPES, [*rank_kit.DTYPES, torch.bool], rank_kit.LAYOUTS)
    return [Case(4, False, 1, (5,), torch.float32, "contiguous", 1), *map(Case._make, rows)]


def result(case: Case) -> dict[str, Any]:
    """Two gathers with the same chunks. Before the second each rank has other numbers of its own."""
    times = rank_kit.shared_times()

    def on_rank(world) -> dict[str, Any]:
        comm = rank_kit.group(world, case.groups)
        if case.one_buffer:
            chunks = list(rank_kit.whole(0, (comm.size, *case.shape), case.dtype, case.layout))
        else:
            chunks = [rank_kit.whole(r, case.shape, case.dtype, case.layout) for r in range(comm.size)]
        given, watch, seen = list(chunks), rank_kit.Watch(comm, times), dict[str, Any]()
        for number, seed in (("first", case.seed), ("second", case.seed + 100)):
            special = rank_kit.SPECIAL if case.dtype.is_floating_point else ()
            given[comm.rank].copy_(rank_kit.whole(seed + world.rank, case.shape, torch.float32, special=special))
            with Ledger() as ledger:
                collectives.ring_all_gather(chunks, comm)
            seen |= {
                f"after the {number} gather the chunks": [chunk.clone() for chunk in given],
                f"after the {number} gather the memory in which they lie": [rank_kit.memory(chunk) for chunk in given],
                f"after the {number} gather the list has the same tensors": [a is b for a, b in zip(chunks, given)],
                f"the bytes that the {number} gather took": AtMost(ledger.peak["total"]),
            }
        return {
            "bytes sent": watch.sent,
            "hops in a row": watch.hops,
            "receivers": sorted(watch.receivers),
            "tensors that `soon` named before the first message": watch.announced_first,
            "what `soon` named is what came next": watch.kept_its_word,
            **seen,
        }

    return rank_kit.by_rank(ranks(case.ranks * case.groups, on_rank))
