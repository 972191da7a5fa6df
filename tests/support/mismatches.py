"""Programs in which one rank, `odd`, does something else than the others, or all do something wrong.

A `Case` is such a program: `case.work(comm)` runs it on a rank. Every one of them must end, soon, in an error that says
what was wrong. Collectives and messages are here, training in mismatched_training.py, where `CASES` has all of them.
"""

import dataclasses
import time
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from minizero import (
    CollectiveMismatch,
    CommTimeout,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
)

LATE = 3.0  # seconds that a rank sleeps which comes too late
MISMATCH, TIMEOUT, BAD, OWN = {CollectiveMismatch}, {CommTimeout}, {ValueError}, {ArithmeticError}
RETURNED = {RuntimeError}  # "rank 1 returned while rank 0 was waiting in …"


@dataclasses.dataclass
class Case:
    """work(comm) on each rank; causes: the errors that may be the first; leaves: the odd rank itself just returns."""

    name: str
    size: int
    odd: int
    work: Callable
    causes: set[type]
    leaves: bool = False

    def __repr__(self):
        return f"rank {self.odd} of {self.size}: {self.name}"


# Collectives.


@dataclasses.dataclass(frozen=True)
class Call:
    operation: str
    shape: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    root: int = 0
    label: str = ""

    def do(self, comm):
        rows = self.shape[0] * (comm.size if self.operation == "reduce_scatter" else 1)
        tensor = torch.ones(rows, *self.shape[1:]).to(self.dtype)
        return {
            "all_gather": lambda: all_gather(tensor, comm, label=self.label),
            "reduce_scatter": lambda: reduce_scatter(tensor, comm, self.op, label=self.label),
            "all_reduce": lambda: all_reduce(tensor, comm, self.op, label=self.label),
            "broadcast": lambda: broadcast(tensor, comm, self.root, label=self.label),
            "barrier": lambda: barrier(comm),
            "split": lambda: comm.split(comm.rank % 2),
        }[self.operation]()


MOVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
OTHERWISE = {  # a call, changed so that it no longer fits the others'
    "op": lambda call: dataclasses.replace(call, op="max" if call.op == "sum" else "sum"),
    "root": lambda call: dataclasses.replace(call, root=1 - call.root),
    "dtype": lambda call: dataclasses.replace(call, dtype=torch.int64 if call.dtype != torch.int64 else torch.float32),
    "label": lambda call: dataclasses.replace(call, label=call.label + "odd"),
    "more rows": lambda call: dataclasses.replace(call, shape=(call.shape[0] + 1, *call.shape[1:])),
    "another dimension": lambda call: dataclasses.replace(call, shape=(*call.shape, 1)),
    "nothing": lambda call: dataclasses.replace(call, shape=(0, 3)),
    "operation": lambda call: dataclasses.replace(call, operation=another(call)),
}
OTHER_FAULTS = ("order", "missing", "extra", "raises", "returns", "late", "argument")


def another(call):
    """An operation that is not the call's."""
    names = (*MOVES, "barrier", "split")
    return names[(names.index(call.operation) + 1 + len(call.label) % 5) % 6]


def wrong_arguments(comm):
    """Calls that are wrong by themselves."""
    ones, far = torch.ones(4), comm.size + 3
    return [
        lambda: all_reduce(ones, comm, "median"),
        lambda: all_reduce(ones.long(), comm, "mean"),
        lambda: broadcast(ones, comm, root=far),
        lambda: broadcast(ones, comm, root=-1),
        lambda: reduce_scatter(torch.ones(comm.size + 1), comm),
        lambda: all_gather(torch.tensor(1.0), comm),
        lambda: all_gather(ones, comm, out=torch.ones(3)),
        lambda: comm.send(ones, far),
        lambda: comm.recv(ones, comm.rank),
        lambda: comm.send_recv(ones, (comm.rank + 1) % comm.size, ones, (comm.rank - 1) % comm.size),
    ]


def end(comm):
    """What all ranks come to, so that a mistake in a part of them, or in the last call, is seen by all."""
    all_reduce(torch.ones(7), comm, label="the end")


def raises(comm):
    raise ArithmeticError("on purpose")


calls = st.builds(
    Call,
    st.sampled_from([*MOVES, *MOVES, "barrier", "split"]),
    st.sampled_from([(1,), (6,), (2, 3), (5, 1, 2), (500,)]),
    st.sampled_from([torch.float32, torch.float16, torch.int64]),
    st.sampled_from(["sum", "max", "min"]),
    st.integers(0, 1),
    st.sampled_from(["", "blocks.0", "blocks.1"]),
)


@st.composite
def collective_case(draw, fault):
    """A list of calls, that the odd rank changes at one place."""
    size = draw(st.integers(2, 4))
    odd = draw(st.integers(0, size - 1))
    part = size == 4 and draw(st.booleans())  # in the half of the ranks that the odd one is in
    usual = draw(st.lists(calls, min_size=1, max_size=4))
    at = draw(st.integers(0, len(usual) - 1))
    number = draw(st.integers(0, 9))  # of the wrong argument
    causes, odd_calls = MISMATCH, list(usual)
    if fault in OTHERWISE:
        allowed = {"op": ("all_reduce", "reduce_scatter"), "root": ("broadcast",), "operation": (*MOVES, "barrier")}
        usual[at] = dataclasses.replace(usual[at], operation=draw(st.sampled_from(allowed.get(fault, MOVES))))
        odd_calls = [*usual]
        odd_calls[at] = OTHERWISE[fault](usual[at])
    elif fault == "order":
        usual.insert(at, dataclasses.replace(usual[at], operation="barrier" if at % 2 else "split"))
        usual[at + 1] = dataclasses.replace(usual[at + 1], operation=draw(st.sampled_from(MOVES)))
        odd_calls = [*usual[:at], usual[at + 1], usual[at], *usual[at + 2 :]]
    elif fault == "missing":
        odd_calls, causes = usual[:at] + usual[at + 1 :], MISMATCH | TIMEOUT
    elif fault == "extra":
        odd_calls, causes = [*usual[:at], usual[at], *usual[at:]], MISMATCH | TIMEOUT
    elif fault == "returns":
        odd_calls, causes = usual[:at], RETURNED
    else:
        causes = {"raises": OWN, "late": TIMEOUT, "argument": BAD}[fault]

    def work(comm):
        chosen = comm.split(comm.rank % 2) if part else comm
        for place, call in enumerate(odd_calls if comm.rank == odd else usual):
            if comm.rank == odd and place == at:
                if fault == "late":
                    time.sleep(LATE)
                if fault == "raises":
                    raises(comm)
                if fault == "argument":
                    wrong_arguments(chosen)[number]()
            call.do(chosen)
        if not (fault == "returns" and comm.rank == odd):
            end(comm)

    name = f"{fault} at {at} of {usual}{' in a part' if part else ''}"
    return Case(name, size, odd, work, causes, leaves=fault == "returns")


# Messages.


def messages(comm, odd, kind):
    """One rank after the other to the next; the odd one sends or receives something else."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    outgoing, incoming = torch.ones(5), torch.empty(5)
    if comm.rank == odd:
        outgoing = {"longer": torch.ones(9), "shorter": torch.ones(1), "dtype": torch.ones(5).int()}.get(kind, outgoing)
        if kind == "absent":
            return
        if kind == "barrier":
            barrier(comm)
    if kind == "all send first":
        comm.send(outgoing, right)
        comm.recv(incoming, left)
    else:
        comm.send_recv(outgoing, right, incoming, left)
    end(comm)


MESSAGE_CAUSES = {
    "longer": MISMATCH | TIMEOUT,  # processes cannot tell a message that does not fit from one that never came
    "shorter": MISMATCH | TIMEOUT,
    "dtype": MISMATCH | TIMEOUT,
    "absent": RETURNED,
    "barrier": TIMEOUT,
    "all send first": TIMEOUT,
}


@st.composite
def message_case(draw, kind):
    size = draw(st.integers(2, 4))
    odd = draw(st.integers(0, size - 1))
    causes, leaves = MESSAGE_CAUSES[kind], kind == "absent"
    return Case(f"message, {kind}", size, odd, lambda comm: messages(comm, odd, kind), causes, leaves)
