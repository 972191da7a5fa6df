"""The ledger's tape: everything that happened to storages, in order; and what can be read off it.

    a phase's name     the phase begins: "forward", "backward", "optimizer" or "between"
    an operator        it has run
    a record           its storage was born; the second time, it died
    (record, bytes)    it was resized, by so many bytes

Nothing is added up while the program runs, which keeps that cheap, and lets a storage be given its category
later and still count as that from its birth. `start`: so much of a tape is what was there before.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication", "buffers", "host")
Tape = list[Any]


class Record(weakref.ref[torch.UntypedStorage]):
    """What is known of one storage: its bytes at first and now, and where it comes from."""

    __slots__ = ("first_size", "size", "category", "phase", "module")

    first_size: int
    size: int
    category: str | None
    phase: str  # in which it was born
    module: str  # whose forward was running then; of a model's states, the module that they belong to


class Sample(dict):
    """Bytes by category, and `total`, at one moment."""

    phase: str
    operator: str  # the last that had run
    number: int  # how many had run


class Moment:
    """What is alive at one moment of the replay."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys((*CATEGORIES, "total"), 0)
        self.phase, self.operator, self.number = "between", None, 0
        self.alive: dict[int, list[Any]] = {}  # record, bytes, and the operator that had run when it was born

    def sample(self) -> Sample:
        """A copy to keep."""
        sample = Sample(self.totals)
        sample.phase, sample.operator, sample.number = self.phase, str(self.operator or ""), self.number
        return sample


def moments(tape: Tape, start: int = 0) -> Iterator[Moment]:
    """The start, and every event since: the same object each time, brought up to date."""
    now = Moment()
    for place, entry in enumerate([*tape, None]):  # a copy: a storage may die in another thread meanwhile
        if place == start:
            yield now
        if type(entry) is Record:
            record = entry
            if id(record) in now.alive:
                change = -now.alive.pop(id(record))[1]
            else:
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
        now.totals[record.category or "temporary"] += change
        if record.category != "host":  # the total is what the device holds
            now.totals["total"] += change
        if place >= start:
            yield now


def peak(tape: Tape, start: int) -> dict[str, int]:
    """The most bytes of each category at any moment; `total` is the most of all together."""
    most = dict.fromkeys((*CATEGORIES, "total"), 0)
    for moment in moments(tape, start):
        for category, held in moment.totals.items():
            if held > most[category]:
                most[category] = held
    return most


def peak_by_phase(tape: Tape, start: int) -> dict[str, dict[str, int]]:
    """The same within each phase, in the order in which the phases first came."""
    most: dict[str, dict[str, int]] = {}
    for moment in moments(tape, start):
        of_phase = most.setdefault(moment.phase, dict.fromkeys(moment.totals, 0))
        for category, held in moment.totals.items():
            of_phase[category] = max(of_phase[category], held)
    return most


def at_peak(tape: Tape, start: int) -> Moment:
    """The first moment at which `total` is largest."""
    totals = [moment.totals["total"] for moment in moments(tape, start)]
    return next(itertools.islice(moments(tape, start), totals.index(max(totals)), None))


def holders(moment: Moment) -> list[dict[str, Any]]:
    """Who holds what is alive: rows of `module category operator phase bytes tensors`, the largest first.

    module: in whose forward it was born, or to whom a parameter, its gradient or its state belongs.
    operator, phase: which made it, and when; empty where it is older than the ledger.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for record, held, operator in moment.alive.values():
        older = operator is None
        key = record.module, record.category or "temporary", str(operator or ""), "" if older else record.phase
        names = dict(zip(("module", "category", "operator", "phase"), key))
        row = rows.setdefault(key, names | {"bytes": 0, "tensors": 0})
        row["bytes"] += held
        row["tensors"] += 1
    return sorted((row for row in rows.values() if row["bytes"]), key=lambda row: -row["bytes"])
