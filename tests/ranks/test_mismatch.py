"""Whatever ranks do wrong in training, alone or against each other: an error names it, on every rank, and soon."""

import itertools
import pickle
import random
import re
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from minizero import Comm, CommTimeout, World, barrier
from tests.support.failures import SOON, failure_of
from tests.support.mismatched_training import some_cases
from tests.support.processes import spawn

TIMEOUT = 1.0  # where ranks wait for each other in vain; nobody else may take a busy machine's pause for that


def check_on_threads(case):
    world = World(case.size, device="cpu", timeout=TIMEOUT if CommTimeout in case.causes else 2 * SOON)
    print(case)  # pytest shows the last one if it fails
    failed = failure_of(world, case.work)
    cause = failed.__cause__
    assert type(cause) in case.causes, f"{case}: {cause!r}"
    if type(cause) is RuntimeError:
        assert re.search(r"rank \d returned while rank \d was waiting in|shapes cannot be multiplied", str(cause))
    if type(cause) is not ValueError:  # which may be every rank's
        assert f"rank {case.odd}" in str(failed), f"{case}: not named in {failed}"


@pytest.mark.slow
def test_a_random_mistake_of_each_kind_ends_in_a_named_error():
    for case in some_cases(1):
        check_on_threads(case)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_2000_random_mistakes_end_in_a_named_error():
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # to run the same draws again
    for case in some_cases(80, seed):
        check_on_threads(case)


# Processes: each finds out by itself, and leaves; those that wait for it see that it is gone.

NAMED = {"CollectiveMismatch", "CommTimeout", "RankFailed", "ValueError", "ArithmeticError", "RuntimeError"}


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
