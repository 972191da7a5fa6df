"""Whatever ranks do wrong in training, alone or against each other: an error names it, on every rank, and soon."""

import itertools
import pickle
import re
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from minizero import Comm, CommTimeout, RankFailed, World, barrier
from tests.support.failures import SOON
from tests.support.mismatched_training import CASES
from tests.support.processes import spawn

TIMEOUT = 1.0  # where ranks wait for each other in vain; nobody else may take a busy machine's pause for that


def check_on_threads(case):
    """The kind of error that the run ended in."""
    world = World(case.size, device="cpu", timeout=TIMEOUT if CommTimeout in case.causes else 2 * SOON)
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(case.work)
    seconds = time.monotonic() - start
    cause = caught.value.__cause__
    assert type(cause) in case.causes, f"{case}: {cause!r}"
    assert seconds < SOON, f"{case}: only after {seconds:.1f} s"
    if type(cause) is RuntimeError:
        assert re.search(r"rank \d returned while rank \d was waiting in|shapes cannot be multiplied", str(cause))
    if type(cause) is not ValueError:  # which may be every rank's
        assert f"rank {case.odd}" in str(caught.value), f"{case}: not named in {caught.value}"
    return type(cause).__name__


def random_cases(kind, count, check, derandomize=True):
    """Call `check(case)` with this many random cases of a kind; derandomized, with the same ones every time."""

    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=derandomize,
        database=None,
    )
    @given(CASES[kind])
    def each(case):
        check(case)

    each()


@pytest.mark.slow
def test_two_random_mistakes_of_each_kind_end_in_a_named_error():
    found = Counter()
    for kind in CASES:
        random_cases(kind, 2, lambda case: found.update([check_on_threads(case)]))
    print(found)
    assert sum(found.values()) == 2 * len(CASES)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_2000_random_mistakes_end_in_a_named_error():
    for kind in CASES:
        random_cases(kind, 2000 // len(CASES) + 1, check_on_threads, derandomize=False)


# Processes: each finds out by itself, and leaves; those that wait for it see that it is gone.

NAMED = {"CollectiveMismatch", "CommTimeout", "RankFailed", "ValueError", "ArithmeticError", "RuntimeError"}


def some_cases(count):
    """So many of each kind, the same in each process. The first that is drawn is the simplest: it is left out."""
    cases = []
    for kind in CASES:
        random_cases(kind, 1 + count, (drawn := []).append)
        cases += drawn[1 : 1 + count]
    return cases


def process_main(rank, size, folder, count):
    """The cases, each among a new process group of the ranks that it needs."""
    torch.set_num_threads(1)
    found = {}
    for number, case in enumerate(some_cases(count)):
        error, seconds = None, 0.0
        if rank < case.size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=case.size)
            with Comm.from_process_group() as comm:
                barrier(comm)
                comm.timeout, start = TIMEOUT, time.monotonic()
                try:
                    case.work(comm)
                except Exception as caught:
                    error = type(caught).__name__, str(caught)
                seconds = time.monotonic() - start
            dist.destroy_process_group()
        found[number] = repr(case), error, seconds
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_mistakes_of_processes_end_in_a_named_error_on_every_rank(tmp_path):
    count = 5
    cases, kinds = some_cases(count), Counter()
    assert spawn(process_main, 4, tmp_path, count, patience=1500 * count) == [0] * 4
    ranks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(4)]
    for number, rank in itertools.product(range(len(cases)), range(4)):
        case, (name, error, seconds) = cases[number], ranks[rank][number]
        if rank >= case.size:
            continue
        assert name == repr(case)
        if rank == case.odd and case.leaves:
            assert error is None, f"{case}: {error}"
            continue
        assert error is not None and error[0] in NAMED, f"{case}: rank {rank} ended with {error}"
        kinds[error[0]] += 1
        assert seconds < SOON, f"{case}: rank {rank} only after {seconds:.1f} s, {error}"
    print(kinds)
    assert {"CollectiveMismatch", "CommTimeout", "ValueError", "ArithmeticError"} <= kinds.keys()
