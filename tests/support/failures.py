"""How ranks fail, on threads or as processes, and how soon."""

import time

import pytest

from minizero import RankFailed

# Seconds, half of the timeout of a World and of a communicator. Nobody waited for that, however busy the machine is.
SOON = 30


def failure_of(world, fn, *args):
    """How `world.run(fn)` fails, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(fn, *args)
    return caught.value, time.monotonic() - start


def compute():
    """Until the run fails: a rank that never communicates."""
    while True:
        time.sleep(0.01)


def error_of(fn):
    """The type and text of what `fn` raises, and the rank that it blames."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return None


def timed(fn):
    start = time.monotonic()
    return *error_of(fn), time.monotonic() - start


def wait_for(*paths):
    """Until these files are there."""
    patience = time.monotonic() + 2 * SOON
    while time.monotonic() < patience and not all(path.exists() for path in paths):
        time.sleep(0.01)
