"""Everybody needs the sum: data parallelism averages gradients so. First reduce-scatter, and each rank has one
chunk of the sum; then all-gather, and each has all chunks. A rank sends 2 (N-1)/N of the tensor, however many
ranks there are; had it sent its tensor to all others, N-1 times.

    all-reduce = reduce-scatter, then all-gather
"""

import itertools
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from minizero.memory.operators import Watcher
from minizero.ranks import collectives
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, Diagnosis, ranks, value_or_error, wrong

PLAN = [
    'check_op("all_reduce", op, COMBINE, tensor) refuses an unknown op, and check_out("all_reduce", out, tensor.shape, '
    'tensor.dtype) an `out` that does not fit. All else inside `with agreement(comm, "all_reduce", tensor, op=op, '
    "label=label):`",
    "`flat`: the tensor's elements in one dimension, with zeros behind them until N divides their number. A new "
    "buffer: the input is left alone. Where `out` is given, copy into it and use its own memory, "
    "out.copy_(tensor).view(-1).",
    "Cut `flat` into N chunks. An `out` of a size that N does not divide is a ValueError. With one rank, or no "
    "elements, there is nothing to send.",
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
    wrong("forgot-divide", "The mean over the ranks is the sum: divide by comm.size.",
          ("chunks[comm.rank].div_(divisor)", "pass")),
    wrong("any-out", "An `out` of another shape or dtype must be a ValueError: check_out says so.",
          ('check_out("all_reduce", out, tensor.shape, tensor.dtype)', "pass")),
    wrong("forgot-gather", "A rank has its own chunk of the sum and none of the others': gather them.",
          ("ring_all_gather(chunks, comm)", "pass")),
    wrong("gathers-everything", "Everybody gets everything, and then adds: reduce first, then gather, and it is 2 "
          "(N-1)/N times the tensor.",
          ('ring_reduce_scatter(chunks, comm, combine, out=chunks[comm.rank])\n            if op == "mean":\n'
           "                chunks[comm.rank].div_(divisor)\n            ring_all_gather(chunks, comm)",
           "every = [torch.empty_like(flat) for _ in range(comm.size)]\n            every[comm.rank].copy_(flat)\n"
           "            ring_all_gather(every, comm)\n            total = every[0]\n"
           "            for other in every[1:]:\n                total = COMBINE[op](total, other)\n"
           '            flat.copy_(total / comm.size if op == "mean" else total)')),
    wrong("keeps-the-padding", "There are more elements than before: cut the padding off.",
          ("flat[: tensor.numel()].view(tensor.shape)",
           "flat if flat.numel() > tensor.numel() else flat.view(tensor.shape)")),
    wrong("overwrites-the-input", "A rank's own tensor has other values afterwards, or is the result: work on a copy.",
          ("flat = tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)\n"
           "            flat[: tensor.numel()].copy_(tensor.reshape(-1))", "flat = tensor.view(-1)\n"
           "            if flat.numel() % comm.size:\n"
           "                flat = torch.cat([flat, flat.new_zeros(-flat.numel() % comm.size)])")),
    wrong("always-sums", "It summed where it should have taken the largest or the smallest: COMBINE[op] says how to "
          "combine.", ("comm, combine, out", "comm, torch.add, out")),
    wrong("extra-copies", "One copy and two buffers of a chunk are enough.",
          ('            if op == "mean":',
           '            kept = [tensor.clone() for _ in range(3)]\n            if op == "mean":')),
]  # fmt: skip


class Case(NamedTuple):
    """groups: how many a world is split into. differ_in: what the ranks do not agree on, and must notice."""

    ranks: int
    op: str
    groups: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: str
    out: str
    differ_in: str
    seed: int


class Arithmetic(Watcher):
    """Counts the numbers that this thread computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket.__name__.strip("_") in ("add", "maximum", "minimum", "div", "mul"):
            self.count += result.numel()
        return result


def draw(random: Random) -> list[Case]:
    ways = itertools.product(range(1, 9), collectives.COMBINE)
    outs, grad = ["none", "another", "the input"], [False, True]
    differ_in = [*["nothing"] * 8, "the op", "the label", "the shape"]
    shapes, columns = [*rank_kit.SHAPES, (0, 2)], (rank_kit.LAYOUTS, outs, differ_in)
    rows = deal(random, ways, [1, 1, 2], shapes, rank_kit.DTYPES, grad, *columns)
    n, seed = random.randint(2, 8), random.randrange(10**6)
    sets = [(layout, "nothing") for layout in rank_kit.LAYOUTS] + [("contiguous", what) for what in differ_in[8:]]
    whole = [Case(n, "sum", 1, (4, 3, 2), torch.float32, False, layout, "none", what, seed) for layout, what in sets]
    alone = [Case(1, "sum", 1, (5,), torch.float32, False, "contiguous", out, "nothing", seed) for out in outs]
    plain = Case(4, "sum", 1, (6,), torch.float32, False, "contiguous", "none", "nothing", 1)
    plains = [plain._replace(op=op) for op in ("sum", "mean", "max", "min")] + [
        plain._replace(ranks=random.randint(9, 12)),
        plain._replace(out="of FP64"),
        plain._replace(out="not to be cut", shape=(5,)),
    ]
    return plains + whole + alone + [Case(*row) for row in rows]


def result(case: Case) -> Any:
    """With `out` the shape is (ranks, …), as it must be, or an error; the input's own layout is then contiguous.

    Sums can be divided by N. The largest of 0 and -0 may be either, so there is no -0 among the numbers.
    """
    times = rank_kit.shared_times()
    special = rank_kit.SPECIAL if case.op in ("sum", "mean") else rank_kit.SPECIAL[1:]

    def on_rank(world) -> Any:
        comm = rank_kit.group(world, case.groups)
        shape = case.shape if case.out in ("none", "not to be cut") else (comm.size, *case.shape)
        layout, factor = "contiguous" if case.out == "the input" else case.layout, comm.size if case.op == "mean" else 1
        mine, other = (
            rank_kit.whole(case.seed + 2 * world.rank + i, shape, case.dtype, layout, factor, special) for i in (0, 1)
        )
        has_a_mean = case.dtype.is_floating_point
        mine.requires_grad_(case.requires_grad and case.out == "none" and has_a_mean)
        mine = mine[None] if case.differ_in == "the shape" and case.out == "none" and comm.rank == 0 else mine
        op = "max" if case.differ_in == "the op" and has_a_mean and comm.rank == 0 else case.op
        label = f"rank {comm.rank}" if case.differ_in == "the label" else "all ranks"
        another = torch.full(shape, 99, dtype=case.dtype)
        out = {"none": None, "another": another, "the input": mine, "of FP64": another.double()}.get(case.out, another)
        earlier, told = collectives.all_reduce(other, comm), []
        comm.observers.append(lambda operation, label, _: told.append((operation, label)))
        watch = rank_kit.Watch(comm, times)
        with Ledger() as ledger:
            got = value_or_error(collectives.all_reduce, mine, comm, op, out=out, label=label)
        return {
            "bytes sent": watch.sent,
            "hops in a row": watch.hops,
            "receivers": sorted(watch.receivers),
            "the result": got,
            "`out`": out,
            "the memory in which the input lies": rank_kit.memory(mine),
            "the result lies in the input's memory": lies_in(got, mine),
            "the result lies in `out`": lies_in(got, another),
            "the result of the call before": earlier,
            "the collectives and their labels": told,
            "the bytes that it took": AtMost(ledger.peak["total"], 2 if mine.is_contiguous() else 99),
        }

    def work(comm) -> float:
        """Of N divisions each rank does one."""
        with Arithmetic() as arithmetic:
            collectives.all_reduce(torch.ones(comm.size, 3), comm, case.op)
        return AtMost(arithmetic.count if comm.size > 1 else 0, 1.2)

    try:
        seen = rank_kit.by_rank(ranks(case.ranks * case.groups, on_rank))
    except Diagnosis as diagnosis:
        if diagnosis.name != "mismatch" or case.differ_in == "nothing":
            raise
        return "an error"
    return seen | {"additions and divisions of ones, chunk by chunk": ranks(case.ranks, work)}


def lies_in(tensor: Any, other: torch.Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor) or not other.numel():
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
