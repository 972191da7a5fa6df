"""N ranks as threads: what a world accepts, what it gives back, and that nothing of it stays."""

import functools
import gc
import threading
import time
import weakref

import pytest
import torch

from minizero import RankFailed, World
from minizero.ranks.collectives import all_reduce, barrier
from tests.support.failures import failure_of, until


def test_results_come_in_rank_order_and_arguments_may_have_any_name():
    def late_first(comm, base, step=1):
        time.sleep(0.02 * (comm.size - comm.rank))
        return base + step * comm.rank

    assert World(4).run(late_first, 100, step=10) == [100, 110, 120, 130]
    assert World(2).run(lambda comm, fn, self: (fn, self), fn=1, self=2) == [(1, 2)] * 2


def generator(comm):
    yield all_reduce(torch.ones(1), comm)


async def coroutine(comm):
    return all_reduce(torch.ones(1), comm)


async def stream(comm):
    yield all_reduce(torch.ones(1), comm)


class Later:
    async def __call__(self, comm):
        return all_reduce(torch.ones(1), comm)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    "fn, kind",
    [
        (generator, "generator"),
        (coroutine, "coroutine"),
        (stream, "async_generator"),
        (functools.partial(coroutine), "coroutine"),
        (lambda comm: generator(comm), "generator"),
        (Later(), "coroutine"),
    ],
)
def test_what_would_never_run_is_refused(fn, kind):
    failed = failure_of(World(2), fn)
    assert isinstance(failed.__cause__, TypeError)
    assert f"the function returned a {kind}, which nobody runs" in str(failed.__cause__)
    del failed
    gc.collect()  # Python's own warning comes now


@pytest.mark.parametrize(
    "wrong, words",
    [
        *(({"size": size}, "size must be a whole number") for size in (0, -1, 2.0, "4", None)),
        *(({"device": device}, "device") for device in ("abacus", "cuda:4096", None, 1.5)),
        *(({"timeout": t}, "timeout must be a positive number") for t in (0, -1.0, float("nan"), "soon", None)),
    ],
)
def test_what_a_world_cannot_be_made_of(wrong, words):
    with pytest.raises(ValueError, match=words):
        World(**({"size": 2} | wrong))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu_is_named():
    with pytest.raises(ValueError, match="torch sees 0 GPUs"):
        World(2, device="cuda")


def test_ranks_compute_with_as_many_threads_as_the_caller():
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert World(3).run(lambda comm: torch.get_num_threads()) == [threads] * 3
    finally:
        torch.set_num_threads(before)


def test_backward_runs_in_its_own_rank():
    """Otherwise all ranks' backward passes share one device thread, and block each other."""

    def backward(comm):
        ran_in = []
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: ran_in.append(threading.current_thread().name))
        y.sum().backward()
        assert not torch._C._is_multithreading_enabled()
        return ran_in

    assert World(3).run(backward) == [["rank 0"], ["rank 1"], ["rank 2"]]


@pytest.mark.slow
def test_sixty_four_ranks():
    def sums(comm):
        return all_reduce(torch.tensor([comm.rank]), comm).item()

    assert World(64).run(sums) == [2016] * 64


def test_a_failure_in_a_nested_world_is_the_outer_ranks_failure():
    def inner(comm):
        raise KeyError("deep")

    def outer(comm):
        if comm.rank == 1:
            World(2).run(inner)
        barrier(comm)

    failed = failure_of(World(2), outer)
    assert failed.rank == 1
    assert isinstance(failed.__cause__, RankFailed)
    assert isinstance(failed.__cause__.__cause__, KeyError)


def test_runs_leave_nothing_behind():
    runs = []

    def once(comm):
        runs.append(weakref.ref(comm.transport.run))
        part = comm.split(comm.rank % 2)
        all_reduce(torch.ones(10), part)
        barrier(comm)
        return comm.transport.run

    threads = threading.active_count()
    for _ in range(5):
        run = World(4).run(once)[0]
        assert run.meetings == {}, "a meeting is forgotten once all have read"
    del run
    assert until(lambda: threading.active_count() <= threads), threading.enumerate()
    gc.collect()
    assert not any(run() for run in runs)
