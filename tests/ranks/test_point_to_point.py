"""A message arrives whole, in order and as it was when it was sent, and its bytes are counted."""

import pytest
import torch

from minizero import World
from minizero.ranks.collectives import barrier


def on_two(first, second):
    """Run `first(comm)` on rank 0 and `second(comm)` on rank 1."""
    World(2).run(lambda comm: (first, second)[comm.rank](comm))


def test_a_sent_tensor_may_be_changed_at_once():
    def fn(comm):
        mine, other = torch.full((1000,), float(comm.rank)), torch.empty(1000)
        for _ in range(50):
            comm.send_recv(mine, 1 - comm.rank, other, 1 - comm.rank)
            mine += 2
            assert torch.all(other + 2 * comm.rank - 1 == mine - 2)

    World(2).run(fn)


def test_tensors_need_not_be_contiguous():
    source, wide, turned = torch.arange(24.0).view(4, 6), torch.zeros(4, 6), torch.zeros(3, 4).t()
    on_two(lambda comm: comm.send(source[:, 1::2], 1), lambda comm: comm.recv(wide[:, ::2], 0))
    on_two(lambda comm: comm.send(source.t()[:3].t(), 1), lambda comm: comm.recv(turned, 0))
    assert torch.equal(wide[:, ::2], source[:, 1::2])
    assert torch.all(wide[:, 1::2] == 0)
    assert torch.equal(turned, source[:, :3])


def test_tensors_that_need_gradients_travel_as_values():
    weight, leaf = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    on_two(lambda comm: comm.send(weight * 3, 1), lambda comm: comm.recv(leaf, 0))
    assert leaf.requires_grad and leaf.is_leaf and leaf.tolist() == [3.0, 3.0]


def test_to_oneself():
    def fn(comm):
        target = torch.zeros(2, 2)
        comm.send_recv(torch.arange(4.0), comm.rank, target.t(), comm.rank)
        with pytest.raises(ValueError, match="one size and dtype"):
            comm.send_recv(torch.ones(1), comm.rank, torch.ones(2), comm.rank)
        for call in (comm.send, comm.recv):
            with pytest.raises(ValueError, match="can reach itself only by send_recv"):
                call(target, comm.rank)
        return target.tolist(), comm.bytes_sent, comm.bytes_received

    assert World(2).run(fn) == [([[0.0, 2.0], [1.0, 3.0]], 0, 0)] * 2


@pytest.mark.parametrize("peer", [-1, 2, 100])
def test_peers_must_exist(peer):
    def fn(comm):
        own, other = torch.ones(2)
        calls = (comm.send, own, peer), (comm.recv, own, peer)
        for call, *given in (*calls, (comm.send_recv, own, peer, other, 0), (comm.send_recv, own, 0, other, peer)):
            with pytest.raises(ValueError, match=f"rank {peer} does not exist: ranks are 0 to 1"):
                call(*given)

    World(2).run(fn)


def test_send_recv_needs_two_buffers():
    """Both copies run at the same time: in one buffer they would mix old values with new ones."""

    def fn(comm):
        tensor, peer = torch.ones(8), 1 - comm.rank
        for outgoing, incoming in ((tensor, tensor), (tensor[:5], tensor[3:])):
            with pytest.raises(ValueError, match="share memory"):
                comm.send_recv(outgoing, peer, incoming, peer)
        comm.send_recv(tensor[:4], peer, tensor[4:], peer)

    World(2).run(fn)


def test_bytes_are_counted():
    def fn(comm):
        if comm.rank == 0:
            comm.send(torch.ones(3, dtype=torch.float64), 1)
        if comm.rank == 1:
            comm.recv(torch.ones(3, dtype=torch.float64), 0)
        part = comm.split(comm.rank % 2)
        other = torch.empty(5, dtype=torch.int16)
        part.send_recv(torch.ones(5, dtype=torch.int16), 1 - part.rank, other, 1 - part.rank)
        single = part.split(part.rank)
        barrier(single)
        return comm.bytes_sent, comm.bytes_received, part.bytes_sent, part.bytes_received

    assert World(4).run(fn) == [(34, 10, 10, 10), (10, 34, 10, 10), (10, 10, 10, 10), (10, 10, 10, 10)]
