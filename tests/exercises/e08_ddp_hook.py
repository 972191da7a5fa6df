"""Data parallelism, stage 0: each rank computes the gradient of its own part of the batch, and all apply the
average. The engine calls `reduce(unit, gradient)` in the middle of backward, as soon as a unit's gradient is
complete on this rank. A message costs time however short it is. So the gradients of several units wait in a *bucket*
and travel together. But they must not wait too long: while backward computes on, the network is free.

    BUCKET_BYTES = 800, units of 400 bytes      unit     4    3    2    1    root
                                                leaves        4+3       2+1  root

    self.comm                       the ranks
    self.in_order                   the units, in the order in which `reduce` is called in each backward
    self.backward.buckets           a dict for what waits: each backward begins with an empty one
    unit.dtype, unit.size           of its gradient: the dtype, and how many elements
    gradient                        flat and local, and yours: it may be overwritten
    all_reduce(tensor, self.comm, op)   a new tensor; with out=tensor it is written over
    unit.set_gradient(g, full=g)    makes g what the optimizer sees: once for each unit, during this backward

What waits must outlive the call, and not the backward. `self` may get attributes of yours. `tag` tells the ledger what
a tensor is; you may leave it out.
"""

from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from minizero import DDP
from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, ranks, wrong

PLAN = [
    "In the end each unit has the average over the ranks, even if the sum is infinite in FP16: not the sum, not its "
    "own gradient.",
    "As long as what waits of one dtype is smaller than BUCKET_BYTES, none of it is sent.",
    "A message leaves at once, with the unit that makes it BUCKET_BYTES or more. It never waits for one more unit.",
    "A message has one dtype, the gradients' own: units of another dtype fill another bucket.",
    "When the last unit of a backward has come, nothing waits any more, and nothing is kept: one message for each "
    "dtype that waits, in the order in which these came, which is the same on all ranks.",
    "A backward may break off: the next one begins with nothing from it.",
]
HINTS = [
    "Ask two questions at each call: is this unit's bucket full with it? Is it the last of the backward? In both cases "
    "something is sent. Both can be true of one unit.",
    "A bucket is a list of (unit, gradient). A dict from dtype to such a list has all of them. Sent means: taken out, "
    "put end to end, averaged, cut at the units' sizes, given to the units.",
    "torch.cat makes one tensor of a bucket, .nbytes says how full it is, .split([…]) cuts the average again. "
    "`unit is self.in_order[-1]` is the last call of a backward: send every bucket.",
]
AFTER = (
    "Your bucket may lie in another order than the package's. DDP.reduce in minizero/engines/ddp.py views a "
    "gradient as N rows and puts these side by side, so that row r is chunk r of every unit. Then each number is "
    "added in the same order as in ZeRO-1 to 3, and all stages agree bit for bit. PyTorch's DDP has buckets of 25 "
    "MiB, too, and sends one while backward computes on; ours waits for it. With gradient_as_bucket_view=True its "
    'gradients are views of the bucket, which saves the second copy. Read next: Li et al., 2020, "PyTorch '
    'Distributed", section 3.2.'
)
KEEP = "buckets.setdefault(unit.dtype, []).append((unit, gradient))"
FULL = "if sum(g.nbytes for _, g in bucket) < BUCKET_BYTES and unit is not self.in_order[-1]:"
CALL = 'all_reduce(rows, self.comm, "mean", out=rows, label=unit.name)'
WRONG = [
    wrong("message-for-each", "Five units of 400 bytes with BUCKET_BYTES = 2000 became five messages. They fit one "
          "bucket: let them wait for each other, and send one message.", (FULL, "if False:")),
    wrong("leaves-late", "With BUCKET_BYTES = 800 two units of 400 bytes fill a bucket, and all five waited until the "
          "end of backward: send when 800 bytes are there. (.nbytes is bytes, .numel() elements.)",
          (FULL, "if unit is not self.in_order[-1]:")),
    wrong("forgets-the-last", "Nothing moved: the optimizer found no gradient. A bucket that is never full must leave, "
          "too, when the last unit of a backward has come.",
          (FULL, FULL.replace("and unit is not self.in_order[-1]", "or True"))),
    wrong("mixes-dtypes", "Two units of BF16 and two of FP32, of 100 elements each, are 1,200 bytes. put together they "
          "became FP32. A bucket for each dtype.",
          (KEEP, KEEP.replace("unit.dtype", "torch.float32"))),
    wrong("forgot-divide", "The gradient is the sum over the 4 ranks, 4 times too large: divide by their number.",
          (CALL, CALL.replace('"mean"', '"sum"'))),
    wrong("no-communication", "The ranks drift apart. Average over them, and use what comes back.", (CALL, "pass")),
    wrong("reduces-the-weights", "What was averaged are the weights, not the gradients: `unit.replica` holds "
          "parameters. Use `gradient`.", (KEEP, KEEP.replace("gradient", "unit.replica.clone()"))),
    wrong("keeps-every-gradient", "More than what the optimizer needs. Keep no second reference and no copy.",
          (KEEP, KEEP + '\n    self.__dict__.setdefault("all", []).append(gradient.clone())')),
]  # fmt: skip


class Unit:
    """As much of a unit as the method needs."""

    def __init__(self, name: str, elements: int, dtype: torch.dtype) -> None:
        self.name, self.size, self.dtype = name, elements, dtype
        self.replica = torch.ones(elements, dtype=dtype)
        self.averages: list[tuple[torch.dtype, list[float]]] = []
        self.gradient = self.full = torch.empty(0)

    def set_gradient(self, average, full=None):
        self.averages.append((average.dtype, average.tolist()))
        self.gradient, self.full = average, torch.empty(0) if full is None else full


class Engine:
    """As much of an engine."""

    def __init__(self, comm, units):
        self.comm, self.in_order = comm, units
        self.units = units[::-1]
        self.begin_backward()

    def begin_backward(self):
        self.backward = SimpleNamespace(buckets={})


class Case(NamedTuple):
    """units: elements and dtype of each, in the order of backward. came: how many came in the backward before."""

    ranks: int
    bucket_bytes: int
    units: list[tuple[int, torch.dtype]]
    seed: int
    came: int = 0


def draw(random: Random) -> list[Case]:
    """A bucket has room for a share of all gradients."""
    mixed = [torch.bfloat16, torch.float32]
    ways = [(n, kinds) for n in rank_kit.SIZES for kinds in ([random.choice(rank_kit.FLOATS)], mixed)]
    ways += [(n, mixed) for n in (1, 2)] * 8
    five, halves = [(100, torch.float32)] * 5, [(100, torch.bfloat16), (100, torch.float32)]
    plain = [(2000, five, 0), (2000, five[:1], 0), (800, five, 0), (2000, halves * 2, 0)]
    plain += [(400, halves, 0), (2000, five, 1), (2000, halves[::-1], 0), (2000, [(100, torch.float16)], 0)]
    cases = [Case(4, room, units, 1, came) for room, units, came in plain]
    for number, kinds, share, count, seed in deal(random, ways, [0, 1 / 6, 1 / 4, 1 / 3, 2], [1, 2, 4, 7, 9]):
        units = [(number * random.randint(1, 30), random.choice(kinds)) for _ in range(count)]
        total = sum(elements * dtype.itemsize for elements, dtype in units)
        cases.append(Case(number, max(1, int(share * total)), units, seed, random.randint(0, count)))
    return cases


def result(case: Case) -> dict[str, Any]:
    """Of one backward. Each gradient is a multiple of N, so that every mean is exact."""

    def on_rank(comm) -> dict[str, Any]:
        units = [Unit(f"unit {i}", *spec) for i, spec in enumerate(case.units)]
        two = [Unit(name, comm.size, torch.float32) for name in "ab"]
        engine, other = (cast(Any, Engine(comm, each)) for each in (units, two))
        for unit in units[: case.came]:
            DDP.reduce(engine, cast(Any, unit), torch.ones(unit.size, dtype=unit.dtype))
        engine.begin_backward()
        for unit in units:
            unit.averages.clear()
            unit.gradient = unit.full = torch.empty(0)
        DDP.reduce(other, cast(Any, two[0]), torch.ones(comm.size))
        before, seen, messages = comm.bytes_sent, list[int](), []
        comm.observers.append(lambda *_: seen.append(comm.bytes_sent - before))
        with Ledger() as ledger:
            for i, unit in enumerate(units):
                seed, special = case.seed + 8 * i + comm.rank, rank_kit.SPECIAL
                gradient = rank_kit.whole(seed, (unit.size,), unit.dtype, times=comm.size, special=special)
                gradient[case.seed % unit.size] = rank_kit.smallest(unit.dtype)
                gradient[(case.seed + 1) % unit.size] = 2.0**14  # in FP16 four of them are infinite
                seen.clear()
                DDP.reduce(engine, cast(Any, unit), gradient)
                messages.append([*seen])
            del gradient
            held = ledger.current["total"]
            gradients, full = (
                [part.tolist() for part in parts] for parts in ([u.gradient for u in units], [u.full for u in units])
            )
            for unit in units:
                unit.gradient = unit.full = torch.empty(0)
            left = ledger.current["total"]
        sent = comm.bytes_sent - before
        DDP.reduce(other, cast(Any, two[1]), torch.full((comm.size,), 2.0 * comm.rank))
        return {
            "averages of another engine, which reduced meanwhile": [unit.averages for unit in two],
            "bytes sent by the end of each message": messages,
            "sent": sent,
            "averages": [unit.averages[0] if unit.averages else [] for unit in units],
            "gradients in the end": gradients,
            "`full` in the end": full,
            "bytes at the peak": AtMost(ledger.peak["total"], 1.6, 0.02),
            "bytes held after backward": AtMost(held, 1.2),
            "bytes held when the optimizer has dropped the gradients": AtMost(left),
            "given": all(len(unit.averages) == 1 for unit in units),
        }

    with (
        mock.patch.dict(DDP.reduce.__globals__, {"BUCKET_BYTES": case.bucket_bytes}),
        mock.patch("minizero.engines.ddp.BUCKET_BYTES", case.bucket_bytes),
    ):
        return rank_kit.by_rank(ranks(case.ranks, on_rank))
