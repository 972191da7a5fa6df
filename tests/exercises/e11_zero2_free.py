"""ZeRO stage 2: a rank needs the averaged gradient of its own chunk only, so that is all it keeps. Backward brings one
full gradient after the other, from the last unit to the first. Here is such a backward without an engine: an iterator
computes the next gradient when you ask for it, and you say what becomes of it.

    for name, gradient in arrivals                       e.g. "blocks.2", 1000 elements of BF16, then "blocks.1", …
    reduce_scatter(tensor, comm, op, label=name)         new: this rank's chunk, if N divides dimension 0
    pad(tensor, multiple)                                with zeros behind; a copy, unless nothing is missing

Memory lives as long as a name, an attribute, a list or a view refers to it. A name of a loop still refers to the last
gradient while the iterator computes the next one: `del name` ends that.
"""

import math
import weakref
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, ranks, recognise, size, wrong
from tests.exercises.tasks import zero2

PLAN = [
    "At the end shards[name] is the average over the ranks of this rank's chunk, for every unit that came; if an "
    "earlier micro-batch left something there, the sum of both. What is there of a unit that does not come stays.",
    "While the next gradient is computed, no full one is alive, and nothing as long as one: of each unit only 1/N.",
    "That holds in every micro-batch: no full sum waits for the last one.",
    "N may not divide a gradient. Chunks are equal all the same.",
    "Between the ranks goes the gradient's own dtype. What is kept and added up is FP32.",
    "Each gradient is sent once, (N-1)/N of its bytes.",
]
HINTS = [
    "For each gradient there are four things to do: make its length fit, average, let go of it, keep what is left. Ask "
    "after each of them which tensors are alive, and by which name.",
    "The order is: pad, reduce-scatter, FP32, add. Padding may copy. Then two full tensors are alive, and both "
    "must be gone before the loop asks for the next gradient.",
    "`full = pad(gradient, comm.size)`, `del gradient`, the average of your chunk as .float(), `del full`; then add it "
    "to shards[name], or put it there.",
]
AFTER = (
    "Zero2.reduce in minizero/engines/zero2.py has one line of this, since the rest happens elsewhere. The padding is "
    "made only once, because a unit's gradient is collected in a padded buffer from the beginning "
    "(minizero/engines/gradient.py), and `take` hands over the last reference to it. A rank that did not use a unit "
    "brings a gradient of zeros there. In your loop it would bring none, and the other ranks would wait for ever. "
    "With many micro-batches your answer sends each of them; `no_sync` sends once, and pays with a full gradient "
    '(minizero/engines/gradient.py). Read next: "When does ZeRO-2 pay?" in notebooks/02c_zero_choices.ipynb, and '
    'Rajbhandari et al., 2019, "ZeRO", section 5.2.'
)
CALL = 'reduce_scatter(full, comm, "mean", label=name)'
ADD = "shards[name] = shards[name].add_(mine) if name in shards else mine"
FREE, FREE_FULL = "        del gradient\n", "    del full  # before the next one is computed\n"
WRONG = [
    wrong("keeps-the-last", (FREE, ""), (FREE_FULL, "\n")),
    wrong("keeps-the-padded", (FREE_FULL, "\n")),
    wrong("keeps-all", (FREE, FREE + '        backward.__dict__.setdefault("all", []).append(full)\n'),
          says="does-not-free"),
    wrong("all-at-once", ("in arrivals:", "in list(arrivals):"), says="does-not-free"),
    wrong("a-view-of-all", (CALL, "full.chunk(comm.size)[comm.rank].copy_(" + CALL + ")"), says="does-not-free"),
    wrong("forgot-divide", ('"mean"', '"sum"')),
    wrong("divides-twice", (CALL + ".float()", CALL + ".float() / comm.size")),
    wrong("divides-by-four", (CALL + ".float()", CALL.replace('"mean"', '"sum"') + ".float() / 4")),
    wrong("takes-the-largest", ('"mean"', '"max"')),
    wrong("no-communication", (CALL, "full.chunk(comm.size)[comm.rank].clone()")),
    wrong("reduces-everything", (CALL, "__import__('minizero').all_reduce(full, comm, 'mean').chunk(comm.size)"
                                 "[comm.rank].clone()")),
    wrong("forgets-the-micro-batch-before", (ADD, "shards[name] = mine")),
    wrong("divides-first", (CALL, CALL.replace('"mean"', '"sum"').replace("full,", "full.div_(comm.size),"))),
    wrong("first-micro-batch-or-not", ("    for name", "    first = not shards\n    for name"),
          (ADD, "shards[name] = mine if first else shards[name].add_(mine)"), says="KeyError"),
    wrong("leaves-the-first", (ADD, "shards.setdefault(name, mine)"), says="loses-a-micro-batch"),
    wrong("sends-fp32", (CALL, CALL.replace("full,", "full.float(),"))),
    wrong("adds-in-16-bits", (CALL + ".float()", CALL), (ADD, "shards[name] = (shards[name].to(mine.dtype) + mine if "
                              "name in shards else mine).float()")),
    wrong("keeps-16-bits", (CALL + ".float()", CALL)),
    wrong("does-not-pad", ("pad(gradient, comm.size)", "gradient"), says="ValueError"),
    wrong("drops-what-does-not-come", ("    for name", "    before = dict(shards)\n    shards.clear()\n    for name"),
          ("if name in shards else mine", "if name in shards else before.get(name, 0) + mine"), says="random"),
    wrong("cuts-off", ("pad(gradient, comm.size)", "gradient[: len(gradient) // comm.size * comm.size].clone()")),
]  # fmt: skip


def check() -> None:
    ranks(4, values_on_a_rank)
    for rank, found in enumerate(ranks(4, memory)):
        for unit, alive, held in reversed(found):
            if alive > 1 or held > 1000 * unit + 9000:
                fail(
                    "does-not-free",
                    f"When {unit} units of {size(4000)} each had come, rank {rank} still held {size(held)}: of each "
                    f"unit only 1/N, {size(1000)}, may be left. A view of a full gradient keeps all of it.",
                )
            if alive or held > 1000 * unit + 3000:
                fail(
                    "keeps-the-last" if alive else "keeps-the-padded",
                    f"While the next gradient was computed, the {'' if alive else 'padded copy of the '}full gradient "
                    f"of the unit before, {size(4000)}, was still alive: a name refers to it until it gets its next "
                    "value. `del` it.",
                )
    ranks(4, tiny)
    small = ranks(2, of_ones)
    if small[0] == 0.5:
        fail("divides-by-four", "On 2 ranks the gradient is half of the mean: divide by comm.size, not by 4.")
    sent = max(ranks(4, in_bf16))
    if sent > 2 * 1000 * 3 // 4:
        fail(
            "sends-fp32",
            f"For a BF16 gradient of 1,000 elements a rank sent {sent:,} bytes, where {2 * 1000 * 3 // 4:,} are "
            "enough: reduce it as it comes, and make FP32 of what is left.",
        )


def values_on_a_rank(comm) -> None:
    """Two micro-batches of two units, of which 4 divides one only."""
    sizes = {"blocks.1": 1000, "blocks.0": 30}
    local = {name: torch.stack([gradients(n, rank) for rank in range(4)]) for name, n in sizes.items()}
    shards: dict[str, torch.Tensor] = {}
    before = comm.bytes_sent
    zero2.backward(iter([(name, local[name][comm.rank, 0].clone()) for name in sizes]), shards, comm)
    sent, first = comm.bytes_sent - before, {name: shard.clone() for name, shard in shards.items()}
    zero2.backward(iter([(name, local[name][comm.rank, 1].clone()) for name in sizes]), shards, comm)
    if sent == 0:
        fail(
            "no-communication",
            "Each rank kept its own gradient of its chunk, not the average: nothing was sent. Reduce over the ranks.",
        )
    enough = 4 * (1000 + 32) * 3 // 4
    if sent > enough:
        fail(
            "reduces-everything",
            f"For gradients of {size(4 * 1030)} a rank sent {size(sent)} in a backward, where {size(enough)} are "
            "enough: it needs its own chunk of the average only, and sends each gradient once.",
        )
    for name, n in sizes.items():
        if name not in shards:
            fail("forgets-a-unit", f"{name} came, and shards has {', '.join(shards) or 'nothing'}.")
        rows = torch.nn.functional.pad(local[name], (0, -n % 4)).chunk(4, -1)[comm.rank]  # by rank and micro-batch
        mean, got = rows.mean(0), shards[name]
        if got.numel() == n // 4 < mean.shape[1]:
            fail("cuts-off", f"Of {n} elements on 4 ranks the shards have {n // 4} each, and some are lost: pad.")
        mistakes = {
            "forgot-divide": (mean[0] * 4, "The gradient is the sum over the 4 ranks: take the mean."),
            "divides-twice": (mean[0] / 4, "The gradient is 4 times too small: the mean was divided by 4 again."),
            "takes-the-largest": (rows[:, 0].amax(0), "Each gradient is the largest of the ranks', not the mean."),
        }
        recognise(first[name], mean[0], mistakes, f"Rank {comm.rank}'s shard of {name}")
        mistakes = {
            "forgets-the-micro-batch-before": (
                mean[1],
                "After the second micro-batch only its own gradient is there: add it to what the first one left.",
            ),
            "loses-a-micro-batch": (
                mean[0],
                "After the second micro-batch only the first one's gradient is there: add the new one to it.",
            ),
        }
        recognise(got, mean.sum(0), mistakes, f"Rank {comm.rank}'s shard of {name} after two micro-batches")


def gradients(n: int, rank: int) -> torch.Tensor:
    """Those of a unit on a rank, in two micro-batches: multiples of 4, so that the mean is exact."""
    return torch.stack([rank_kit.whole(n + 10 * rank + m, (n,), torch.float32, times=4) for m in range(2)])


def memory(comm) -> list[tuple[int, int, int]]:
    """At each moment when the next gradient is computed: units so far, full gradients that live, bytes held."""
    found: list[tuple[int, int, int]] = []
    with Ledger() as ledger:

        def arrivals(n):
            given: list[weakref.ref] = []
            for unit in range(6):
                if unit:
                    found.append((unit, sum(each() is not None for each in given), ledger.current["total"]))
                gradient = torch.ones(n)
                given.append(weakref.ref(gradient))
                yield f"blocks.{unit}", gradient
                del gradient

        for n in (1000, 998):  # of the second, 4 divides a padded copy only
            shards: dict[str, torch.Tensor] = {}
            zero2.backward(arrivals(n), shards, comm)
            del shards
    return found


def of_ones(comm) -> float:
    shards: dict[str, torch.Tensor] = {}
    zero2.backward(iter([("root", torch.ones(8))]), shards, comm)
    return shards["root"][0].item()


def in_bf16(comm) -> int:
    before = comm.bytes_sent
    shards: dict[str, torch.Tensor] = {}
    for value in (256.0, 1.0):  # in BF16 their sum is 256
        zero2.backward(iter([("root", torch.full((1000,), value, dtype=torch.bfloat16))]), shards, comm)
        if shards["root"].dtype != torch.float32:
            fail("keeps-16-bits", f"A shard is {shards['root'].dtype}: the optimizer wants FP32, and so does a sum.")
    if shards["root"][0] == 256:
        fail(
            "adds-in-16-bits",
            "A micro-batch brought 256, the next one 1, and the shard is 256: in BF16 the sum is rounded back. "
            "Turn each average into FP32 before you add it.",
        )
    return (comm.bytes_sent - before) // 2


def tiny(comm) -> None:
    """The smallest number of FP16 on every rank: their sum is exact, and a quarter of one is 0."""
    shards: dict[str, torch.Tensor] = {}
    zero2.backward(iter([("root", torch.full((8,), 2.0**-24, dtype=torch.float16))]), shards, comm)
    if not shards["root"].all():
        fail(
            "divides-first",
            "All ranks have the gradient 2^-24, the smallest number of FP16, and the average is 0: it was divided "
            "before it was added up. Add first.",
        )


class Case(NamedTuple):
    """absent: in which of several micro-batches the last unit does not come. halves: every second rank shares."""

    ranks: int
    dtype: torch.dtype
    micro_batches: int
    absent: int | None
    halves: bool
    elements: list[int]
    seed: int


def draw(random: Random) -> list[Case]:
    dtypes, ways = [torch.float32, torch.float16, torch.bfloat16], [(n,) for n in rank_kit.SIZES] * 2
    rows = deal(random, ways, dtypes, [1, 2, 3], [None, 0, 1, 2], [False, False, True])
    return [
        Case(n, dtype, micro, absent, halves, [random.randint(1, 40) for _ in range(random.randint(2, 5))], seed)
        for n, dtype, micro, absent, halves, seed in rows
    ]


def result(case: Case) -> dict[str, Any]:
    """Each gradient is a multiple of N, infinite or NaN, so that every mean is exact."""

    def on_rank(world) -> dict[str, Any]:
        comm = world.split(world.rank % 2) if case.halves else world
        before, shards, held = comm.bytes_sent, dict[str, torch.Tensor](), []
        with Ledger() as ledger:
            for m in range(case.micro_batches):

                def arrivals(m=m):
                    absent = m == case.absent and case.micro_batches > 1
                    for i, n in enumerate(case.elements[:-1] if absent else case.elements):
                        held.append(AtMost(ledger.current["total"], 2.5))
                        seed, special = case.seed + 100 * m + 10 * i + comm.rank, (math.inf, -math.inf, math.nan)
                        if i == comm.rank:  # of one unit, this rank's gradient is all zeros
                            yield f"unit {i}", torch.zeros(n, dtype=case.dtype)
                            continue
                        yield f"unit {i}", rank_kit.whole(seed, (n,), case.dtype, times=comm.size, special=special)

                zero2.backward(arrivals(), shards, comm)
        return {"shards": shards, "bytes sent": comm.bytes_sent - before, "bytes when a gradient is computed": held}

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
