"""ZeRO stage 3: when a unit has computed, its replica must go, or every rank soon holds all parameters. After a
backward the gradient must go, too: of both, a rank keeps its own chunk. Here is a stage 3 without an engine. It calls
`reshard(unit, None)` when a use of the unit is over in forward, and `reshard(unit, gradient)` when one is over in
backward. A unit may be used twice, with others in between: forward 0 1 2 1, backward 1 2 1 0.

    unit.replica      the replica; autograd has saved views of it for backward, which keep its storage alive
    unit.shard        this rank's chunk of the parameters, FP32
    unit.uses         in backward: how many uses are still to go, without this one
    unit.gradient     yours: what waits of this micro-batch; None at its beginning
    unit.average      what the optimizer will see: this rank's chunk, FP32; None after a step
    unit.empty_parameters()                 makes the layer's parameters empty: using one is an error then
    reduce_scatter(full, unit.comm, op)     this rank's chunk; it needs buffers of its own
    x.untyped_storage()                     .nbytes() is its size in bytes, .resize_(bytes) changes it
"""

import math
from random import Random
from typing import Any, NamedTuple

import torch

from minizero.memory import Ledger
from tests.exercises import rank_kit
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, ranks, wrong
from tests.exercises.tasks import zero3

PLAN = [
    "After every use no byte of the replica is left, though views of it live on. A layer that touched its parameters "
    "now would raise. The shard stays.",
    "That holds between two uses, too: other units compute in between.",
    "The gradient of a unit is the sum over its uses. It waits in its own dtype. It is sent once, when it is complete.",
    "While it is sent, the replica's memory is free already: the ring needs buffers.",
    "At the end of the micro-batch no full gradient is left. unit.average has the mean over the ranks, even if their "
    "sum is infinite in FP16; if an earlier micro-batch left something there, the sum of both, in FP32.",
    "A sum of two full gradients needs no third one.",
]
HINTS = [
    "Sort what is to be done by when it may be done: after every use; after every use in backward; after the last "
    "one in backward. What needs memory comes after what gives memory back.",
    "`del`, or assigning a new tensor, only drops one reference of several: the storage itself must shrink. For the "
    "gradient it is the other way round: there dropping every name is what frees it.",
    "unit.replica.untyped_storage().resize_(0) empties it. Add with .add_ to what waits. When unit.uses is 0, "
    'take it out of unit.gradient, reduce-scatter it with "mean", and turn the result into FP32.',
]
AFTER = (
    "In the package these are two functions: `release` and `reduce` in minizero/engines/zero3.py, and other files "
    "say when they are called. Its order is the other one: autograd brings a unit's last gradient before the unit's"
    " input has its own, so `reduce` comes before `release`, and both are in memory for a moment. Ahead "
    "(minizero/engines/any_model/prefetch.py) gives the gradient to another thread and lets backward go on. Nothing "
    "counts uses beforehand there: autograd adds the gradients of all uses by itself and calls a hook when the "
    "sum of a parameter is complete (minizero/engines/core.py). Read next: minizero/engines/use.py, and "
    '"Who holds what, inside a step of stage 3" in notebooks/02b_zero_engines.ipynb.'
)
EMPTY = "unit.replica.untyped_storage().resize_(0)"
GONE = "unit.empty_parameters()"
KEEP = "unit.average = mean if unit.average is None else unit.average.add_(mean)"
BACK = "    if gradient is None:\n        return\n"
MORE = "    if unit.uses:\n        return\n"
FREE = f"    {EMPTY}\n    {GONE}\n"
WRONG = [
    wrong("frees-nothing", "After a use a rank still holds its whole replica: empty the storage. Autograd's views keep "
          "it alive, and zeros take as much room.", (EMPTY, "pass")),
    wrong("parameters-dangle", "The parameters still point into memory that is gone: make them empty, so that using "
          "one is an error.", (GONE, "pass")),
    wrong("stays-after-backward", "After the unit's backward its whole replica is still there: it must go after every "
          "use.", (FREE + BACK, f"    if gradient is None:\n        {EMPTY}\n        {GONE}\n        return\n")),
    wrong("stays-between-uses", "One of two uses went backward, and the replica stays for the other one. Units in "
          "between compute meanwhile: it must go, and is unsharded again.", (FREE, ""),
          (BACK, f"    if gradient is None:\n        {EMPTY}\n        {GONE}\n        return\n"),
          (MORE, f"{MORE}    {EMPTY}\n    {GONE}\n")),
    wrong("reduces-first", "While the gradient was sent, the replica was still there: nothing needs it any more. First "
          "give memory back, then do what takes some.", (FREE, ""),
          (BACK, f"    if gradient is None:\n        {EMPTY}\n        {GONE}\n        return\n"),
          (MORE, f"    if unit.uses:\n        {EMPTY}\n        {GONE}\n        return\n"),
          (KEEP, f"{EMPTY}\n    {GONE}\n    {KEEP}")),
    wrong("loses-a-micro-batch", "After the second micro-batch only its own gradient is there: add it to what the "
          "first one left.", (KEEP, "unit.average = mean")),
    wrong("forgot-divide", "unit.average is the sum over the ranks: take the mean.", ('"mean"', '"sum"')),
    wrong("adds-in-16-bits", "In BF16 256 + 1 is rounded back to 256: turn each mean into FP32 before you add it.",
          (".float()", "")),
]  # fmt: skip


class Case(NamedTuple):
    """uses: of the unit, in each micro-batch. halves: every second rank shares the unit.

    values: of each micro-batch, what all numbers of its gradients are.
    """

    ranks: int
    dtype: torch.dtype
    elements_each: int
    uses: tuple[int, ...]
    halves: bool
    seed: int
    values: tuple[float, ...] = ()


def draw(random: Random) -> list[Case]:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    uses, ways = [(1, 3), (2, 1), (3, 2)], [(n,) for n in rank_kit.SIZES] * 2
    plain = Case(4, torch.float32, 300, (2, 3), False, 1)
    large = Case(4, torch.bfloat16, 250, (1, 1), False, 1, (256.0, 1.0))  # their sum in BF16 is 256
    huge = large._replace(dtype=torch.float16, uses=(1,), values=(2.0**14,))  # four of them are infinite
    rows = deal(random, ways, dtypes, [1, 3, 8], uses, [False, False, True])
    return [plain, large, huge, *(Case(*row) for row in rows)]


def result(case: Case) -> dict[str, Any]:
    """After each use: what the unit has, and what is held and sent; then the average. All sums are exact."""
    special = (math.inf, -math.inf, math.nan)

    def on_rank(world) -> dict[str, Any]:
        comm = world.split(world.rank % 2) if case.halves else world
        n = case.elements_each * comm.size
        unit, found = zero3.Unit([torch.ones(n)], comm, case.dtype), dict[str, Any]()

        def use(name: str, gradient: list[torch.Tensor | None]) -> None:
            zero3.unshard(unit)
            before, replica, storage, then = comm.bytes_sent, unit.replica, unit.replica.untyped_storage(), list[int]()
            old = [x.data_ptr() for x in (unit.gradient, *gradient) if x is not None]
            comm.observers[:] = [lambda *_: then.append(storage.nbytes())]
            zero3.reshard(unit, gradient.pop())
            comm.observers.clear()
            if not unit.shard.untyped_storage().nbytes():
                fail("frees-the-shard", "This rank's own chunk, unit.shard, was emptied too: nobody has it any more.")
            found[name] = {
                "bytes sent": comm.bytes_sent - before,
                "bytes of the replica": storage.nbytes(),
                "bytes of the replica while something is sent": max(then, default=0),
                "the replica is the same tensor": unit.replica is replica,
                "bytes of gradients": AtMost(ledger.current["total"]),
                "a sum waits in a third tensor": len(old) == 2
                and unit.gradient is not None
                and unit.gradient.data_ptr() not in old,
                "lengths of the parameters": [p.numel() for p in unit.parameters],
                "the shard is as before": torch.equal(unit.shard, torch.ones(case.elements_each)),
                "unit.uses": unit.uses,
            }

        with Ledger() as ledger:
            for m, uses in enumerate(case.uses):
                for unit.uses in range(1, uses + 1):
                    use(f"micro-batch {m}, use {unit.uses}, forward", [None])
                for unit.uses in reversed(range(uses)):
                    seed = case.seed + 100 * m + 10 * unit.uses + comm.rank
                    gradient = rank_kit.whole(seed, (n,), case.dtype, times=comm.size, special=special)
                    gradient[case.seed % n] = rank_kit.smallest(case.dtype)
                    if case.values:
                        gradient.fill_(case.values[m])
                    use(f"micro-batch {m}, use {unit.uses + 1}, backward", [gradient])
                found[f"micro-batch {m}, average"] = unit.average if unit.average is None else unit.average.clone()
        return found

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
