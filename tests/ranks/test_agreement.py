"""Processes agree by the tags of their messages: at no cost, and those that disagree are told so."""

import time
import types

import pytest
import torch
import torch.distributed as dist

from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.comm import Comm
from minizero.ranks.processes.watch import Watch
from minizero.ranks.transport import Collective
from tests.support.failures import DISAGREE, SOON, error_of, timed
from tests.support.helpers import soak
from tests.support.processes import run


def broken(comm, odd):
    """Once more, on a communicator that has told a mismatch."""
    all_reduce(torch.ones(4 + odd), comm)


def mismatches(comm):
    """What every rank is told where the last one does something else; each ends a communicator of its own."""
    cases = {name: call for name, (call, *_) in DISAGREE.items()} | {
        "told twice": lambda comm, odd: [error_of(lambda: all_reduce(torch.ones(4 + odd), comm)), broken(comm, odd)],
        "in a part": lambda comm, odd: all_reduce(torch.ones(4 + odd), comm.split(0)),
        "after others": lambda comm, odd: [all_reduce(torch.ones(4 + odd * (i == 3)), comm) for i in range(5)],
    }
    found = {}
    for case, call in cases.items():
        with Comm.from_process_group() as own:
            barrier(own)
            found[case] = timed(lambda: call(own, own.rank == own.size - 1))  # noqa: B023
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [*soak(2), 3])
def test_a_mismatch_is_told_on_every_rank_and_names_both_sides(size, tmp_path):
    for rank, found in enumerate(run(mismatches, size, tmp_path)):
        for name, (kind, message, _, seconds) in found.items():
            assert kind == "CollectiveMismatch", (name, message)
            assert f"rank {rank} called" in message and f"rank {size - 1} called" in message
            assert seconds < SOON, name


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
    counting, found = Counting(comm.transport.gloo), {}
    comm.transport.gloo, tensor = counting, torch.ones(12, dtype=torch.float64)
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
    return found, comm.transport.watch.told


@pytest.mark.slow
def test_an_agreement_costs_no_message_and_a_late_rank_is_no_mismatch(tmp_path):
    for found, told in run(agreeing, 3, tmp_path):
        assert found == {"gather": [96] * 2, "scatter": [32] * 2, "reduce": [32] * 4}
        assert told == ""


class Refusing:
    """gloo, all of whose connections are closed already."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size
        self.asked = []

    def recv(self, tensors, peer, tag):
        self.asked.append(peer)
        raise RuntimeError("closed")


def stopped(rank, size):
    """The watch of one rank, whose thread has ended."""
    watch = Watch(Refusing(rank, size), dist.HashStore(), list(range(size)))
    watch.stop()
    return watch


def test_one_closed_connection_does_not_keep_the_others_open():
    watch = stopped(1, 4)
    watch.close()
    assert watch.gloo.asked == [0, 2, 3]


def test_what_a_mismatch_was_about_stays_for_those_who_come_later():
    watch, transport = stopped(0, 2), types.SimpleNamespace(rank=0, size=2, name="")
    transport.mismatch = lambda mine, rank, theirs: f"{mine} and {rank}'s {theirs}"
    transport.collective = Collective(7, "gather #7", "gather #7")
    watch.store.set(" 1", "7 scatter #7")
    assert watch.compare(transport) == {0: "gather #7", 1: "scatter #7"}
    assert watch.told == "gather #7 and 1's scatter #7"
    transport.collective = Collective(8, "gather #8", "gather #8")  # the program goes on
    watch.compare(transport)
    assert watch.store.get(" 0") == b"7 gather #7"


def long_words(comm):
    """Words of any length, also where they differ at their end only; and a message that looks like words."""
    common = "ü€😀" * 200
    assert error_of(lambda: all_gather(torch.ones(2), comm, label=common)) is None
    with Comm.from_process_group() as own:
        odd = error_of(lambda: all_gather(torch.ones(2), own, label=f"{common}{own.rank}"))
    said = [comm.transport.exchange(words * (1 + comm.rank)) for words in (common, "", "\0x")]
    size = comm.split(f"{common}{comm.rank}").size
    comm.timeout = 1.0
    stray = error_of(lambda: barrier(comm) if comm.rank else comm.send(torch.ones(1, dtype=torch.uint8), 1))
    return odd[0], said, size, stray[0]


@pytest.mark.slow
def test_long_words_and_stray_messages(tmp_path):
    common, ranks = "ü€😀" * 200, run(long_words, 2, tmp_path)
    for odd, said, size, _ in ranks:
        assert (odd, size) == ("CollectiveMismatch", 1)
        assert said == [[words, 2 * words] for words in (common, "", "\0x")]
    kinds = {stray for *_, stray in ranks}  # who times out first closes the connection; the other may see that first
    assert "CommTimeout" in kinds and kinds <= {"CommTimeout", "RankFailed"}, kinds
