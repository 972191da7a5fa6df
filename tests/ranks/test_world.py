"""N ranks as threads: what a world accepts, what it gives back, and that nothing of it stays."""

import functools
import gc
import threading
import weakref

import pytest
import torch

from minizero import RankFailed, World
from minizero.ranks.collectives import all_gather, all_reduce, barrier
from tests.support.failures import failure_of, until


def test_results_come_in_rank_order_and_arguments_may_have_any_name():
    assert World(4).run(lambda comm, base, step=1: base + step * comm.rank, 100, step=10) == [100, 110, 120, 130]
    assert World(2).run(lambda comm, fn, self: (fn, self), fn=1, self=2) == [(1, 2)] * 2


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
        (lambda comm: (yield all_reduce(torch.ones(1), comm)), "generator"),
        (coroutine, "coroutine"),
        (stream, "async_generator"),
        (functools.partial(coroutine), "coroutine"),
        (lambda comm: (x for x in [comm]), "generator"),
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
    for threads in (3, 1):
        torch.set_num_threads(threads)
        assert World(3).run(lambda comm: torch.get_num_threads()) == [threads] * 3


def test_backward_runs_in_its_own_rank():
    """Otherwise all ranks' backward passes share one device thread, and block each other."""

    def backward(comm):
        ran_in, x = [], torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: ran_in.append(threading.current_thread().name))
        x.sum().backward()
        assert not torch._C._is_multithreading_enabled()
        return ran_in

    assert World(3).run(backward) == [["rank 0"], ["rank 1"], ["rank 2"]]


@pytest.mark.slow
def test_sixty_four_ranks():
    assert World(64).run(lambda comm: all_reduce(torch.tensor([comm.rank]), comm).item()) == [2016] * 64


def test_a_failure_in_a_nested_world_is_the_outer_ranks_failure():
    def outer(comm):
        if comm.rank == 1:
            World(2).run(lambda _: 1 / 0)
        barrier(comm)

    failed = failure_of(World(2), outer)
    assert failed.rank == 1 and isinstance(failed.__cause__, RankFailed)
    assert isinstance(failed.__cause__.__cause__, ZeroDivisionError)


def test_split_by_color_and_again():
    def fn(comm):
        comm.timeout = 7.0
        third = comm.split(comm.rank % 3)  # of 3, 3 and 2 ranks
        assert all_gather(torch.tensor([comm.rank]), third).tolist() == list(range(comm.rank % 3, 8, 3))
        assert (third.rank, third.size) == (comm.rank // 3, 2 + (comm.rank % 3 < 2))
        assert (third.timeout, third.device) == (7.0, comm.device)
        half = comm.split(comm.rank // 4)
        pair = half.split(half.rank // 2)
        cross = comm.split(comm.rank % 4)
        return pair.rank, [all_reduce(torch.tensor(comm.rank), c).item() for c in (pair, cross, half, comm)]

    for rank, (place, sums) in enumerate(World(8).run(fn)):
        assert place == rank % 2
        assert sums == [4 * (rank // 2) + 1, 2 * (rank % 4) + 4, 6 if rank < 4 else 22, 28]


def test_runs_leave_nothing_behind():
    runs, threads = [], threading.active_count()

    def once(comm):
        runs.append(weakref.ref(comm.transport.run))
        all_reduce(torch.ones(10), comm.split(comm.rank % 2))
        barrier(comm)
        return comm.transport.run

    for _ in range(5):
        queues = World(4).run(once)[0].queues.values()
        assert queues and all(queue.empty() for queue in queues), "what was said or sent is taken"
    assert until(lambda: threading.active_count() <= threads), threading.enumerate()
    gc.collect()
    assert not any(run() for run in runs)
