"""Processes agree by the tags of their messages: at no cost, and those that disagree are told so."""

import contextlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from test_processes import error_of, run, timed

from minizero import World
from minizero.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.comm import Comm
from minizero.processes import WORDS_BYTES


def own_comm(comm):
    """`comm` itself among threads; among processes one of its own, since a mismatch ends a communicator there."""
    return Comm.from_process_group() if dist.is_initialized() else contextlib.nullcontext(comm)


def mismatches(comm):
    """What every rank is told where the last one does something else."""
    cases = {
        "shape": lambda comm, odd: all_reduce(torch.ones(4 + odd), comm),
        "dtype": lambda comm, odd: all_gather(torch.ones(4, dtype=torch.float16 if odd else torch.float32), comm),
        "op": lambda comm, odd: all_reduce(torch.ones(4), comm, "max" if odd else "min"),
        "root": lambda comm, odd: broadcast(torch.ones(4), comm, root=int(odd)),
        "operation": lambda comm, odd: barrier(comm) if odd else broadcast(torch.ones(4), comm),
        "nothing": lambda comm, odd: all_gather(torch.ones(0), comm) if odd else barrier(comm),
        "label": lambda comm, odd: all_gather(torch.ones(4), comm, label="odd" if odd else "even"),
        "space": lambda comm, odd: all_gather(torch.ones(4), comm, label="name " if odd else "name"),
        "split": lambda comm, odd: comm.split(0) if odd else barrier(comm),
        "in a part": lambda comm, odd: all_reduce(torch.ones(4 + odd), comm.split(0)),
        "after others": lambda comm, odd: [all_reduce(torch.ones(4 + odd * (i == 3)), comm) for i in range(5)],
    }
    found = {}
    for case, call in cases.items():
        with own_comm(comm) as own:
            barrier(own)
            found[case] = timed(lambda: call(own, own.rank == own.size - 1))  # noqa: B023
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_mismatch_is_told_on_every_rank_and_names_both_sides(size, tmp_path):
    threads, processes = World(size).run(mismatches), run(mismatches, size, tmp_path)
    for rank, (there, limit) in itertools.product(range(size), [(threads, 0.5), (processes, 2)]):
        for name, (kind, message, _, seconds) in there[rank].items():
            assert kind == "CollectiveMismatch", (name, message)
            assert f"rank {rank} called" in message and f"rank {size - 1} called" in message
            assert seconds < limit, name


class Counting:
    """What gloo is asked to send."""

    def __init__(self, gloo):
        self.gloo, self.sent = gloo, []

    def send(self, tensors, *where):
        self.sent.append(tensors[0].nbytes)
        return self.gloo.send(tensors, *where)

    def recv(self, *what):
        return self.gloo.recv(*what)


def agreeing(comm):
    """What is sent in each collective; then many collectives of ranks that are late by turns."""
    counting, found = Counting(comm.gloo), {}
    comm.gloo, tensor = counting, torch.ones(12, dtype=torch.float64)
    calls = {"gather": all_gather, "scatter": reduce_scatter, "reduce": all_reduce}
    for name, call in calls.items():
        call(tensor, comm)
        found[name], counting.sent = counting.sent, []
    for turn in range(2 * comm.size):
        time.sleep(0.6 if turn % comm.size == comm.rank else 0)  # long enough for the others to look round twice
        for elements in (3, 5 + turn, 4):
            all_reduce(torch.ones(elements), comm)
        broadcast(torch.ones(2), comm, root=turn % comm.size)
        barrier(comm)
    return found, comm.watch.told


@pytest.mark.slow
def test_an_agreement_costs_no_message_and_a_late_rank_is_no_mismatch(tmp_path):
    for found, told in run(agreeing, 3, tmp_path):
        assert found == {"gather": [96] * 2, "scatter": [32] * 2, "reduce": [32] * 4}
        assert told == ""


def long_words(comm):
    """Long labels that differ at their end only, and words of any length."""
    found = []
    for common in ("a" * 500, "ü€😀" * 100, "b" * WORDS_BYTES):
        same = error_of(lambda common=common: all_gather(torch.ones(2), comm, label=common))
        with Comm.from_process_group() as own:
            odd = error_of(lambda common=common: all_gather(torch.ones(2), own, label=f"{common}{own.rank}"))  # noqa: B023
        found.append((odd, same))
    # Around the limit, where the cut may fall into a letter of several bytes.
    for length in range(WORDS_BYTES - 12, WORDS_BYTES + 4):
        words = "x" * (length - 3) + "€"
        found.append((comm.exchange(words)[0][:200], len(set(comm.exchange(words + str(comm.rank))))))
    color = "c" * 400 + str(comm.rank % 2)
    found.append(comm.split(color).size)
    # A message that looks like words must not be taken for them.
    tensor = torch.full((WORDS_BYTES,), 65 + comm.rank, dtype=torch.uint8)
    comm.timeout = 1.0
    found.append(error_of(lambda: barrier(comm) if comm.rank else comm.send(tensor, 1)))
    return found


@pytest.mark.slow
def test_long_words_and_stray_messages(tmp_path):
    for found in run(long_words, 2, tmp_path):
        for odd, same in found[:3]:
            assert odd[0] == "CollectiveMismatch" and same is None, (odd, same)
        for words, different in found[3:-2]:
            assert words.startswith("xxx") and different == 2
        assert found[-2] == 1
        assert found[-1][0] == "CommTimeout", found[-1]
