"""The first rank that fails ends the run of all, soon, and the error says where each rank was."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from minizero import CollectiveMismatch, CommTimeout, RankFailed, World
from minizero.ranks.collectives import all_gather, all_reduce, barrier
from minizero.ranks.threads import Run
from tests.support.failures import SOON, compute, failure_of, until
from tests.support.helpers import soak

ROOT = Path(__file__).parents[2]


def test_the_first_rank_that_raises_ends_all():
    stopped = []

    def fn(comm):
        if comm.rank == 2:
            assert until(lambda: sum(other.waiting is not None for other in comm.transport.run.transports) == 4)
            raise ArithmeticError("on purpose")
        try:
            comm.recv(torch.empty(2), 0) if comm.rank == 3 else all_reduce(torch.ones(3), comm)
        except RankFailed as error:
            stopped.append((comm.rank, error.rank, "ArithmeticError: on purpose" in str(error)))
            raise

    failed = failure_of(World(5), fn)
    assert failed.rank == 2 and isinstance(failed.__cause__, ArithmeticError)
    assert sorted(stopped) == [(rank, 2, True) for rank in (0, 1, 3, 4)]
    message = str(failed)
    assert message.startswith("rank 2 failed: ArithmeticError: on purpose")
    assert "Traceback" in message and 'raise ArithmeticError("on purpose")' in message
    assert re.search(r"rank 0 was waiting in all_reduce #1: agreement with rank [23]", message)
    assert "rank 3 was waiting in point-to-point: recv from rank 0" in message
    assert "rank 2 was" not in message


@pytest.mark.slow
def test_a_rank_that_computes_for_ever_is_stopped():
    def fn(comm):
        if comm.rank == 0:
            raise ValueError("early")
        while True:
            torch.ones(10, 10) @ torch.ones(10, 10)

    threads = threading.active_count()
    failure_of(World(2), fn)
    assert until(lambda: threading.active_count() <= threads), threading.enumerate()


@pytest.mark.parametrize("caught", [True, False])
def test_a_backward_that_raised_leaves_nothing_in_its_thread(caught, monkeypatch):
    """Else autograd frees it after Python's end of the thread; a program that ends at that moment is aborted."""
    gradients, left, finish = [], [], Run.finish

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, gradient):
            both = gradient * 2, gradient * 3
            gradients.extend(map(weakref.ref, both))
            return both

    def fn(comm):
        first, second = (torch.ones(2, requires_grad=True) * factor for factor in (2, 3))
        second.register_hook(lambda gradient: 1 / 0)
        with contextlib.suppress(ZeroDivisionError if caught else ()):
            Both.apply(first, second).sum().backward()

    def look(run, rank):
        left.extend(reference() for reference in gradients)
        finish(run, rank)

    monkeypatch.setattr(Run, "finish", look)
    World(1).run(fn) if caught else failure_of(World(1), fn)
    assert left[0] is None, "the gradient of `first`, whose turn had not come"


def test_a_rank_that_waits_too_long_says_for_whom_and_in_what():
    def fn(comm):
        if comm.rank == 2:
            compute()
        all_gather(torch.ones(2), comm)

    failed = failure_of(World(3, timeout=0.3), fn)
    assert isinstance(failed.__cause__, CommTimeout)
    words = r"rank [01] waited 0.3 s in all_gather #1: agreement with rank ([01], )?2"
    assert re.fullmatch(words, str(failed.__cause__))
    assert failed.rank in (0, 1)
    assert "all_gather(torch.ones(2), comm)" in str(failed)
    assert "rank 2 was computing" in str(failed)


def test_a_rank_that_comes_late_is_no_failure():
    World(2).run(lambda comm: (time.sleep(0.2 * comm.rank), barrier(comm)))  # the other has looked several times


def test_a_timeout_that_is_caught_still_ends_the_run():
    """The message that nobody fetched would otherwise be taken for the next one."""
    timed_out = threading.Event()

    def fn(comm):
        if comm.rank == 1:
            timed_out.wait(60)
            comm.recv(torch.zeros(1), 0)
            return
        with pytest.raises(CommTimeout):
            comm.send(torch.ones(1), 1)
        timed_out.set()
        comm.send(torch.ones(1), 1)

    failed = failure_of(World(2, timeout=0.2), fn)
    assert failed.rank == 0 and isinstance(failed.__cause__, CommTimeout)


class Broken(Exception):
    """It cannot print itself."""

    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Broken()], ids=type)
def test_no_rank_vanishes_silently(error):
    def fn(comm):
        if comm.rank == 1:
            raise error
        barrier(comm)

    failed = failure_of(World(3), fn)
    assert failed.rank == 1 and failed.__cause__ is error


def waits_in_vain(comm, part):
    part.timeout = 0.3
    compute() if comm.rank == 3 else barrier(part)


def alone(call):
    """Rank 3 returns at once."""
    return lambda comm, part: comm.rank == 3 or call(part)


def sends(tensor):
    """Rank 2 sends this, where rank 3 wants two numbers of float32."""
    return lambda comm, part: part.recv(torch.ones(2), 0) if comm.rank == 3 else part.send(tensor, 1)


AWAY = "rank 3 returned while rank 2 was waiting in"
WANTED = "rank 3 expected 2 elements of torch.float32 from rank 2"
IN_A_PART = {  # of ranks 2 and 3, which are 0 and 1 there: who failed, and the error
    "late": (waits_in_vain, [2], "rank 2 waited 0.3 s in barrier #1: agreement with rank 3"),
    "recv": (alone(lambda part: part.recv(torch.ones(1), 1)), [3], f"{AWAY} point-to-point: recv from rank 3"),
    "send": (alone(lambda part: part.send(torch.ones(1), 1)), [3], f"{AWAY} point-to-point: send to rank 3"),
    "barrier": (alone(barrier), [3], f"{AWAY} barrier #1: agreement with rank 3"),
    "more": (sends(torch.ones(3)), [3], f"{WANTED}, which sent 3 of torch.float32"),
    "dtype": (sends(torch.ones(2, dtype=torch.int32)), [3], f"{WANTED}, which sent 2 of torch.int32"),
    "bytes": (sends(torch.ones(4, dtype=torch.float16)), [3], f"{WANTED}, which sent 4 of torch.float16"),
    "mismatch": (
        lambda comm, part: all_reduce(torch.ones(comm.rank), part),
        [2, 3],
        "rank 3 called .* rank 2 called|rank 2 called .* rank 3 called",
    ),
}


@pytest.mark.parametrize("case", IN_A_PART)
def test_a_failure_is_named_and_counts_ranks_as_the_whole_world_does(case):
    wrong, ranks, words = IN_A_PART[case]

    def fn(comm):
        part = comm.split(comm.rank // 2)
        if comm.rank >= 2:
            wrong(comm, part)

    failed = failure_of(World(4), fn)
    assert failed.rank in ranks and re.match(words, str(failed.__cause__))
    assert isinstance(failed.__cause__, CollectiveMismatch) == ("expected" in words or "called" in words)


@pytest.mark.parametrize("how", ["send_recv", "barrier"])
def test_ranks_that_are_busy_with_each_other_stop_too(how, monkeypatch):
    """They never wait long enough to look around; and whoever fails reads what they wait in as they run on."""

    def fn(comm):
        pair = comm.split(min(comm.rank, 1))
        while comm.rank:
            if how == "barrier":
                barrier(pair)
            else:
                pair.send_recv(torch.ones(1), 1 - pair.rank, torch.empty(1), 1 - pair.rank)
        raise ArithmeticError

    monkeypatch.setattr("minizero.ranks.world.GRACE_SECONDS", 2 * SOON)  # after which they would be stopped in any case
    for _ in range(20):
        assert isinstance(failure_of(World(3), fn).__cause__, ArithmeticError)


def test_a_rank_that_returned_is_not_stopped(monkeypatch):
    """On a busy machine its thread may need a while to end. Nothing may be thrown into it then."""
    stopped, finish = [], Run.finish

    def finish_late(run, rank):
        finish(run, rank)
        time.sleep(0.2)

    monkeypatch.setattr(Run, "finish", finish_late)
    monkeypatch.setattr("minizero.ranks.world.GRACE_SECONDS", 0)
    monkeypatch.setattr("ctypes.pythonapi.PyThreadState_SetAsyncExc", lambda *which: stopped.append(which))
    World(4).run(barrier)
    assert not stopped


def ended(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_end_of_the_program_waits_for_ranks_that_compute():
    """They would be cut off as they come back to Python, and a thread that is cut off inside C++ aborts the program."""
    done = ended("""
import atexit, threading, torch

atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "rank" in thread.name]))  # the last
import minizero.ranks.world as world

goes_on = threading.Event()
atexit.register(goes_on.set)  # the first


def fn(comm):
    if comm.rank == 0:
        raise ValueError("on purpose")
    try:
        goes_on.wait()
    finally:
        torch.linalg.matrix_power(torch.eye(500), 2**60)


world.GRACE_SECONDS = 0
world.World(2).run(fn)
""")
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["barrier(comm)", *soak("time.sleep(600)", "while True: torch.ones(300, 300) @ x")])
def test_ctrl_c_ends_promptly(busy):
    done = ended(f"""
import os, signal, threading, time, torch
from minizero import World
from minizero.ranks.collectives import barrier

def fn(comm):
    x = torch.ones(300, 300)
    if comm.rank == 0:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        time.sleep(600)
    {busy}

World(3).run(fn)
""")
    assert "KeyboardInterrupt" in done.stderr and done.returncode in (-signal.SIGINT, 130), done
