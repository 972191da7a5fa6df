"""A rank that is a thread draws what a process of its own would draw, whatever the other ranks draw meanwhile."""

import random
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from minizero import RankFailed, World
from minizero.ranks.collectives import barrier


def states_set_back():
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        forked = torch.rand(3)
    return torch.cat([first, torch.rand(3), forked])


WAYS = {
    "a new tensor": lambda: torch.randn(2, 3),
    "in place": lambda: torch.empty(3).uniform_() + torch.empty(3).random_(9),
    "initial weights": lambda: nn.Linear(3, 3).weight.detach(),
    "dropout": lambda: F.dropout(torch.ones(20)),
    "dropout of attention": lambda: F.scaled_dot_product_attention(*[torch.eye(4)[None, None]] * 3, dropout_p=0.5),
    "dropout in C++": lambda: nn.LSTM(3, 3, 2, dropout=0.5)(torch.ones(2, 1, 3))[0].detach(),
    "a slope": lambda: F.rrelu(-torch.ones(3), training=True),
    "distributions": lambda: (
        torch.distributions.Binomial(9, torch.full((3,), 0.5)).sample() + torch.poisson(torch.ones(3))
    ),
    "a shuffled data set": lambda: torch.cat(list(DataLoader(torch.arange(9.0), shuffle=True))),
    "the state": states_set_back,
    "a generator that is the default one": lambda: torch.rand(3, generator=torch.manual_seed(torch.initial_seed())),
}


def drawn(seed, way, others=lambda: None):
    torch.manual_seed(seed)
    numbers = []
    for _ in range(3):
        others()
        numbers.append(WAYS[way]())
    return torch.cat(numbers).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_draws_as_if_it_were_alone(way):
    found = World(3).run(lambda comm: drawn(comm.rank, way, lambda: barrier(comm)))
    assert found == [drawn(rank, way) for rank in range(3)]


def in_a_thread(draw):
    return lambda comm: ThreadPoolExecutor(1).submit(draw).result()


USES = {  # on two ranks, and what they share
    "random.random": (lambda comm: random.random(), "Python's random"),
    "shuffle": (lambda comm: comm.rank or random.shuffle([1, 2, 3]), "Python's random"),
    "numpy.random.rand": (lambda comm: np.random.rand(3), "numpy.random"),
    "both": (lambda comm: random.random() + np.random.randn(), "Python's random and numpy.random"),
    "in a thread": (in_a_thread(lambda: torch.rand(3)), "torch's generator in a thread of their own"),
    "torch": (lambda comm: (torch.manual_seed(comm.rank), torch.rand(3), nn.Linear(2, 2)), None),
    "of its own": (lambda comm: (random.Random(1).random(), np.random.default_rng(1).random()), None),
    "in a thread, of its own": (in_a_thread(lambda: torch.rand(3, generator=torch.Generator())), None),
    "set back": (lambda comm: random.setstate(random.getstate()), None),
    "a World in a rank": (lambda comm: World(2).run(lambda comm: torch.rand(3)), None),
}


@pytest.mark.parametrize("name", USES)
def test_a_generator_that_ranks_share_is_named_when_they_have_used_it(name):
    fn, shared = USES[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        World(2).run(fn)
        World(1).run(lambda comm: random.random())  # shared with nobody
    words = f"World.run: the ranks used {shared}, which threads share.*torchrun"
    assert [bool(re.match(words, str(each.message))) for each in said] == [True] * (shared is not None)


def test_ranks_begin_with_the_callers_numbers_who_goes_on_with_rank_0s():
    def fn(comm):
        barrier(comm)
        return torch.rand(1 + comm.rank).tolist()

    torch.manual_seed(5)
    expected = torch.rand(7).tolist()
    torch.manual_seed(5)
    assert World(3).run(fn) == [expected[:1], expected[:2], expected[:3]]
    inner = World(2).run(lambda comm: World(2).run(fn)[1] + fn(comm))
    assert inner == [expected[1:3] + expected[2 : 3 + rank] for rank in (0, 1)]
    with pytest.raises(RankFailed):
        World(2).run(lambda comm: fn(comm) + [1 / 0])
    assert torch.rand(4).tolist() == expected[3:]
