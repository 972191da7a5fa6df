"""ZeRO stage 1: the optimizer has updated this rank's chunk of a unit; the others' chunks of the replica are old.
So before the unit's next forward all ranks gather all its chunks: an all-gather of parameters, where DDP had one of
gradients.

    unit.master     this rank's chunk, FP32, updated      unit.replica    the replica, in the computing dtype
    unit.replica_is_stale()      has the master been written since?       unit.replica_is_fresh_now()    remembers it

In FP32 the master is a view into the replica. In 16 bits it must be rounded into the replica first: copy_ rounds.
"""

from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from minizero import Zero1
from minizero.memory import Ledger
from tests.exercises import e09_zero1_keep as keep
from tests.exercises import rank_kit
from tests.exercises.kit import fail, ranks, wrong

PLAN = [
    "Only if the unit's replica is stale:",
    "`mine` is this rank's chunk of unit.replica. Round the master into it: copy_ does.",
    "Gather all ranks' chunks into the unit.replica that is there: all_gather(mine, self.comm, out=…, "
    "label=unit.name).",
    "Last, when the chunks are there, say that the replica is fresh now, or it will be gathered again.",
]
HINTS = [
    "unit.chunk(unit.replica) is a view: what is written to it is in unit.replica.",
    "With out=unit.replica the gathered chunks land in the replica; what all_gather returns is not needed.",
]
AFTER = (
    "The package gathers before a forward, and not after the step, so it needs no hook on the optimizer. It looks at "
    "PyTorch's count of in-place writes, `_version`, so a second forward without a step sends nothing. In FP32 the "
    "master lies in the replica's memory. It has a count of its own, so a gather into the replica is no write to it. "
    "Read next: `replica_is_stale` in minizero/engines/core.py."
)
GATHER = "all_gather(mine, self.comm, out=unit.replica, label=unit.name)"
WRONG = [
    wrong("forgets-the-gather", "After a step a rank has new values of its own chunk only: gather those of the "
          "others.", (GATHER, "pass")),
    wrong("gathers-always", "Gather what is stale, and then, after the gather, mark it as fresh: "
          "unit.replica_is_fresh_now().", ("if unit.replica_is_stale():", "if True:")),
    wrong("forgets-to-round", "In FP16 a step was taken, and the model's weights are as before: the masters moved, but "
          "were not rounded into the replica. mine.copy_(unit.master).", ("mine.copy_(unit.master)", "pass")),
    wrong("forgets-the-label", "all_gather got no label. With label=unit.name the ranks notice if they gather "
          "different units.", (GATHER, "all_gather(mine, self.comm, out=unit.replica)")),
    wrong("sums-instead", "They are gathered, not added up.",
          (GATHER, "from minizero.ranks.collectives import all_reduce\n"
           "        unit.replica.copy_(all_reduce(unit.replica, self.comm, label=unit.name))")),
]  # fmt: skip


def draw(random: Random) -> list[keep.Case]:
    return keep.draw(random)[:24]  # in random order


def result(case: keep.Case) -> dict[str, Any]:
    """Three units. Two of them are stepped, and later one; in between and in the end nothing is stale."""
    module = keep.layer(case)

    def on_rank(comm) -> dict[str, Any]:
        inside = keep.group_of(case, comm)
        labels: list[str] = []
        units = [keep.unit_of(case, comm, inside, module) for _ in range(3)]
        for number, (unit, full) in enumerate(units):
            Zero1.keep(None, unit, full)  # type: ignore[arg-type]
            unit.replica_is_fresh_now()
            unit.name = f"unit {number}"
        replicas = [unit.replica for unit, _ in units]
        engine: Any = SimpleNamespace(units=[unit for unit, _ in units], comm=inside)
        seen: dict[str, Any] = {"the units that are gathered, in order": labels}
        inside.observers.append(lambda operation, label, _: labels.append(label))
        for name, stepped in {"two steps": (0, 2), "no step": (), "a step": (1,), "no other step": ()}.items():
            with torch.no_grad():
                for number in stepped:
                    unit = engine.units[number]
                    unit.master.mul_(1.01).add_(comm.rank)
                    unit.master[:1] = torch.nan if number == 1 else unit.master[:1]
            before = inside.bytes_sent
            with Ledger() as ledger:
                for unit in engine.units:
                    Zero1.gather(engine, unit)
            if "" in labels:
                fail(
                    "forgets-the-label",
                    "all_gather got no label. With label=unit.name the ranks notice if they gather different units.",
                )
            seen[f"after {name} the replicas"] = [unit.replica.clone() for unit in engine.units]
            seen[f"after {name} the replicas are the same tensors"] = all(
                unit.replica is replica for unit, replica in zip(engine.units, replicas)
            )
            seen[f"after {name} the parameters"] = [
                p.detach().clone() for unit in engine.units for p in unit.parameters
            ]
            seen[f"after {name} the masters"] = [unit.master.clone() for unit in engine.units]
            # On 2 ranks, two chunks are as large.
            second = inside.size > 2 and ledger.peak["total"] >= replicas[0].nbytes
            seen[f"in {name} a second buffer is as large as a replica"] = second
            seen[f"after {name} bytes sent"] = inside.bytes_sent - before
            seen[f"after {name} something is stale"] = any(unit.replica_is_stale() for unit in engine.units)
        return seen

    return rank_kit.by_rank(ranks(case.ranks, on_rank))
