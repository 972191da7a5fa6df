"""A split makes communicators of their own: ranks by color, and messages that stay inside."""

import torch

from minizero import World
from minizero.ranks.collectives import all_gather, all_reduce


def test_split_by_color_and_again():
    def fn(comm):
        third = comm.split(comm.rank % 3)  # of 3, 3 and 2 ranks
        assert all_gather(torch.tensor([comm.rank]), third).tolist() == list(range(comm.rank % 3, 8, 3))
        assert (third.rank, third.size) == (comm.rank // 3, 2 + (comm.rank % 3 < 2))
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
