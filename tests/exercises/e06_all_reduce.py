"""Everybody needs the sum: data parallelism averages gradients so. First reduce-scatter, and each rank has one
chunk of the sum; then all-gather, and each has all chunks. A rank sends 2 (N-1)/N of the tensor, however many
ranks there are; had it sent its tensor to all others, N-1 times.

    all-reduce = reduce-scatter, then all-gather
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero import DDP
from minizero.memory import Ledger
from minizero.ranks import collectives
from minizero.ranks.errors import CollectiveMismatch
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import fail, ranks, recognise, size, value_or_error, wrong
from tests.exercises.training import plain, relative_error, train

PLAN = [
    'check_op("all_reduce", op, COMBINE, tensor) refuses an unknown op, and check_out("all_reduce", out, tensor.shape, '
    'tensor.dtype) an `out` that does not fit. All else inside `with agreement(comm, "all_reduce", tensor, op=op, '
    "label=label):`",
    "`flat`: the tensor's elements in one dimension, with zeros behind them until N divides their number. A new "
    "buffer: the input is left alone. Where `out` is given, copy into it and use its own memory, "
    "out.copy_(tensor).view(-1).",
    "Cut `flat` into N chunks. With one rank, or no elements, there is nothing to send.",
    "ring_reduce_scatter(chunks, comm, COMBINE[op], out=…): the sum of chunk r goes into chunk r itself.",
    "For the mean each rank divides its own chunk, before it is sent on: N times less work than to divide them all.",
    "ring_all_gather(chunks, comm) fills the others. Return `flat` without the padding, in the tensor's shape.",
]
HINTS = [
    "-(-n // N) * N is the next multiple of N.",
    "flat.chunk(comm.size) gives views: what is written to a chunk is written to flat.",
    "The reduced chunk of rank r is chunks[comm.rank]; with out=chunks[comm.rank] nothing has to be copied.",
]
AFTER = (
    "Each rank divides only its own chunk, before the all-gather. That is one N-th of the work of dividing everything "
    "at the end. One rank makes each number and sends it on, so all ranks have the same bits. Padding travels too, "
    "and changes nothing: it is combined with other ranks' padding only. With `out` the sum is made in the caller's "
    "memory, and reduce-scatter writes chunk r into chunk r itself. Read next: section 4 of "
    "notebooks/01_collectives.ipynb."
)
WRONG = [
    wrong("forgot-divide", ('if op == "mean":\n                chunks[comm.rank].div_(comm.size)\n            ', "")),
    wrong("divides-everything", ("ring_all_gather(chunks, comm)", "ring_all_gather(chunks, comm)\n            "
          'if op == "mean":\n                flat.div_(comm.size)')),
    wrong("forgot-gather", ("ring_all_gather(chunks, comm)", "pass")),
    wrong("gathers-everything", ("ring_reduce_scatter(chunks, comm, COMBINE[op], out=chunks[comm.rank])\n            "
          'if op == "mean":\n                chunks[comm.rank].div_(comm.size)\n            '
          'ring_all_gather(chunks, comm)',
          "every = [torch.empty_like(flat) for _ in range(comm.size)]\n            every[comm.rank].copy_(flat)\n"
          "            ring_all_gather(every, comm)\n            total = every[0]\n            for other in "
          "every[1:]:\n"
          "                total = COMBINE[op](total, other)\n            "
          'flat.copy_(total / comm.size if op == "mean" else total)')),
    wrong("keeps-the-padding", ("flat[: tensor.numel()].view(tensor.shape)",
          "flat if flat.numel() > tensor.numel() else flat.view(tensor.shape)")),
    wrong("loses-the-shape", ("return flat[: tensor.numel()].view(tensor.shape)", "return flat[: tensor.numel()]")),
    wrong("overwrites-the-input", ("flat = tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)\n"
          "            flat[: tensor.numel()].copy_(tensor.reshape(-1))",
          "flat = tensor.view(-1)\n            if flat.numel() % comm.size:\n                "
          "flat = torch.cat([flat, flat.new_zeros(-flat.numel() % comm.size)])")),
    wrong("always-sums", ("comm, COMBINE[op], out", "comm, torch.add, out")),
    wrong("loses-the-dtype", ("flat = tensor.new_zeros(", "flat = torch.zeros(")),
    wrong("ignores-out", ("out.copy_(tensor).view(-1)", "tensor.clone().view(-1)")),
    wrong("no-agreement", ('with agreement(comm, "all_reduce", tensor, op=op, label=label):', "if True:")),
    wrong("min-is-max", ("comm, COMBINE[op], out", 'comm, torch.maximum if op == "min" else COMBINE[op], out')),
    wrong("extra-copies", ("            if op == \"mean\":", "            kept = [tensor.clone() for _ in range(3)]"
                           "\n            if op == \"mean\":")),
]  # fmt: skip


def check() -> None:
    for n in (4, 3, 1):
        ranks(n, on_rank)
    ranks(3, other_cases)
    ranks(4, traffic)
    ranks(4, memory)
    ranks(2, disagreement)
    (_, state, _), *_ = ranks(4, train, DDP, 2)
    if relative_error(state, plain(2)[1]) > 1e-4:
        fail("values", "DDP with your all-reduce does not learn what one process learns.")


def on_rank(comm) -> None:
    n, r = comm.size, comm.rank
    for shape in ((12,), (2, 5), ()):
        everyone = torch.stack([torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * 2**k for k in range(n)])
        mine = everyone[r].clone()
        for op, want in (("sum", everyone.sum(0)), ("mean", everyone.sum(0) / n), ("max", everyone.amax(0))):
            got = collectives.all_reduce(mine, comm, op)
            if not torch.equal(mine, everyone[r]):
                fail("overwrites-the-input", f"After op={op!r} rank {r}'s own tensor has other values: work on a copy.")
            if isinstance(got, torch.Tensor) and got.numel() > want.numel():
                fail("keeps-the-padding", f"{got.numel()} elements came back for {want.numel()}: cut the padding off.")
            if isinstance(got, torch.Tensor) and got.shape != want.shape:
                fail("loses-the-shape", f"A tensor of shape {shape} came back as {tuple(got.shape)}.")
            total = everyone.sum(0)
            mistakes = {"always-sums": (total, f"op={op!r} gave the sum: COMBINE[op] says how to combine.")}
            if op == "mean":
                mistakes = {
                    "forgot-divide": (total, f"The mean over {n} ranks is the sum: divide by comm.size."),
                    "divides-everything": (total / n / n, "The mean was divided by the number of ranks twice."),
                }
            if op == "sum" and shape == (12,):
                parts = mine.clone()
                parts.chunk(n)[r].copy_(total.chunk(n)[r])
                words = f"Only chunk {r} of rank {r} is the sum: gather the others' chunks."
                mistakes["forgot-gather"] = (parts, words)
            recognise(got, want, mistakes if n > 1 else {}, f"all_reduce with op={op!r} on {n} ranks, rank {r}")


def other_cases(comm) -> None:
    mine = torch.tensor([comm.rank + 1, 3 - comm.rank, 7])
    got = collectives.all_reduce(mine, comm)
    if got.dtype != torch.int64:
        fail("loses-the-dtype", f"The sum of whole numbers came back as {got.dtype}: a buffer like the tensor.")
    recognise(got, torch.tensor([6, 6, 21]), {}, "The sum of whole numbers")
    least = collectives.all_reduce(mine, comm, "min")
    mistakes = {"min-is-max": (torch.tensor([3, 3, 7]), 'op="min" gave the largest: COMBINE[op] says how to combine.')}
    recognise(least, torch.tensor([1, 1, 7]), mistakes, 'all_reduce with op="min"')
    place = torch.zeros(6)
    collectives.all_reduce(torch.full((6,), float(comm.rank + 1)), comm, out=place)
    if not torch.equal(place, torch.full((6,), 6.0)):
        fail("ignores-out", f"`out` was given, and holds {place[0]:g} instead of the sum 6: work in its memory.")


def memory(comm) -> None:
    tensor = torch.ones(10_000)
    with Ledger() as ledger:
        collectives.all_reduce(tensor, comm)
    if ledger.peak["total"] > 2 * tensor.nbytes:
        fail(
            "extra-copies",
            f"For a tensor of {size(tensor.nbytes)} it held {size(ledger.peak['total'])}: one copy and two buffers of "
            "a chunk are enough.",
        )


def disagreement(comm) -> None:
    try:
        collectives.all_reduce(torch.ones(4), comm, ("sum", "max")[comm.rank])
    except CollectiveMismatch:
        return
    fail(
        "no-agreement",
        "One rank sums, the other takes the largest, and nobody noticed: do all of it inside `with agreement(…)`.",
    )


def traffic(comm) -> None:
    before = comm.bytes_sent
    collectives.all_reduce(torch.ones(1000), comm)
    sent = comm.bytes_sent - before
    if sent > 6000:
        fail(
            "gathers-everything",
            f"Rank {comm.rank} of 4 sent {size(sent)} for a tensor of {size(4000)}: reduce first, then gather, "
            "and it is 2 (N-1)/N = 1.5 times the tensor.",
        )
    try:
        collectives.all_reduce(torch.ones(4), comm, "median")
    except ValueError:
        return
    fail("no-error", 'op="median" must be a ValueError: check_op says so, before anything is sent.')


class Case(NamedTuple):
    ranks: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    out: str
    seed: int


def draw(random: Random) -> list[Case]:
    ways, outs = itertools.product(range(1, 9), collectives.COMBINE), ["none", "another", "the input"]
    rows = deal(random, ways, [*rank_kit.SHAPES, (0, 2)], rank_kit.DTYPES, rank_kit.LAYOUTS, outs)
    whole = [
        Case(random.randint(2, 8), "sum", (4, 3, 2), torch.float32, layout, "none", random.randrange(10**6))
        for layout in rank_kit.LAYOUTS
    ]
    return whole + [Case(*row) for row in rows]


def result(case: Case) -> dict[str, Any]:
    """With `out` the shape is (ranks, …), and the layout contiguous, as it must be. Sums can be divided by N."""
    times = rank_kit.shared_times()

    def on_rank(comm) -> Any:
        shape, layout = (case.shape, case.layout) if case.out == "none" else ((comm.size, *case.shape), "contiguous")
        mine = rank_kit.whole(case.seed + comm.rank, shape, case.dtype, layout, comm.size if case.op == "mean" else 1)
        before, watch = mine.clone(), rank_kit.Watch(comm, times)
        out = {"none": None, "another": torch.full_like(mine, 99), "the input": mine}[case.out]
        got = value_or_error(collectives.all_reduce, mine, comm, case.op, out=out)
        return {
            "the result": got,
            "`out`": out,
            "unchanged input": torch.equal(mine, before),
            "the input's memory": isinstance(got, torch.Tensor)
            and mine.numel() > 0
            and got.data_ptr() == mine.data_ptr(),
            "bytes sent": watch.sent,
            "hops in a row": watch.hops,
            "receivers": sorted(watch.receivers),
        }

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
