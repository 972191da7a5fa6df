"""Every run gives the same, whenever a thread stops or goes on: races that show once in a hundred runs."""

import sys
from queue import Empty, SimpleQueue

import pytest
import torch

from minizero import World
from minizero.ranks.collectives import all_reduce, barrier, broadcast
from minizero.ranks.threads import Run, ThreadTransport


def mixed(comm):
    """Uses everything, in an order that shifts the ranks against each other."""
    part = comm.split(comm.rank % 2)
    total = torch.zeros(4)
    for step in range(5):
        total += all_reduce(torch.full((4,), float(comm.rank + step)), comm)
        total += broadcast(torch.full((4,), float(comm.rank)), part, root=part.size - 1)
        other = torch.empty(2)
        comm.send_recv(total[:2].clone(), (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
        total += other.sum()
        barrier(part)
    return total.tolist()


@pytest.mark.parametrize(
    "size, runs, switch",  # how often, and how many seconds a thread runs before another may
    [(4, 10, 5e-3), *(pytest.param(size, 500, 1e-6, marks=pytest.mark.soak) for size in (2, 3, 4, 7, 16))],
)
def test_the_same_every_time(size, runs, switch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch)
    try:
        expected = World(size).run(mixed)
        for _ in range(runs):
            assert World(size).run(mixed) == expected
    finally:
        sys.setswitchinterval(before)


def test_a_message_that_came_between_two_looks_is_not_lost():
    run = Run(2)
    run.transports = [ThreadTransport(rank, [0, 1], torch.device("cpu"), 1.0, "", run) for rank in range(2)]

    class Late(SimpleQueue):
        def get(self, timeout):  # sent and returned, just after the first look
            if not run.finished:
                run.finished.add(1)
                self.put("message")
                raise Empty
            return super().get(timeout=timeout)

    assert run.transports[0]._wait(Late(), lambda: [1], "recv from") == "message"
    assert run.failure is None
