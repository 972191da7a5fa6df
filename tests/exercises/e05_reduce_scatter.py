"""N ranks have a tensor each (their gradients), cut into N chunks; rank r needs chunk r, summed over all ranks.
The partial sum of a chunk travels round the ring. It starts at the right neighbour of the chunk's owner, and each rank
adds its own part.

    chunk c starts at rank c+1, goes right, and after N-1 hops arrives at rank c, complete.

Each rank sends N-1 chunks, and holds one partial sum at a time beside its own tensor, not N.
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
    "The left and the right neighbour, modulo comm.size.",
    "`partial` is what goes out next. Which of my chunks goes first, so that N-1 hops later it is at its owner?",
    "In each of comm.size - 1 steps: comm.send_recv(partial, right, incoming, left) into a buffer `incoming`.",
    "What came in is the sum so far of another chunk: combine(incoming, my own chunk of it) is the new "
    "`partial`. (In this order: `combine` may be a subtraction.) Do not write to `chunks`: they are the caller's.",
    "The buffers: two that take turns suffice (one goes out while the other is filled), however many ranks there "
    'are. tag(buffer, "communication") tells the ledger what they are, and returns nothing; you may leave it out. '
    "(The package asks comm.transport.ring_buffers(partial) how many, since processes are faster with more small "
    "ones. You need not.)",
    "Return the last partial: chunk comm.rank, combined over all ranks. Where `out` is given, the last sum goes "
    "there, and `out` is what is returned: torch.add(a, b, out=c) writes into c.",
]
HINTS = [
    "Rank r sends chunk r-1 first: its right neighbour is r+1, and after N-1 hops from r it arrives at r-1.",
    "In step 0 rank r receives from r-1, which sent chunk r-2. So to what came in at step s belongs my chunk r-2-s.",
    "combine(incoming, mine, out=incoming) makes the sum in the buffer that was received into.",
    "With one buffer the outgoing tensor would be overwritten by the incoming one: use buffers[step % 2].",
]
AFTER = (
    "The package asks the transport for the number of buffers. Threads take two at most. Processes take more if "
    "chunks are small: they post several receives beforehand and wake up less often. The last sum goes straight into "
    "`out`, so the all-reduce needs no copy after it. Each chunk is summed by one chain of ranks, in one order that "
    "never changes, so every run gives the same bits. Read next: section 3 of notebooks/01b_collectives_cost.ipynb."
)
WRONG = [
    wrong("wrong-chunk", "Begin one chunk earlier, with chunk r-1.",
          ("partial = chunks[(comm.rank - 1) % comm.size]", "partial = chunks[comm.rank]"),
          ("chunks[(comm.rank - 2 - step) % comm.size]", "chunks[(comm.rank - 1 - step) % comm.size]")),
    wrong("off-by-one", "To what came in from the left at step s belongs your chunk r-2-s, not r-1-s.",
          ("(comm.rank - 2 - step)", "(comm.rank - 1 - step)")),
    wrong("does-not-add", "Add your own part to what comes in, and pass that on.",
          ("partial = combine(incoming, mine, out=out if last and out is not None else incoming)",
           "partial = incoming")),
    wrong("always-adds", "With combine=torch.maximum it still summed: call `combine`, not +.",
          ("combine(incoming,", "torch.add(incoming,")),
    wrong("buffer-for-each-step", "Two buffers that take turns are enough.",
          ("count = min(comm.transport.ring_buffers(partial), comm.size - 1)", "count = comm.size - 1"),
          ("buffers[step % len(buffers)]", "buffers[step]")),
    wrong("overwrites-the-input", "`chunks` belong to the caller. Sum in the buffer.",
          ("mine = chunks[(comm.rank - 2 - step) % comm.size]", "mine = chunks[(comm.rank - 2 - step) % comm.size]\n"
           "        incoming = mine.add_(incoming)\n        mine = torch.zeros_like(mine)")),
    wrong("ignores-out", "`out` was given and not filled: the last sum goes there.",
          ("out if last and out is not None else incoming", "incoming")),
    wrong("the-lesson-s-ring", "It passes on what came in, as the lesson's whole ring does, and so adds up chunks with "
          "different numbers. Here the sum travels: add your own part to what came in, and pass the sum on.",
          ("partial = chunks[(comm.rank - 1)", "partial = total = chunks[comm.rank"),
          ("% comm.size]\n    # Two", "]\n    # Two"), ("return partial", "return total"), (
           "partial = combine(incoming, mine, out=out if last and out is not None else incoming)",
           "total, partial = combine(total, incoming), incoming")),
]  # fmt: skip


class Case(NamedTuple):
    """groups: how many a world is split into. layout: of the chunks; out_layout: of `out`, if it is another tensor."""

    ranks: int
    combine: str
    groups: int
    out: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    out_layout: str
    seed: int


COMBINE: Any = {"add": torch.add, "maximum": torch.maximum, "minimum": torch.minimum, "subtract": torch.sub}


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product(range(2, 9), COMBINE), (random.randint(9, 12), "add")]
    outs = ["none", "another tensor", "the rank's own chunk"]
    columns = outs, rank_kit.SHAPES, rank_kit.DTYPES, rank_kit.LAYOUTS, rank_kit.LAYOUTS
    plain = [Case(4, op, 1, "none", (2,), torch.float32, "contiguous", "contiguous", 2) for op in ("add", "maximum")]
    return plain + [Case(*row) for row in deal(random, ways, [1, 1, 2], *columns)]


HEAVY = Case(4, "add", 1, "none", (20_000,), torch.float32, "contiguous", "contiguous", 2)


def result(case: Case) -> dict[str, Any]:
    """Of the second of two calls. The largest of 0 and -0 may be either, so there is no -0 among the numbers."""
    times = rank_kit.shared_times()
    special = rank_kit.SPECIAL if case.combine in ("add", "subtract") else rank_kit.SPECIAL[1:]

    def on_rank(world) -> dict[str, Any]:
        comm = rank_kit.group(world, case.groups)
        n, r = comm.size, comm.rank
        before, chunks = (
            [rank_kit.whole(seed + c, case.shape, case.dtype, case.layout, special=special) for c in range(n)]
            for seed in (case.seed, case.seed + 100 + 10 * world.rank)
        )
        given = list(chunks)
        another = rank_kit.whole(case.seed, case.shape, case.dtype, case.out_layout)
        out = {"none": None, "another tensor": another, "the rank's own chunk": chunks[r]}[case.out]
        earlier = collectives.ring_reduce_scatter(before, comm)
        watch, combine, combined = rank_kit.Watch(comm, times), COMBINE[case.combine], list[int]()

        def counted(a, b, **options):
            combined.append(b.numel())
            return combine(a, b, **options)

        with Ledger() as ledger:
            got = collectives.ring_reduce_scatter(chunks, comm, counted if case.seed % 2 else combine, out)
        enough = 5 * chunks[0].nbytes  # two buffers, a sum, the next one if `combine` makes it anew, and what it needs
        return {
            "elements combined, if they are counted": sum(combined),
            "bytes sent": watch.sent,
            "hops in a row": watch.hops,
            "receivers": sorted(watch.receivers),
            "the result": got.clone() if isinstance(got, torch.Tensor) else got,
            "`out`": out,
            "the result is `out`": out is not None and got is out,
            "the memory in which `out` lies": rank_kit.memory(another),
            "the chunks": [chunk.clone() for chunk in given],
            "the list has the same tensors": [a is b for a, b in zip(chunks, given)],
            "the memory in which the chunks lie": [rank_kit.memory(chunk) for chunk in given],
            "the result of the call before": earlier,
            "the bytes that it took": AtMost(max(enough, ledger.peak["total"]), 1.0),
            "what `soon` named, if it was called, is what came next": watch.kept_its_word,
        }

    return rank_kit.by_rank(ranks(case.ranks * case.groups, on_rank))
