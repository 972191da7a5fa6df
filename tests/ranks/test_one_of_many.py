"""One rank of N, alone, holds and sends what that rank of N real ones does; what it cannot know it refuses."""

import contextlib

import pytest
import torch

from minizero import DDP, GPT, GPTConfig, World, Zero1, Zero2, Zero3
from minizero.memory import Ledger
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.one_of_many import one_of_many
from tests.support.helpers import SLOW, steps

CONFIG = GPTConfig(vocabulary=32, sequence_length=8, width=16, layers=3, heads=2)
ENGINES = {
    "DDP": (DDP, {}),
    "DDP in BF16": (DDP, {"dtype": torch.bfloat16}),
    "Zero1": (Zero1, {}),
    "Zero2": (Zero2, {}),
    "Zero3": (Zero3, {"prefetch": 0}),
    "Zero3 in BF16": (Zero3, {"prefetch": 0, "dtype": torch.bfloat16}),
    "Zero3, ahead": (Zero3, {}),
    "Zero3, in pairs": (Zero3, {"sharding_factor": 2}),
    "Zero3, offloaded": (Zero3, {"offload": True}),
}


def train(comm, engine, options, watched):
    """What rank `watched` holds and sends."""
    model = engine(GPT(CONFIG), comm, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger(model, optimizer) if comm.rank == watched else contextlib.nullcontext() as ledger:
        steps(model, optimizer, range(2), lambda step: torch.zeros(2, 2 * comm.size, 8, dtype=torch.long), clip=1.0)
    if comm.rank == watched:
        curve = [sample["total"] for sample in ledger.curve]
        return ledger.peak, comm.bytes_sent, comm.bytes_received, curve if options.get("prefetch", 1) == 0 else []


QUICK = ("DDP", "Zero3", "Zero3, in pairs")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in ENGINES])
def test_it_holds_and_sends_what_a_real_rank_does(name):
    for rank in (0, 3) if name == "Zero3" else (3,):
        given = *ENGINES[name], rank
        assert train(one_of_many(4, rank), *given) == World(4, "cpu").run(train, *given)[rank]


def test_a_collective_leaves_what_should_have_come_from_others_as_it_is():
    comm = one_of_many(4, rank=2)
    x = torch.arange(8.0)
    barrier(comm)
    assert (all_gather(x, comm).shape, all_reduce(x, comm).shape, broadcast(x, comm).shape) == ((32,), (8,), (8,))
    assert all_gather(x, comm)[16:24].equal(x)
    # Two gathers, one all-reduce; a leaf of the tree sends nothing.
    assert comm.bytes_sent == 2 * 3 * 32 + 2 * 3 * 2 * 4


def test_a_rule_tells_the_colors_of_absent_ranks_and_a_color_does_not():
    comm = one_of_many(8, rank=5)
    inside, across = comm.split(lambda rank: rank // 4), comm.split(lambda rank: rank % 4)
    assert (inside.ranks, inside.rank, across.ranks, across.rank) == ([4, 5, 6, 7], 1, [1, 5], 1)
    with pytest.raises(RuntimeError, match="rank 5 is alone, and cannot know what the other 7 would say to '1'"):
        comm.split(1)


@pytest.mark.parametrize("size, rank", [(4, 4), (4, -1), (0, 0), ("4", 0)])
def test_it_must_be_one_of_them(size, rank):
    with pytest.raises(ValueError, match="there is no rank"):
        one_of_many(size, rank)


def test_a_message_under_way_holds_its_memory_until_somebody_waits():
    with Ledger() as ledger:
        gradient = torch.ones(400)
        comm, args = one_of_many(4), [gradient]
        call = comm.transport.executor().submit(lambda: reduce_scatter(args.pop(), comm))
        del gradient
        assert ledger.current["total"] == 4 * (400 + 2 * 100)  # the gradient, and the two chunks of a ring
        shard = call.result()
        assert ledger.current["total"] == 4 * 100 and shard.shape == (100,)
