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
    wrong("wrong-chunk", ("partial = chunks[(comm.rank - 1) % comm.size]", "partial = chunks[comm.rank]"),
          ("chunks[(comm.rank - 2 - step) % comm.size]", "chunks[(comm.rank - 1 - step) % comm.size]")),
    wrong("off-by-one", ("(comm.rank - 2 - step)", "(comm.rank - 1 - step)")),
    wrong("does-not-add", ("partial = combine(incoming, mine, out=out if last and out is not None else incoming)",
                           "partial = incoming")),
    wrong("always-adds", ("combine(incoming,", "torch.add(incoming,")),
    wrong("one-step-short", ("for step in range(comm.size - 1):\n        incoming",
                             "for step in range(comm.size - 2):\n        incoming")),
    wrong("buffer-for-each-step",
          ("count = min(comm.transport.ring_buffers(partial), comm.size - 1)", "count = comm.size - 1"),
          ("buffers[step % len(buffers)]", "buffers[step]")),
    wrong("overwrites-the-input", ("mine = chunks[(comm.rank - 2 - step) % comm.size]",
          "mine = chunks[(comm.rank - 2 - step) % comm.size]\n        incoming = mine.add_(incoming)\n        "
          "mine = torch.zeros_like(mine)")),
    wrong("ignores-out", ("out if last and out is not None else incoming", "incoming")),
    wrong("zeroes-out-first", ("    for buffer in buffers:", "    if out is not None:\n        out.zero_()\n    "
                               "for buffer in buffers:")),
    wrong("one-step-too-many", ("    return partial", "    if comm.size > 1:\n        "
          "comm.send_recv(partial.clone(), right, torch.empty_like(partial), left)\n    return partial")),
    wrong("not-a-ring", ("partial = chunks[(comm.rank - 1) % comm.size]", "partial = chunks[comm.rank]"),
          ("comm.send_recv(partial, right, incoming, left)", "comm.send_recv(chunks[right], right, incoming, left)\n"
           "        right, left = (right + 1) % comm.size, (left - 1) % comm.size"),
          ("mine = chunks[(comm.rank - 2 - step) % comm.size]", "mine = partial")),
    wrong("sends-left", ("left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size",
                         "left, right = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size")),
    wrong("the-ring-the-other-way", ("left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size",
                                     "left, right = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size"),
          ("chunks[(comm.rank - 1) % comm.size]", "chunks[(comm.rank + 1) % comm.size]"),
          ("(comm.rank - 2 - step)", "(comm.rank + 2 + step)"), says="sends-left"),
    wrong("sends-fp32", ("[torch.empty_like(partial) for", "[torch.empty(partial.shape) for"),
          ("comm.send_recv(partial, right", "comm.send_recv(partial.float(), right")),
    wrong("returns-a-copy-of-out", ("    return partial", "    return partial.clone()"), says="random"),
    wrong("returns-nothing-with-out", ("    return partial", "    return partial if out is None else None")),
]  # fmt: skip
SAYS = {
    "wrong-chunk": "Begin one chunk earlier, with chunk r-1.",
    "off-by-one": "To what came in from the left at step s belongs your chunk r-2-s, not r-1-s.",
    "does-not-add": "Add your own part to what comes in, and pass that on.",
    "always-adds": "With combine=torch.maximum it still summed: call `combine`, not +.",
    "one-step-short": "N-1 steps.",
    "buffer-for-each-step": "Two buffers that take turns are enough.",
    "overwrites-the-input": "`chunks` belong to the caller. Sum in the buffer.",
    "ignores-out": "`out` was given and not filled: the last sum goes there.",
    "zeroes-out-first": (
        "`out` may be the rank's own chunk (so the all-reduce has it), and the sum was wrong then: leave it as it is "
        "until the last sum."
    ),
    "one-step-too-many": "N-1 chunks are enough.",
    "not-a-ring": "Rank 0 sends to several ranks. In a ring each sends to its neighbour only, always the same.",
    "sends-left": "Rank 0 of 4 sends to rank 3, on its left: send to rank r+1, and receive from rank r-1.",
    "sends-fp32": "Buffers like the chunks.",
    "returns-nothing-with-out": "With `out` it returned nothing: return the result there too.",
}


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
        two_chunks = 2 * chunks[0].nbytes
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
            "the bytes that it took": AtMost(max(two_chunks, ledger.peak["total"])),
            "what `soon` named, if it was called, is what came next": watch.kept_its_word,
        }

    return rank_kit.by_rank(ranks(case.ranks * case.groups, on_rank))
