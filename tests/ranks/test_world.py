"""N ranks as threads: what they give back, how they talk, and how they end when one of them fails."""

import gc
import os
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
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast
from minizero.ranks.threads import Run, ThreadTransport, _Meeting
from minizero.ranks.transport import Transport

ROOT = Path(__file__).parents[2]


SOON = 30  # seconds, half of a World's timeout: nobody waited for that, however busy the machine is


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


# The world and its arguments.


def test_results_come_in_rank_order():
    def late_first(comm, base, step=1):
        time.sleep(0.02 * (comm.size - comm.rank))
        return base + step * comm.rank

    assert World(4).run(late_first, 100, step=10) == [100, 110, 120, 130]


def test_arguments_may_have_any_name():
    assert World(2).run(lambda comm, fn, self: (fn, self), fn=1, self=2) == [(1, 2)] * 2


def test_an_empty_run_is_quick():
    def seconds():
        start = time.process_time()
        World(4).run(lambda comm: None)
        return time.process_time() - start

    assert min(seconds() for _ in range(20)) < 0.05


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None])
def test_size_must_be_a_positive_whole_number(size):
    with pytest.raises(ValueError, match="size must be a whole number"):
        World(size)


@pytest.mark.parametrize("device", ["abacus", "cuda:4096", None, 1.5])
def test_device_must_exist(device):
    with pytest.raises(ValueError, match="device"):
        World(2, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu_is_named():
    with pytest.raises(ValueError, match="torch sees 0 GPUs"):
        World(2, device="cuda")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "soon", None])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        World(2, timeout=timeout)


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


def test_sixty_four_ranks():
    def sums(comm):
        return [all_reduce(torch.tensor([comm.rank]), comm).item() for _ in range(2)]

    assert World(64).run(sums) == [[2016, 2016]] * 64


def test_worlds_nest():
    def outer(comm):
        inner = World(3).run(lambda c: all_reduce(torch.tensor(float(c.rank)), c).item())
        return all_reduce(torch.tensor(inner[0] + comm.rank), comm).item()

    assert World(2).run(outer) == [7.0, 7.0]


def test_a_failure_in_a_nested_world_is_the_outer_ranks_failure():
    def inner(comm):
        raise KeyError("deep")

    def outer(comm):
        if comm.rank == 1:
            World(2).run(inner)
        barrier(comm)

    failed, _ = failure_of(World(2), outer)
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
        return comm.transport.run.meetings

    threads = threading.active_count()
    for _ in range(50):
        World(4).run(once)
    patience = time.monotonic() + 60
    while threading.active_count() > threads:
        assert time.monotonic() < patience, threading.enumerate()
        time.sleep(0.01)
    gc.collect()
    assert not any(run() for run in runs)


def test_meetings_are_forgotten_once_all_have_read():
    def many(comm):
        for _ in range(300):
            barrier(comm)
        return comm.transport.run

    run = World(4).run(many)[0]
    assert run.meetings == {}


# Failure.


def test_the_first_rank_that_raises_ends_all():
    def fn(comm):
        if comm.rank == 2:
            while not all(other.waiting for other in comm.transport.run.transports if other is not comm.transport):
                time.sleep(0.01)
            raise ArithmeticError("on purpose")
        if comm.rank == 3:
            comm.recv(torch.empty(2), 0)
        all_reduce(torch.ones(3), comm)

    failed, seconds = failure_of(World(5), fn)
    assert seconds < SOON
    assert failed.rank == 2
    assert isinstance(failed.__cause__, ArithmeticError)
    message = str(failed)
    assert message.startswith("rank 2 failed: ArithmeticError: on purpose")
    assert "Traceback" in message and 'raise ArithmeticError("on purpose")' in message
    assert re.search(r"rank 0 was waiting in all_reduce #1: agreement with rank [23]", message)
    assert "rank 3 was waiting in point-to-point: recv from rank 0" in message
    assert "rank 2 was" not in message


def test_the_others_stop_at_their_next_communication():
    stopped = []

    def fn(comm):
        if comm.rank == 0:
            raise ValueError("early")
        try:
            time.sleep(0.3)
            barrier(comm)
        except RankFailed as error:
            stopped.append((comm.rank, error.rank, "ValueError: early" in str(error)))
            raise

    failed, _ = failure_of(World(3), fn)
    assert failed.rank == 0
    assert sorted(stopped) == [(1, 0, True), (2, 0, True)]


def test_a_rank_that_computes_on_does_not_delay_the_failure():
    over = threading.Event()

    def fn(comm):
        barrier(comm)  # and this wait is over
        if comm.rank == 0:
            time.sleep(0.1)
            raise ValueError("early")
        over.wait(300)

    failed, seconds = failure_of(World(2), fn)
    over.set()
    assert seconds < SOON
    assert "rank 1 was computing" in str(failed)


def test_a_rank_that_computes_for_ever_is_stopped():
    def fn(comm):
        if comm.rank == 0:
            raise ValueError("early")
        while True:
            torch.ones(10, 10) @ torch.ones(10, 10)

    threads = threading.active_count()
    _, seconds = failure_of(World(2), fn)
    assert seconds < SOON
    patience = time.monotonic() + 60
    while threading.active_count() > threads:
        assert time.monotonic() < patience, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("wait", ["recv", "send", "barrier"])
def test_a_rank_that_returns_while_others_wait_is_named(wait):
    def fn(comm):
        if comm.rank == 1:
            return
        if wait == "barrier":
            barrier(comm)
        elif comm.rank == 0:
            getattr(comm, wait)(torch.ones(1), 1)

    failed, seconds = failure_of(World(3), fn)
    assert seconds < SOON
    assert failed.rank == 1
    assert re.search(r"rank 1 returned while rank \d was waiting in .*(with|from|to) rank 1", str(failed))
    assert "getattr(comm, wait)" in str(failed) or "barrier(comm)" in str(failed)  # where it waits


def test_a_rank_may_return_once_its_last_message_is_there():
    """A message that came just before its sender returned is no failure."""

    def fn(comm):
        tensor = torch.zeros(1)
        if comm.rank == 0:
            comm.send(tensor + 7, 1)
            return None
        comm.recv(tensor, 0)
        return tensor.item()

    for _ in range(100):
        assert World(2).run(fn) == [None, 7.0]


def test_a_rank_that_waits_too_long_says_for_whom_and_in_what():
    def fn(comm):
        if comm.rank == 2:
            compute()
        all_gather(torch.ones(2), comm)

    failed, seconds = failure_of(World(3, timeout=0.3), fn)
    assert seconds < SOON
    assert isinstance(failed.__cause__, CommTimeout)
    assert re.fullmatch(
        r"rank [01] waited 0.3 s in all_gather #1: agreement with rank ([01], )?2", str(failed.__cause__)
    )
    assert failed.rank in (0, 1)
    assert "all_gather(torch.ones(2), comm)" in str(failed)
    assert "rank 2 was computing" in str(failed)


def test_sends_that_wait_for_each_other_time_out():
    def fn(comm):
        comm.send(torch.ones(1), (comm.rank + 1) % comm.size)
        comm.recv(torch.ones(1), (comm.rank - 1) % comm.size)

    failed, seconds = failure_of(World(3, timeout=2), fn)
    assert seconds < SOON
    assert isinstance(failed.__cause__, CommTimeout)
    assert str(failed).count("point-to-point: send to rank") >= 3


def test_a_timeout_that_is_caught_still_ends_the_run():
    """The message that nobody fetched would otherwise be taken for the next one."""
    timed_out = threading.Event()

    def fn(comm):
        tensor = torch.zeros(1)
        if comm.rank == 0:
            with pytest.raises(CommTimeout):
                comm.send(tensor + 1, 1)
            timed_out.set()
            comm.send(tensor + 2, 1)
        else:
            timed_out.wait(60)
            comm.recv(tensor, 0)
            return tensor

    failed, _ = failure_of(World(2, timeout=0.2), fn)
    assert failed.rank == 0
    assert isinstance(failed.__cause__, CommTimeout)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_rank_vanishes_silently(error):
    def fn(comm):
        if comm.rank == 1:
            raise error
        barrier(comm)

    failed, seconds = failure_of(World(3), fn)
    assert seconds < SOON
    assert failed.rank == 1 and failed.__cause__ is error


def test_an_error_that_cannot_print_itself_is_reported_too():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def fn(comm):
        if comm.rank == 0:
            raise Broken
        barrier(comm)

    failed, _ = failure_of(World(2), fn)
    assert failed.rank == 0 and isinstance(failed.__cause__, Broken)


def test_messages_count_ranks_as_the_whole_world_does():
    def fn(comm):
        part = comm.split(comm.rank % 2)  # ranks 1 and 3 are 0 and 1 there
        if comm.rank == 3:
            compute()
        if comm.rank == 1:
            part.timeout = 0.3
            barrier(part)

    failed, _ = failure_of(World(4), fn)
    assert str(failed.__cause__) == "rank 1 waited 0.3 s in barrier #1: agreement with rank 3"

    def returns(comm):
        part = comm.split(comm.rank // 2)  # ranks 2 and 3 are 0 and 1 there
        if comm.rank == 2:
            part.recv(torch.ones(1), 1)

    failed, _ = failure_of(World(4), returns)
    assert failed.rank == 3
    assert "rank 3 returned while rank 2 was waiting in point-to-point: recv from rank 3" in str(failed)

    def fits_not(comm):
        part = comm.split(comm.rank // 2)
        if comm.rank == 2:
            part.send(torch.ones(2), 1)
        if comm.rank == 3:
            part.recv(torch.ones(3), 0)

    failed, _ = failure_of(World(4), fits_not)
    assert "rank 3 expected 3 elements of torch.float32 from rank 2, which sent 2" in str(failed)


@pytest.mark.parametrize("how", ["send_recv", "barrier"])
def test_ranks_that_are_busy_with_each_other_stop_too(how, monkeypatch):
    """They never wait long enough to look around; and whoever fails reads what they wait in as they run on."""

    class Flickering(Exception):
        pass

    def fn(comm):
        pair = comm.split(min(comm.rank, 1))
        if comm.rank == 0:
            raise Flickering
        while True:
            if how == "barrier":
                barrier(pair)
            else:
                pair.send_recv(torch.ones(1), 1 - pair.rank, torch.empty(1), 1 - pair.rank)

    monkeypatch.setattr("minizero.ranks.world.GRACE_SECONDS", 2 * SOON)  # after which they would be stopped in any case
    for _ in range(20):
        failed, seconds = failure_of(World(3), fn)
        assert isinstance(failed.__cause__, Flickering)
        assert seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["barrier(comm)", "time.sleep(600)", "while True: torch.ones(300, 300) @ x"])
def test_ctrl_c_ends_promptly(busy):
    program = f"""
import time, torch
from minizero import World
from minizero.ranks.collectives import barrier

def fn(comm):
    x = torch.ones(300, 300)
    if comm.rank == 0:
        print("running", flush=True)
        time.sleep(600)
    {busy}

World(3).run(fn)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert "KeyboardInterrupt" in errors
        assert process.returncode in (-signal.SIGINT, 130), (process.returncode, errors)
    finally:
        process.kill()


# Point to point.


def on_two(first, second):
    """Run `first(comm)` on rank 0 and `second(comm)` on rank 1; their results."""
    return World(2).run(lambda comm: (first, second)[comm.rank](comm))


def test_send_and_recv():
    sent = torch.arange(6.0).view(2, 3)

    def receive(comm):
        tensor = torch.empty(3, 2)  # the number of elements counts, not the shape
        comm.recv(tensor, 0)
        return tensor

    _, received = on_two(lambda comm: comm.send(sent, 1), receive)
    assert torch.equal(received.view(2, 3), sent)


def test_messages_of_one_pair_keep_their_order():
    def receive(comm):
        got = [torch.empty(1) for _ in range(50)]
        for tensor in got:
            comm.recv(tensor, 0)
        return [tensor.item() for tensor in got]

    def send(comm):
        for i in range(50):
            comm.send(torch.tensor([float(i)]), 1)

    assert on_two(send, receive)[1] == list(range(50))


def test_a_sent_tensor_may_be_changed_at_once():
    def fn(comm):
        mine, other = torch.full((1000,), float(comm.rank)), torch.empty(1000)
        for _ in range(50):
            comm.send_recv(mine, 1 - comm.rank, other, 1 - comm.rank)
            mine += 2
            assert torch.all(other + 2 * comm.rank - 1 == mine - 2)

    World(2).run(fn)


def test_tensors_need_not_be_contiguous():
    def receive(comm):
        wide = torch.zeros(4, 6)
        comm.recv(wide[:, ::2], 0)
        turned = torch.zeros(3, 4).t()
        comm.recv(turned, 0)
        return wide, turned

    source = torch.arange(24.0).view(4, 6)

    def send(comm):
        comm.send(source[:, 1::2], 1)
        comm.send(source.t()[:3].t(), 1)

    wide, turned = on_two(send, receive)[1]
    assert torch.equal(wide[:, ::2], source[:, 1::2])
    assert torch.all(wide[:, 1::2] == 0)
    assert torch.equal(turned, source[:, :3])


def test_tensors_that_need_gradients_travel_as_values():
    def receive(comm):
        leaf = torch.zeros(2, requires_grad=True)
        comm.recv(leaf, 0)
        return leaf

    weight = torch.ones(2, requires_grad=True)
    received = on_two(lambda comm: comm.send(weight * 3, 1), receive)[1]
    assert received.requires_grad and received.is_leaf
    assert received.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(4, dtype=torch.float16)])
def test_messages_that_do_not_fit_are_named(sent):
    def fn(comm):
        if comm.rank == 0:
            comm.send(sent, 1)
        else:
            comm.recv(torch.ones(2), 0)

    failed, seconds = failure_of(World(2), fn)
    assert seconds < SOON
    assert failed.rank == 1 and isinstance(failed.__cause__, CollectiveMismatch)
    assert "rank 1 expected 2 elements of torch.float32 from rank 0, which sent" in str(failed.__cause__)
    assert f"{sent.numel()} of {sent.dtype}" in str(failed.__cause__)


def test_to_oneself():
    def fn(comm):
        target = torch.zeros(2, 2)
        comm.send_recv(torch.arange(4.0), comm.rank, target.t(), comm.rank)
        with pytest.raises(ValueError, match="one size and dtype"):
            comm.send_recv(torch.ones(1), comm.rank, torch.ones(2), comm.rank)
        for call in (comm.send, comm.recv):
            with pytest.raises(ValueError, match="can reach itself only by send_recv"):
                call(target, comm.rank)
        return target.tolist(), comm.bytes_sent, comm.bytes_received

    assert World(2).run(fn) == [([[0.0, 2.0], [1.0, 3.0]], 0, 0)] * 2


@pytest.mark.parametrize("peer", [-1, 2, 100])
def test_peers_must_exist(peer):
    def fn(comm):
        tensor = torch.ones(1)
        for call in (
            lambda: comm.send(tensor, peer),
            lambda: comm.recv(tensor, peer),
            lambda: comm.send_recv(tensor, peer, torch.ones(1), 0),
            lambda: comm.send_recv(tensor, 0, torch.ones(1), peer),
        ):
            with pytest.raises(ValueError, match=f"rank {peer} does not exist: ranks are 0 to 1"):
                call()

    World(2).run(fn)


def test_send_recv_needs_two_buffers():
    """Both copies run at the same time: in one buffer they would mix old values with new ones."""

    def fn(comm):
        tensor = torch.ones(8)
        for outgoing, incoming in ((tensor, tensor), (tensor[:5], tensor[3:])):
            with pytest.raises(ValueError, match="share memory"):
                comm.send_recv(outgoing, 1 - comm.rank, incoming, 1 - comm.rank)
        comm.send_recv(tensor[:4], 1 - comm.rank, tensor[4:], 1 - comm.rank)

    World(2).run(fn)


def test_bytes_are_counted():
    def fn(comm):
        if comm.rank == 0:
            comm.send(torch.ones(3, dtype=torch.float64), 1)
        if comm.rank == 1:
            comm.recv(torch.ones(3, dtype=torch.float64), 0)
        part = comm.split(comm.rank % 2)
        other = torch.empty(5, dtype=torch.int16)
        part.send_recv(torch.ones(5, dtype=torch.int16), 1 - part.rank, other, 1 - part.rank)
        single = part.split(part.rank)
        barrier(single)
        return comm.bytes_sent, comm.bytes_received, part.bytes_sent, part.bytes_received

    assert World(4).run(fn) == [(34, 10, 10, 10), (10, 34, 10, 10), (10, 10, 10, 10), (10, 10, 10, 10)]


# Split.


def test_split_by_color():
    def fn(comm):
        part = comm.split(comm.rank % 3)
        members = all_gather(torch.tensor([comm.rank]), part).tolist()
        total = all_reduce(torch.tensor([comm.rank]), comm).item()  # the whole still works
        return part.rank, part.size, members, total

    results = World(7).run(fn)
    for rank, result in enumerate(results):
        members = list(range(rank % 3, 7, 3))
        assert result == (members.index(rank), len(members), members, 21)


def test_split_of_a_split():
    def fn(comm):
        half = comm.split(comm.rank // 4)
        pair = half.split(half.rank // 2)
        cross = comm.split(comm.rank % 4)
        sums = [all_reduce(torch.tensor(comm.rank), c).item() for c in (pair, cross, half, comm)]
        return pair.rank, sums

    for rank, (place, sums) in enumerate(World(8).run(fn)):
        assert place == rank % 2
        assert sums == [4 * (rank // 2) + 1, 2 * (rank % 4) + 4, 6 if rank < 4 else 22, 28]


def test_split_carries_device_and_timeout():
    def fn(comm):
        comm.timeout = 7.0
        part = comm.split(0)
        return part.timeout, part.device == comm.device

    assert World(2).run(fn) == [(7.0, True)] * 2


def test_messages_stay_in_their_communicator():
    def fn(comm):
        same = comm.split(0)  # the same two ranks, but other messages
        a, b = torch.zeros(1), torch.zeros(1)
        if comm.rank == 0:
            thread = threading.Thread(target=comm.send, args=(torch.ones(1), 1))
            thread.start()
            time.sleep(0.05)
            same.send(torch.full((1,), 2.0), 1)
            thread.join()
        else:
            same.recv(a, 0)
            comm.recv(b, 0)
        return a.item(), b.item()

    assert World(2).run(fn)[1] == (2.0, 1.0)


def test_split_against_another_collective_is_a_mismatch_on_every_rank():
    def fn(comm):
        with pytest.raises(CollectiveMismatch) as caught:
            comm.split(7) if comm.rank == 1 else all_reduce(torch.ones(2), comm)
        barrier(comm)  # all agree again
        return str(caught.value)

    for message in World(3).run(fn):
        assert "split #1" in message and "all_reduce #1" in message


def test_a_split_that_one_rank_leaves_out_is_named():
    def fn(comm):
        if comm.rank == 0:
            compute()
        else:
            comm.split(0)

    failed, _ = failure_of(World(2, timeout=0.2), fn)
    assert str(failed.__cause__) == "rank 1 waited 0.2 s in split #1: agreement with rank 0"


# Races: what goes wrong once in a hundred runs.


def mixed(comm):
    """Uses everything, in an order that shifts the ranks against each other."""
    part = comm.split(comm.rank % 2)
    total = torch.zeros(4)
    for step in range(5):
        total += all_reduce(torch.full((4,), float(comm.rank + step)), comm)
        total += broadcast(torch.full((4,), float(comm.rank)), part, root=part.size - 1)
        other = torch.empty(2)
        comm.send_recv(total[:2].clone(), (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
        total += other.sum()
        barrier(part)
    return total.tolist()


def test_the_same_every_time():
    expected = World(4).run(mixed)
    for _ in range(40):
        assert World(4).run(mixed) == expected


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_same_every_time_for_long():
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for size in (2, 3, 4, 7, 16):
            expected = World(size).run(mixed)
            for _ in range(int(os.environ.get("SOAK_RUNS", 500))):
                assert World(size).run(mixed) == expected
    finally:
        sys.setswitchinterval(switch)


def test_the_last_two_to_leave_a_meeting(monkeypatch):
    """Both may see that all have left; only one can remove it."""

    class Slow(list):
        def append(self, item):
            super().append(item)
            time.sleep(0.02)

    class SlowMeeting(_Meeting):
        def __init__(self, size):
            super().__init__(size)
            self.left = Slow()

    monkeypatch.setattr("minizero.ranks.threads._Meeting", SlowMeeting)
    assert World(4).run(barrier) == [None] * 4


def test_a_message_that_came_between_two_looks_is_not_lost():
    run = Run(2)
    run.transports = [ThreadTransport(rank, [0, 1], torch.device("cpu"), 1.0, run) for rank in range(2)]
    answers = iter([None, "message"])

    def attempt(seconds):
        run.finished.add(1)  # sent and returned, just after the first look
        return next(answers)

    assert run.transports[0]._wait(attempt, lambda: [1], "recv from") == "message"
    assert run.failure is None


def test_what_a_transport_must_offer():
    with pytest.raises(TypeError, match="exchange.*settle.*subgroup.*transfer"):
        Transport(0, [0, 1], torch.device("cpu"), 1.0, "")


def test_only_the_first_failure_counts():
    run = Run(1)
    first = ValueError("first")
    run.fail(3, first)
    run.fail(4, ValueError("second"))
    assert run.failure[:2] == (3, first)
    assert "there was no other rank" in run.failure[2]
