"""How ranks fail or disagree, on threads or as processes, and how soon."""

import time

import pytest
import torch

from minizero import RankFailed
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter

# Seconds, half of the timeout of a World and of a communicator. Nobody waited for that, however busy the machine is.
SOON = 30


def failure_of(world, fn, *args):
    """How `world.run(fn)` fails, which is soon."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(fn, *args)
    assert (seconds := time.monotonic() - start) < SOON, f"only after {seconds:.1f} s"
    return caught.value


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


def until(done):
    """Wait for `done()`, not for ever: did it come?"""
    patience = time.monotonic() + 2 * SOON
    while not (came := done()) and time.monotonic() < patience:
        time.sleep(0.01)
    return came


HALF, SINGLE = torch.float16, torch.float32
# A collective, `odd` on one rank; and what the error says of the others' and of that one.
DISAGREE = {
    "shape": (lambda c, odd: all_reduce(torch.ones((2, 3) if odd else 4), c), "(4,)", "(2, 3)"),
    "same size": (lambda c, odd: all_reduce(torch.ones((2, 3) if odd else 6), c), "(6,)", "(2, 3)"),
    "dtype": (lambda c, odd: all_gather(torch.ones(4, dtype=HALF if odd else SINGLE), c), f"{SINGLE}", f"{HALF}"),
    "op": (lambda c, odd: all_reduce(torch.ones(4), c, "min" if odd else "max"), "op=max", "op=min"),
    "root": (lambda c, odd: broadcast(torch.ones(4), c, root=int(odd)), "root=0", "root=1"),
    "a leaf": (lambda c, odd: broadcast(torch.ones(4 + odd), c), "(4,)", "(5,)"),
    "label": (lambda c, odd: all_gather(torch.ones(4), c, label=f"blocks.{odd}"), "blocks.False", "blocks.True"),
    "space": (lambda c, odd: all_gather(torch.ones(4), c, label="name" + " " * odd), "=name", "=name "),
    "operation": (
        lambda c, odd: reduce_scatter(torch.ones(12), c) if odd else all_gather(torch.ones(4), c),
        "all_gather #",
        "reduce_scatter #",
    ),
    "barrier": (lambda c, odd: all_reduce(torch.ones(4), c) if odd else barrier(c), "barrier #", "all_reduce #"),
    "nothing": (lambda c, odd: all_gather(torch.ones(0), c) if odd else barrier(c), "barrier #", "of 0 elements"),
    "split": (lambda c, odd: c.split(0) if odd else barrier(c), "barrier #", "split #"),
}
