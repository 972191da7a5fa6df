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

from minizero import GPT, Zero3
from minizero.memory import Ledger
from minizero.ranks import collectives
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, ranks, recognise, size, wrong
from tests.support.helpers import SMALL, batch

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
    wrong("one-step-short", (LOOP, "for step in range(comm.size - 2):\n        # First")),
    wrong("one-step-too-many", (LOOP, "for step in range(comm.size):\n        # First")),
    wrong("resends-its-own", ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[comm.rank]")),
    wrong("one-place-all-the-time",
          ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[comm.rank]"),
          ("incoming = chunks[(comm.rank - step - 1) % comm.size]", "incoming = chunks[(comm.rank - 1) % comm.size]"),
          says="resends-its-own"),
    wrong(
        "fills-the-wrong-place",
        ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[(comm.rank + step) % comm.size]"),
        ("incoming = chunks[(comm.rank - step - 1) % comm.size]", "incoming = chunks[(comm.rank + step + 1) % "
                                                                  "comm.size]"),
    ),
    wrong("sends-first", ("comm.send_recv(outgoing, right, incoming, left)",
                          "comm.send(outgoing, right)\n        comm.recv(incoming, left)"), says="deadlock"),
    wrong("sends-both-ways", ("comm.send_recv(outgoing, right, incoming, left)",
                              "comm.send_recv(outgoing, right, incoming, right)"), says="deadlock"),
    wrong("extra-buffers", ("comm.send_recv(outgoing, right, incoming, left)",
                            "fresh = torch.empty_like(incoming)\n        "
                            "comm.send_recv(outgoing, right, fresh, left)\n        incoming.copy_(fresh)")),
    wrong("sends-fp32", ("comm.send_recv(outgoing, right, incoming, left)",
                         "fresh = torch.empty(incoming.shape)\n        "
                         "comm.send_recv(outgoing.float(), right, fresh, left)\n        incoming.copy_(fresh)")),
    wrong("announces-others", ("soon([chunks[(comm.rank - step - 1)", "soon([chunks[(comm.rank + step - 1)"),
          says="random"),
    wrong("announces-nothing", (SOON, "pass"), says="announces-too-few"),
    wrong("announces-each-in-its-step", (SOON, "pass"), ("        comm.send_recv(outgoing",
          "        comm.transport.soon([incoming], left)\n        comm.send_recv(outgoing"), says="announces-too-few"),
    wrong("not-a-ring", ("outgoing = chunks[(comm.rank - step) % comm.size]", "outgoing = chunks[comm.rank]"),
          ("comm.send_recv(outgoing, right, incoming, left)",
           "comm.send_recv(outgoing, (right + step) % comm.size, incoming, (left - step) % comm.size)")),
]  # fmt: skip


def check() -> None:
    for n in (4, 3, 2, 1):
        ranks(n, on_rank)
    ranks(4, in_16_bits)
    if len({to for to, _ in ranks(4, receivers)[0]}) > 1:
        fail(
            "not-a-ring", "Rank 0 sends to several ranks. In a ring each sends to its neighbour only, always the same."
        )
    ranks(4, memory)
    named = ranks(4, named_before)[0]
    if named < 3:
        fail(
            "announces-too-few",
            f"When its first message went, rank 0 of 4 had named {named} of the 3 tensors that it received: before the "
            "loop comm.transport.soon(tensors, left) names all of them, in their order.",
        )
    ranks(4, trains)


def on_rank(comm) -> None:
    n, r = comm.size, comm.rank
    chunks = [torch.full((5,), -1.0) for _ in range(n)]
    chunks[r].fill_(r)
    sent = comm.bytes_sent
    collectives.ring_all_gather(chunks, comm)
    sent = comm.bytes_sent - sent
    got, want = torch.stack(chunks)[:, 0], torch.arange(float(n))
    if sent < 20 * (n - 1):
        fail(
            "one-step-short",
            f"Rank {r} of {n} sent {sent // 20} chunks and lacks {int((got < 0).sum())}: N ranks need N-1 steps.",
        )
    if sent > 20 * (n - 1):
        fail(
            "one-step-too-many",
            f"Rank {r} of {n} sent {size(sent)}, {sent // 20} chunks: N-1 = {n - 1} steps are enough, the last "
            "one brought what it had already.",
        )
    left = (r - 1) % n
    resent = torch.full((n,), float(left))
    resent[r] = r
    reversed_ = torch.tensor([float((r - ((p - r) % n)) % n) for p in range(n)])
    if n > 2 and got.tolist() == [p if p in (left, r) else -1 for p in range(n)]:
        fail(
            "resends-its-own",
            f"Rank {r} has its own chunk and rank {left}'s, and no other: after step 0 pass on what came in, not your "
            "own again.",
        )
    mistakes = {
        "resends-its-own": (
            resent,
            f"Rank {r} has rank {left}'s chunk in every place: after step 0 pass on what came in, not your own again.",
        ),
        "fills-the-wrong-place": (
            reversed_,
            f"All chunks are there, and in the wrong places: on rank {r} place {left} must be chunk {left}, which "
            "comes from the left in step 0.",
        ),
    }
    recognise(got, want, mistakes if n > 2 else {}, f"The chunks on rank {r} of {n}")


def in_16_bits(comm) -> None:
    chunks = [torch.full((100,), float(comm.rank), dtype=torch.float16) for _ in range(comm.size)]
    before = comm.bytes_sent
    collectives.ring_all_gather(chunks, comm)
    sent = comm.bytes_sent - before
    if sent > 200 * (comm.size - 1):
        fail("sends-fp32", f"For float16 chunks it sent {size(sent)}, twice what they are: send them as they are.")
    recognise(torch.stack(chunks)[:, 0], torch.arange(float(comm.size)).half(), {}, "The float16 chunks")


def receivers(comm) -> list[tuple[int, int]]:
    """To whom this rank sends, and how many bytes."""
    seen, transfer = [], comm.transport.transfer

    def noted(outgoing, dst, incoming, src):
        if outgoing is not None:
            seen.append((dst, outgoing.nbytes))
        transfer(outgoing, dst, incoming, src)

    comm.transport.transfer = noted
    collectives.ring_all_gather([torch.ones(4) for _ in range(comm.size)], comm)
    return seen


def named_before(comm) -> int:
    """How many tensors this rank had named by `soon` when its first message went."""
    named, first = [], []
    soon, transfer = comm.transport.soon, comm.transport.transfer

    def noted_soon(tensors, src):
        named.extend(tensors)
        soon(tensors, src)

    def noted(outgoing, dst, incoming, src):
        first.append(len(named))
        transfer(outgoing, dst, incoming, src)

    comm.transport.soon, comm.transport.transfer = noted_soon, noted
    collectives.ring_all_gather([torch.ones(4) for _ in range(comm.size)], comm)
    return first[0]


def memory(comm) -> None:
    chunks = [torch.ones(10_000) for _ in range(comm.size)]
    with Ledger() as ledger:
        collectives.ring_all_gather(chunks, comm)
    if ledger.peak["total"] > 20_000:
        fail(
            "extra-buffers",
            f"It held {size(ledger.peak['total'])} beside the chunks: receive into the place where the chunk belongs.",
        )


def trains(comm) -> None:
    """Zero3 gathers its parameters with it."""
    model = Zero3(GPT(SMALL), comm)
    x, y = (part.chunk(comm.size)[comm.rank] for part in batch(0))
    losses = collectives.all_gather(model(x, y).detach().view(1), comm)
    plain = [GPT(SMALL)(*(part.chunk(comm.size)[r] for part in batch(0))).detach() for r in range(comm.size)]
    recognise(losses, torch.stack(plain), {}, "ZeRO-3's losses with your all-gather", tolerance=1e-6)


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
    ways, dtypes = itertools.product(range(1, 9), [False, True], [1, 2]), [*rank_kit.DTYPES, torch.bool]
    return [Case(*row) for row in deal(random, ways, rank_kit.SHAPES, dtypes, rank_kit.LAYOUTS)]


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
        return seen | {
            "bytes sent": watch.sent,
            "hops in a row": watch.hops,
            "receivers": sorted(watch.receivers),
            "what `soon` named is what came next": watch.kept_its_word,
        }

    return rank_kit.by_rank(ranks(case.ranks * case.groups, on_rank))
