"""The ledger's tape: everything that happened to storages, in order; and what can be read off it.

    a phase's name     this phase begins: "forward", "backward", "optimizer" or "between"
    an operator        this operator has run
    a record           the first time, its storage was born; the second time, the storage died
    (record, bytes)    the record's storage was resized, by so many bytes

Nothing is added up while the program runs. That keeps watching cheap. It also lets a storage learn its category
later, and count as that from its birth.

Each function below takes a tape and `start`: what stands before this index describes what existed already.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication", "buffers", "host")
Tape = list[Any]


class Record(weakref.ref[torch.UntypedStorage]):
    """A weak reference to one storage, and what is known of it."""

    __slots__ = ("first_size", "size", "category", "phase", "module", "birth")

    first_size: int  # bytes at its birth, or at the last reset
    size: int  # bytes now
    category: str | None  # None until something tells: in the end that is "temporary"
    phase: str  # in which it was born
    module: str  # whose forward was running then; for parameters, gradients and states, the module that owns them
    birth: Any  # what a recorder notes that asks for more (xray/lines.py); else it is not set


class Sample(dict):
    """Bytes by category, and `total`, at one moment."""

    phase: str
    operator: str  # the last one that had run
    number: int  # how many operators had run


class Moment:
    """What is alive at one moment, while the tape is replayed."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys((*CATEGORIES, "total"), 0)
        self.phase = "between"
        self.operator: Any = None  # the last one that had run
        self.number = 0  # how many operators had run
        self.alive: dict[int, list[Any]] = {}  # by the record's id: the record, its bytes, the operator that made it
        self.changed: Any = None  # the record of what was born, resized or has died last

    def sample(self) -> Sample:
        """A copy to keep."""
        sample = Sample(self.totals)
        sample.phase, sample.operator, sample.number = self.phase, str(self.operator or ""), self.number
        return sample


def moments(tape: Tape, start: int = 0) -> Iterator[Moment]:
    """The moment at `start`, and the moment after every birth, resize and death since.

    Each time it is the same object, brought up to date: `sample()` makes a copy.
    """
    now = Moment()
    for place, entry in enumerate([*tape, None]):  # a copy, because a storage may die in another thread meanwhile
        if place == start:
            yield now
        if type(entry) is Record:
            record = entry
            if id(record) in now.alive:  # it died
                change = -now.alive.pop(id(record))[1]
            else:  # it was born
                change = record.first_size
                now.alive[id(record)] = [record, change, now.operator]
        elif type(entry) is tuple:
            record, change = entry
            now.alive[id(record)][1] += change
        elif type(entry) is str:
            now.phase = entry
            continue
        else:
            now.operator, now.number = entry, now.number + 1
            continue
        now.changed = record
        now.totals[record.category or "temporary"] += change
        if record.category != "host":  # the total is what the device holds: the host's memory is not in it
            now.totals["total"] += change
        if place >= start:
            yield now


def columns(curve: list[Sample]) -> dict[str, list[Any]]:
    """A curve as plain data, fit for JSON: one list for each key."""
    parts = {key: [sample[key] for sample in curve] for key in curve[0]}
    return parts | {key: [getattr(sample, key) for sample in curve] for key in ("phase", "operator", "number")}


def at_peak(tape: Tape, start: int) -> Moment:
    """The first moment at which `total` is largest."""
    totals = [moment.totals["total"] for moment in moments(tape, start)]
    return next(itertools.islice(moments(tape, start), totals.index(max(totals)), None))


def holders(moment: Moment) -> list[dict[str, Any]]:
    """Who holds what is alive: rows of `module category operator phase bytes tensors`, the largest first.

    module: the module in whose forward the tensors were born, or which owns the parameter, its gradient or its state.
    operator, phase: what made the tensors, and when. Both are empty if the tensors are older than the ledger.
    """
    sizes, tensors = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for record, held, operator in moment.alive.values():
        older = operator is None  # no operator had run yet
        row = record.module, record.category or "temporary", str(operator or ""), "" if older else record.phase
        sizes[row] += held
        tensors[row] += 1
    names = "module", "category", "operator", "phase", "bytes", "tensors"
    return [dict(zip(names, (*row, held, tensors[row]))) for row, held in sizes.most_common() if held]
