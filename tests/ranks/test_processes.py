"""The same ranks as processes over gloo. A spawn costs seconds, so each does many checks."""

import atexit
import contextlib
import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minizero import CollectiveMismatch, RankFailed, World
from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.comm import Comm
from minizero.ranks.processes import torchrun
from minizero.ranks.processes.watch import Watch
from minizero.ranks.transport import Collective
from tests.support.failures import DISAGREE, SOON, error_of, timed
from tests.support.helpers import soak
from tests.support.processes import run, spawn


def everything(comm):
    """Values, bytes and messages of all operations; the thread world must give the same."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        generator = torch.Generator().manual_seed(comm.rank)
        mine = (torch.rand(37, 3, generator=generator) * 50).to(dtype)
        found[f"gather {dtype}"] = all_gather(mine.t()[:, ::2], comm)
        found[f"broadcast {dtype}"] = broadcast(mine, comm, root=comm.size - 1)
        for op in ("sum", "max", "min", *["mean"] * dtype.is_floating_point):
            found[f"reduce {op} {dtype}"] = all_reduce(mine, comm, op)
            found[f"scatter {op} {dtype}"] = reduce_scatter(pad(mine, comm.size), comm, op)
    found["nothing"] = all_gather(torch.empty(0), comm), reduce_scatter(torch.empty(comm.size, 0), comm)
    found["number"] = all_reduce(torch.tensor(1.5 + comm.rank), comm)
    turned = torch.tensor([1 + 2j, 3j * comm.rank]).conj()
    found["complex"] = broadcast(turned, comm, 1), all_reduce(turned, comm, "mean")

    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received, wide, own = torch.empty_like(turned), torch.zeros(4, 6), torch.zeros(3)
    comm.send_recv(turned, right, received, left)
    comm.send_recv(torch.arange(12.0).view(4, 3) + comm.rank, right, wide[:, ::2], left)
    comm.send_recv(torch.ones(3), comm.rank, own, comm.rank)
    comm.send_recv(torch.empty(0), right, torch.empty(0), left)
    found["point to point"] = received, wide, own

    half = comm.split(comm.rank % 2)
    single, again = half.split(half.rank), comm.split(0)
    found["split"] = [(c.rank, c.size, all_gather(torch.tensor([comm.rank]), c)) for c in (half, single, again)]
    if comm.rank == 0:  # the same two ranks, but a message of the one is none of the other
        (first := threading.Thread(target=comm.send, args=(torch.ones(1), 1))).start()
        time.sleep(0.1)
        again.send(torch.full((1,), 2.0), 1)
        first.join()
    if comm.rank == 1:
        again.recv(a := torch.zeros(1), 0)
        comm.recv(b := torch.zeros(1), 0)
        assert (a.item(), b.item()) == (2.0, 1.0)
    found["bytes"] = [(c.bytes_sent, c.bytes_received) for c in (comm, half, single, again)]
    found["bad argument"] = error_of(lambda: comm.send(torch.ones(1), comm.size))
    found["in the end"] = all_reduce(torch.ones(2), comm), comm.transport.sequence, comm.transport.collective
    return found


def told(x):
    """To compare by ==: a tensor's dtype, shape and numbers."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.tolist()
    return [told(each) for each in x] if isinstance(x, list | tuple) else x


@pytest.mark.slow
@pytest.mark.parametrize("size", [*soak(2, 4), 3])
def test_processes_give_what_threads_give(size, tmp_path):
    threads, processes = World(size).run(everything), run(everything, size, tmp_path)
    for rank, (expected, found) in enumerate(zip(threads, processes)):
        assert list(expected) == list(found)
        for name in expected:
            assert told(expected[name]) == told(found[name]), f"rank {rank}: {name}"


def fits_not(comm):
    """Ranks 0 and 1 differ in size, 2 and 3 in dtype."""
    outgoing = torch.zeros(2 if comm.rank == 0 else 4)
    incoming = torch.ones(4, dtype=torch.float32 if comm.rank == 1 else torch.int32)
    odd = comm.rank % 2
    error = error_of(lambda: comm.recv(incoming, comm.rank - 1) if odd else comm.send(outgoing, comm.rank + 1))
    return error, incoming.tolist()


def failing(comm):
    """Each failure ends a communicator of its own: in two of them rank 2 fails, and its process lives on."""
    found = {}
    for case in ("raises", "late", "does not fit"):
        with contextlib.suppress(ArithmeticError), Comm.from_process_group() as own:
            barrier(own)
            if (own.rank, case) == (2, "raises"):
                raise ArithmeticError
            own.timeout = 60.0 if case == "raises" else 1.0
            if (own.rank, case) == (2, "late"):
                barrier(comm)  # until the others have failed
            found[case] = fits_not(own) if case == "does not fit" else timed(lambda: all_reduce(torch.ones(3), own))  # noqa: B023
        if (comm.rank, case) != (2, "late"):
            barrier(comm)
    return found


@pytest.mark.slow
def test_a_failure_on_one_rank_is_told_on_the_others_soon(tmp_path):
    ranks = run(failing, 4, tmp_path)
    kind, message, *_ = ranks[2].pop("late")
    assert kind == "RankFailed" and message.startswith("rank 2 came too late"), message
    for rank in (0, 1, 3):
        kind, message, blamed, seconds = ranks[rank]["raises"]
        assert (kind, blamed) == ("RankFailed", 2) and seconds < SOON
        assert message.startswith(f"rank {rank} lost rank 2 in all_reduce #2"), message
        kind, message, blamed, seconds = ranks[rank]["late"]
        assert seconds < SOON
        if kind == "CommTimeout":
            assert message.startswith(f"rank {rank} waited 1 s in all_reduce #2: "), message
            assert message.endswith("rank 2 has not come"), message
        else:  # who times out first ends the others
            assert (kind, blamed) == ("RankFailed", 2), message
    # gloo itself would fill a part of the receiver's tensor, or take the bytes for another dtype.
    misfits = [found["does not fit"] for found in ranks]
    assert all("point-to-point" in error[1] and incoming == [1] * 4 for error, incoming in misfits)
    late = [found["late"] for found in ranks if "late" in found]
    for group in (late, *([error for error, _ in pair] for pair in (misfits[:2], misfits[2:]))):
        kinds = {kind for kind, *_ in group}  # who times out first closes the connection; the other may see that first
        assert "CommTimeout" in kinds and kinds <= {"CommTimeout", "RankFailed"}


def dies(rank, size, folder, how):
    """Rank 2 goes; what the others raise is written down."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    with Comm.from_process_group() as comm:
        barrier(comm)
        if rank == 2:
            # At once, or when its words are in the store.
            os._exit(1) if how == "killed" else threading.Timer(1, os._exit, [1]).start()
        if rank == 0 and how == "killed as it waits for another":
            time.sleep(2.5)
        found = timed(lambda: all_reduce(torch.ones(3), comm))
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    os._exit(0)  # what a failed rank does next: it ends, too


@pytest.mark.slow
@pytest.mark.parametrize("how", [*soak("killed"), "killed as it waits for another"])
def test_the_others_name_a_rank_that_died(how, tmp_path):
    codes = spawn(dies, 4, tmp_path, how)
    assert codes == [0, 0, 1, 0]
    for rank in (0, 1, 3):
        kind, message, blamed, seconds = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert (kind, blamed) == ("RankFailed", 2), message
        assert message.startswith(f"rank {rank} lost rank 2 in all_reduce #2"), message
        assert seconds < SOON


def sub_groups(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine, members = groups[rank % 2], ([0, 2], [1])[rank % 2]
    with Comm.from_process_group(mine) as comm:
        assert (comm.rank, comm.size, comm.ranks) == (rank // 2, len(members), members)
        assert all_gather(torch.tensor([rank]), comm).tolist() == members
        assert comm.split(comm.rank).size == 1
        for elements in (1 + rank, 1) if rank != 1 else ():  # told again, not waited for
            with pytest.raises(CollectiveMismatch, match="rank 0 called .*rank 2 called|rank 2 called .*rank 0 called"):
                all_reduce(torch.ones(elements), comm)
    with pytest.raises(ValueError, match="not in the group"):
        Comm.from_process_group(groups[1 - rank % 2])
    with pytest.raises(ZeroDivisionError), Comm.from_process_group():
        raise ZeroDivisionError
    for _ in range(2):  # again and again, on the same group
        with Comm.from_process_group() as comm:
            assert all_reduce(torch.tensor(rank), comm).item() == 3
    dist.all_reduce(total := torch.tensor(rank), group=mine)  # both groups still work
    dist.all_reduce(whole := torch.tensor(rank))
    assert (total.item(), whole.item()) == (sum(members), 3)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_group_that_was_there_is_left_alone(tmp_path):
    assert spawn(sub_groups, 3, tmp_path) == [0, 0, 0]


def connects(rank, size, folder):
    """The last rank takes long; the others' first step into the block is written down beside its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    theirs, connected = dist.ProcessGroupGloo, []

    def slow(*args):
        gloo = theirs(*args)
        time.sleep(rank == size - 1)
        connected.append(time.monotonic())  # one clock for all processes of a machine
        return gloo

    dist.ProcessGroupGloo = slow
    with pytest.raises(ZeroDivisionError), Comm.from_process_group():
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps((*connected, time.monotonic())))
        raise ZeroDivisionError


@pytest.mark.slow
def test_nobody_begins_or_leaves_before_all_are_connected(tmp_path):
    assert spawn(connects, 3, tmp_path) == [0, 0, 0]
    connected, begun = zip(*(pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(3)))
    assert max(connected) == connected[2] < min(begun)


def as_torchrun_does(rank, size, folder, port, script):
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    script(rank, size)


def sum_of_ranks(comm):
    return all_reduce(torch.tensor(comm.rank), comm).item()


def with_a_block(rank, size):
    for _ in range(3):  # torchrun's store still has the addresses of the time before
        with Comm.from_process_group() as comm:
            assert (comm.rank, comm.size) == (rank, size)
            assert dist.is_initialized()
            assert sum_of_ranks(comm) == 1
        assert not dist.is_initialized()


def flat(rank, size):
    """Of three communicators one is closed, one left open, and one forgotten."""
    atexit.register(lambda: dist.is_initialized() or os._exit(3))  # comes last: after those of the communicators
    first, second = Comm.from_process_group(), Comm.from_process_group()
    assert sum_of_ranks(first) == sum_of_ranks(second) == 1
    first.close()
    first.close()
    assert not dist.is_initialized(), "it made the group"
    with pytest.raises(RuntimeError, match="a communicator that is closed"):
        sum_of_ranks(first)
    assert sum_of_ranks(second) == sum_of_ranks(Comm.from_process_group()) == 1
    gc.collect()
    assert dist.is_initialized()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the user's: it must stay


def one_fails(rank, size):
    comm = Comm.from_process_group()
    if rank == 1:
        raise ArithmeticError("on purpose")
    with pytest.raises(RankFailed, match="rank 0 lost rank 1") as caught:
        barrier(comm)
    assert caught.value.rank == 1


@pytest.mark.slow
@pytest.mark.parametrize("script, codes", [(with_a_block, [0, 0]), (flat, [0, 0]), (one_fails, [0, 1])])
def test_its_own_group_from_the_variables_of_torchrun(script, codes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert spawn(as_torchrun_does, 2, tmp_path, port, script) == codes


def test_each_group_has_its_own_part_of_the_store(monkeypatch):
    """torchrun has one store for all: there a rank would find where the others were in the group before."""
    store, stores = dist.HashStore(), []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torchrun, "_meet", torchrun._meet.__wrapped__)  # not what it remembers
    monkeypatch.setattr(torchrun, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda _, store, **__: stores.append(store))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for _ in range(2):
        torchrun._init_process_group()
    stores[0].set("address", "of before")
    assert not stores[1].check(["address"])


CARDS = {  # what each rank sees, its LOCAL_RANK (None: not set), and which card it takes; none: the CPU
    "torchrun": (["ab", "ab"], [0, 1], [0, 1]),
    "Slurm, one card a task": (["a", "b"], [0, 1], [0, 0]),
    "two hosts": (["ab", "ab", "cd", "cd"], [0, 1, 0, 1], [0, 1, 0, 1]),
    "two hosts, no LOCAL_RANK": (["ab", "ab", "cd", "cd"], [None] * 4, [0, 1, 0, 1]),
    "more cards than ranks": (["abcd", "abcd"], [0, 1], [0, 1]),
    "two of four each": (["ab", "cd"], [0, 1], [0, 1]),
    "one card for two": (["a", "a"], [0, 1], "2 ranks see 1 GPUs"),
    "two cards for three": (["ab", "ab", "ab"], [0, 1, 2], "3 ranks see 2 GPUs"),
    "a rank without": (["a", ""], [0, 0], "2 ranks see 1 GPUs"),
    "no card": (["", ""], [0, 1], None),
}


@pytest.mark.parametrize("name", CARDS)
def test_each_rank_takes_a_card_of_its_own_or_all_say_that_they_take_the_cpu(name, monkeypatch):
    seen, local, expected = CARDS[name]
    store, here, taken = dist.HashStore(), threading.local(), {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen[here.rank]))
    properties = lambda index: SimpleNamespace(uuid=seen[here.rank][index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: taken.__setitem__(here.rank, index))

    def choose(rank):
        here.rank = rank
        return torchrun._a_card_for_each(store, rank, len(seen), rank if local[rank] is None else local[rank])

    with warnings.catch_warnings(record=True) as said, ThreadPoolExecutor(len(seen)) as threads:
        warnings.simplefilter("always")
        on_cards = list(threads.map(choose, range(len(seen))))
    if isinstance(expected, list):
        assert on_cards == [True] * len(seen) and [taken[rank] for rank in range(len(seen))] == expected
    else:
        assert on_cards == [False] * len(seen) and not taken
    words = [str(each.message) for each in said]
    assert len(words) == isinstance(expected, str) and all(expected in each and "on the CPU" in each for each in words)


def test_outside_torchrun(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start with torchrun"):
        Comm.from_process_group()
    assert not dist.is_initialized()


def test_a_single_process(tmp_path):
    """Needs no second one: an agreement with oneself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with Comm.from_process_group() as comm:
            assert all_reduce(torch.ones(2), comm, "mean").tolist() == [1.0, 1.0]
            assert comm.split(5).size == 1
    finally:
        dist.destroy_process_group()


# They agree by the tags of their messages: at no cost, and those that disagree are told so.


def broken(comm, odd):
    """Once more, on a communicator that has told a mismatch."""
    all_reduce(torch.ones(4 + odd), comm)


def mismatches(comm):
    """What every rank is told where the last one does something else; each ends a communicator of its own."""
    cases = {name: call for name, (call, *_) in DISAGREE.items()} | {
        "told twice": lambda comm, odd: [error_of(lambda: all_reduce(torch.ones(4 + odd), comm)), broken(comm, odd)],
        "in a part": lambda comm, odd: all_reduce(torch.ones(4 + odd), comm.split(0)),
        "after others": lambda comm, odd: [all_reduce(torch.ones(4 + odd * (i == 3)), comm) for i in range(5)],
    }
    found = {}
    for case, call in cases.items():
        with Comm.from_process_group() as own:
            barrier(own)
            found[case] = timed(lambda: call(own, own.rank == own.size - 1))  # noqa: B023
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [*soak(2), 3])
def test_a_mismatch_is_told_on_every_rank_and_names_both_sides(size, tmp_path):
    for rank, found in enumerate(run(mismatches, size, tmp_path)):
        for name, (kind, message, _, seconds) in found.items():
            assert kind == "CollectiveMismatch", (name, message)
            assert f"rank {rank} called" in message and f"rank {size - 1} called" in message
            assert seconds < SOON, name


def agreeing(comm):
    """What gloo is asked to send in each collective; then many collectives of ranks that are late by turns."""
    gloo, sent, found = comm.transport.gloo, [], {}

    def send(tensors, *where):
        sent.append(tensors[0].nbytes)
        return gloo.send(tensors, *where)

    comm.transport.gloo, tensor = SimpleNamespace(send=send, recv=gloo.recv), torch.ones(12, dtype=torch.float64)
    for name, call in {"gather": all_gather, "scatter": reduce_scatter, "reduce": all_reduce}.items():
        call(tensor, comm)
        found[name] = sent[:]
        sent.clear()
    for turn in range(2 * comm.size):
        time.sleep(0.6 if turn % comm.size == comm.rank else 0)  # long enough for the others to look round twice
        for elements in (3, 5 + turn, 4):
            all_reduce(torch.ones(elements), comm)
        broadcast(torch.ones(2), comm, root=turn % comm.size)
        barrier(comm)
    return found, comm.transport.watch.told


@pytest.mark.slow
def test_an_agreement_costs_no_message_and_a_late_rank_is_no_mismatch(tmp_path):
    for found, told in run(agreeing, 3, tmp_path):
        assert found == {"gather": [96] * 2, "scatter": [32] * 2, "reduce": [32] * 4}
        assert told == ""


def stopped(rank, size, recv=None):
    """The watch of one rank, whose thread has ended."""
    gloo = SimpleNamespace(rank=lambda: rank, size=lambda: size, recv=recv)
    watch = Watch(gloo, dist.HashStore(), list(range(size)))
    watch.stop()
    return watch


def test_one_closed_connection_does_not_keep_the_others_open():
    asked = []

    def refuse(tensors, peer, tag):
        asked.append(peer)
        raise RuntimeError("closed")

    stopped(1, 4, refuse).close()
    assert asked == [0, 2, 3]


def test_what_a_mismatch_was_about_stays_for_those_who_come_later():
    watch, transport = stopped(0, 2), SimpleNamespace(rank=0, size=2, name="")
    transport.mismatch = lambda mine, rank, theirs: f"{mine} and {rank}'s {theirs}"
    transport.collective = Collective(7, "gather #7", "gather #7")
    watch.store.set(" 1", "7 scatter #7")
    assert watch.compare(transport) == {0: "gather #7", 1: "scatter #7"}
    assert watch.told == "gather #7 and 1's scatter #7"
    transport.collective = Collective(8, "gather #8", "gather #8")  # the program goes on
    watch.compare(transport)
    assert watch.store.get(" 0") == b"7 gather #7"


LONG = "ü€😀" * 200


def long_words(comm):
    """Words of any length, also where they differ at their end only; and a message that looks like words."""
    assert error_of(lambda: all_gather(torch.ones(2), comm, label=LONG)) is None
    with Comm.from_process_group() as own:
        odd = error_of(lambda: all_gather(torch.ones(2), own, label=f"{LONG}{own.rank}"))
    said = [comm.transport.exchange(words * (1 + comm.rank)) for words in (LONG, "", "\0x")]
    size = comm.split(f"{LONG}{comm.rank}").size
    comm.timeout = 1.0
    stray = error_of(lambda: barrier(comm) if comm.rank else comm.send(torch.ones(1, dtype=torch.uint8), 1))
    return odd[0], said, size, stray[0]


@pytest.mark.slow
def test_long_words_and_stray_messages(tmp_path):
    ranks = run(long_words, 2, tmp_path)
    for odd, said, size, _ in ranks:
        assert (odd, size) == ("CollectiveMismatch", 1)
        assert said == [[words, 2 * words] for words in (LONG, "", "\0x")]
    kinds = {stray for *_, stray in ranks}  # who times out first closes the connection; the other may see that first
    assert "CommTimeout" in kinds and kinds <= {"CommTimeout", "RankFailed"}, kinds


# A flat script, as people have them.

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_flat_script_trains_the_same_under_ddp_and_zero3_and_resumes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(ROOT / "tests" / "ranks" / "flat_training.py"), str(tmp_path), "DDP", "Zero3", "DDP:Zero3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*torchrun, *program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["Zero3"] == losses["DDP"] and losses["DDP"][-1] < losses["DDP"][0]
    assert losses["DDP:Zero3"] == losses["DDP"][2:], "as if it had not been interrupted"
