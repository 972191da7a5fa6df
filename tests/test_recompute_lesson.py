"""What notebook 05 measures on a card, tried without one."""

from unittest import mock

import pytest
import torch

from notebooks.tools import recompute as lesson


@pytest.mark.parametrize("most", [0, 1, 2, 3, 12, 37, 64])
def test_the_greatest_that_fits(most):
    asked = []
    assert lesson.greatest(lambda n: asked.append(n) or n <= most) == most
    assert len(asked) < 16 and max(asked) <= max(1, 2 * most)


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


def test_the_cards_limit_is_given_back_and_a_card_without_so_much_says_so():
    with OneGiB() as card, pytest.raises(torch.OutOfMemoryError), lesson.at_most(2**26):
        assert card.fraction == 65 / 1024  # the limit, and what is there
        raise torch.OutOfMemoryError
    assert card.fraction == 0.9
    with OneGiB(free=2**20) as card, pytest.raises(RuntimeError, match="needs 2.0 GiB"), lesson.at_most(2**31):
        pass
    assert card.fraction == 0.9
