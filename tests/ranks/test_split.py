"""A split makes communicators of their own: ranks by color, and messages that stay inside."""

import pytest
import torch

from minizero import CollectiveMismatch, World
from minizero.ranks.collectives import all_gather, all_reduce, barrier
from tests.support.failures import compute, failure_of


def test_split_by_color():
    def fn(comm):
        part = comm.split(comm.rank % 3)
        members = all_gather(torch.tensor([comm.rank]), part).tolist()
        total = all_reduce(torch.tensor([comm.rank]), comm).item()  # the whole still works
        return part.rank, part.size, members, total

    results = World(7).run(fn)
    for rank, result in enumerate(results):
        members = list(range(rank % 3, 7, 3))
        assert result == (members.index(rank), len(members), members, 21)


def test_split_of_a_split():
    def fn(comm):
        half = comm.split(comm.rank // 4)
        pair = half.split(half.rank // 2)
        cross = comm.split(comm.rank % 4)
        sums = [all_reduce(torch.tensor(comm.rank), c).item() for c in (pair, cross, half, comm)]
        return pair.rank, sums

    for rank, (place, sums) in enumerate(World(8).run(fn)):
        assert place == rank % 2
        assert sums == [4 * (rank // 2) + 1, 2 * (rank % 4) + 4, 6 if rank < 4 else 22, 28]


def test_split_carries_device_and_timeout():
    def fn(comm):
        comm.timeout = 7.0
        part = comm.split(0)
        return part.timeout, part.device == comm.device

    assert World(2).run(fn) == [(7.0, True)] * 2


def test_split_against_another_collective_is_a_mismatch_on_every_rank():
    def fn(comm):
        with pytest.raises(CollectiveMismatch) as caught:
            comm.split(7) if comm.rank == 1 else all_reduce(torch.ones(2), comm)
        barrier(comm)  # all agree again
        return str(caught.value)

    for message in World(3).run(fn):
        assert "split #1" in message and "all_reduce #1" in message


def test_a_split_that_one_rank_leaves_out_is_named():
    def fn(comm):
        if comm.rank == 0:
            compute()
        else:
            comm.split(0)

    failed, _ = failure_of(World(2, timeout=0.2), fn)
    assert str(failed.__cause__) == "rank 1 waited 0.2 s in split #1: agreement with rank 0"
