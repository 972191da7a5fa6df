"""What notebook 05 measures on a card, tried without one."""

from unittest import mock

import pytest
import torch
from torch import nn

from minizero.memory import Ledger
from minizero.schedules import depth
from notebooks.tools import card
from notebooks.tools import recompute as lesson


@pytest.mark.parametrize("most", [0, 1, 2, 3, 12, 37, 64])
def test_the_greatest_that_fits(most):
    asked = []
    assert lesson.greatest(lambda n: asked.append(n) or n <= most) == most
    assert len(asked) < 16 and max(asked) <= max(1, 2 * most)


@pytest.mark.slow
def test_the_greatest_depth_is_the_last_that_fits(monkeypatch):
    def make(n):  # each layer saves 16 times its input
        return [nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16)) for _ in range(n)]

    def peak(n, k):
        with Ledger() as ledger:
            depth.step_in_regions(make(n), x, k)
        return ledger.peak["total"]

    monkeypatch.setattr(card, "CUDA", False)  # the ledger counts, also beside a GPU
    x, limit = torch.randn(128, 16), 2**20
    plain, recompute = lesson.greatest_depths(limit, make, x).values()
    assert recompute > 2 * plain > 0
    assert peak(plain, plain) <= limit < peak(plain + 1, plain + 1)  # one region: nothing runs again
    assert peak(recompute, 1) <= limit < peak(recompute + 1, 1)


class OneGiB:
    """A card of so much memory, as far as `at_most` asks it."""

    def __init__(self, free=2**30):
        self.fraction, self.free = 0.9, free

    def __enter__(self):
        new = {"empty_cache": lambda: None, "memory_reserved": lambda: 2**20}
        new |= {"mem_get_info": lambda: (self.free, 2**30)}
        new |= {"get_per_process_memory_fraction": lambda: self.fraction}
        new |= {"set_per_process_memory_fraction": lambda fraction: setattr(self, "fraction", fraction)}
        self.patch = mock.patch.multiple(torch.cuda, **new)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def test_the_cards_limit_is_given_back():
    with OneGiB() as card, pytest.raises(torch.OutOfMemoryError), lesson.at_most(2**26):
        assert card.fraction == 65 / 1024  # the limit, and what is there
        raise torch.OutOfMemoryError
    assert card.fraction == 0.9


def test_a_card_without_so_much_says_so():
    with OneGiB(free=2**20) as card, pytest.raises(RuntimeError, match="needs 2.0 GiB"), lesson.at_most(2**31):
        pass
    assert card.fraction == 0.9
