"""Every test runs with one thread per rank: the same bits everywhere, and no crowd on few cores.

Two threads share each operator, and wait for each other at its end. If one of them has to wait for a busy processor, so
has the other: a notebook took ten times as long.
"""

import gc
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # programs that tests start, too: before torch is imported
# torch.compile does not ask its cache for which processor a kernel was made: `tests.portable` pretends to be others.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(__file__).parent.parent / ".pytest_cache/inductor" / os.environ.get("ATEN_CPU_CAPABILITY", "own")),
)

import pytest
import torch

from minizero import World
from tests.exercises.machine.one_core import one_core

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core of its own for its ranks
    World.run = one_core(int(os.environ["PYTEST_XDIST_WORKER"][2:]))(World.run)

# What reads notebooks loads jsonschema. If that finds this, it builds grammars of web addresses, for four seconds.
sys.modules["rfc3987_syntax"] = None

# A failed assert there shows its values, too.
pytest.register_assert_rewrite("tests.support")

# A shell lets the jobs in its background ignore Ctrl-C, and their children too, which are to hear it here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def with_room(call):
    """`call()`, with half a MiB of stack for the Python functions below it."""
    return call()


# CPython keeps the frames of Python functions in chunks of 16 KiB. It maps a chunk when a call needs it, and unmaps it
# when that call returns. A loop whose calls just cross into a new chunk therefore asks the system for memory each time,
# and the interpreter of Triton took four times as long under pytest. A frame of 70,000 slots gets a chunk of 1 MiB,
# and all that is called below it fits into the rest.
with_room.__code__ = with_room.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    test = item.runtest
    item.runtest = lambda: with_room(test)
    return (yield)


# A garbage collection looks at all objects. Those of torch and of the tests themselves, a million, stay to the end: it
# need not look at them. Many tests ask for a collection, and each took 0.4 seconds.
gc.disable()


def pytest_collection_finish():
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # `tests.portable` tries two


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker that has done its tests takes some of the other's. In chunks, one was idle for the last minute."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


COURSE = ("test_exercise", "test_autograder", "test_gradebook", "test_questions")
APART = {"gpu", "pretend", "lessons", "real", "exhaustive", "soak"}


def pytest_collection_modifyitems(items):
    """The longest tests begin first: at the end one worker would wait for them.

    What computes with a library, whose sums have another order on another processor, is for `tests.portable`.
    That which is slow and in `make portable` all the same has the mark `accuracy` alone: it is marked `slow` here.
    What has a target of its own is `apart`; of the course, what is quick is in `make test`, too.
    """
    items.sort(key=lambda item: item.path.name not in ("test_notebooks.py", "test_rehearsal.py", "test_publish.py"))
    for item in items:
        if {"torch", "numpy", "np"} & vars(item.module).keys():
            item.add_marker("numbers")
        if item.path.name.startswith(COURSE):
            item.add_marker("course")
        if item.get_closest_marker("accuracy"):
            item.add_marker("slow")
        marks = {mark.name for mark in item.iter_markers()}
        if marks & APART or {"course", "slow"} <= marks:
            item.add_marker("apart")
