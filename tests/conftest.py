"""Every test runs with one thread per rank: the same bits everywhere, and no crowd on few cores."""

import os
import signal

import pytest
import torch

# A failed assert there shows its values, too.
pytest.register_assert_rewrite("tests.support")

# A shell lets the jobs in its background ignore Ctrl-C, and their children too, which are to hear it here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # `tests.portable` tries two


def pytest_collection_modifyitems(items):
    """The longest tests begin first: at the end one worker would wait for them.

    What computes with a library, whose sums have another order on another processor, is for `tests.portable`.
    """
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")
    for item in items:
        if {"torch", "numpy", "np"} & vars(item.module).keys():
            item.add_marker("numbers")
