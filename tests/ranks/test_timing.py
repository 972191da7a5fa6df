"""Times of messages: the slowest rank counts, the fit finds α and β, and what a process says in the end."""

import time
from types import SimpleNamespace

import pytest

from minizero import World
from minizero.ranks import timing
from minizero.ranks.launch import torchrun
from minizero.ranks.timing import alpha_and_beta, best_seconds, time_messages


def test_the_slowest_rank_counts_on_all():
    uneven = lambda comm: best_seconds(lambda: time.sleep(0.03 * comm.rank), comm, rounds=2)  # noqa: E731
    first, second = World(2).run(uneven)
    assert first == second >= 0.03


def test_the_fit_finds_what_the_times_were_made_of_and_every_size_counts_alike():
    """Large times would drown the small ones in a plain least squares: α would be far off."""
    assert alpha_and_beta({n: 2e-4 + n / 3e9 for n in (2**10, 2**16, 2**22)}) == pytest.approx((2e-4, 3e9))
    times = {n: 1e-4 + n / 1e9 for n in (2**10, 2**12, 2**14, 2**20, 2**22)}
    times[2**20] *= 1.2
    times[2**22] *= 0.9
    assert alpha_and_beta(times)[0] == pytest.approx(1e-4, rel=0.1)


def counted(comm):
    found = time_messages(comm)
    return found, comm.bytes_sent


def test_threads_have_no_peer_and_each_rank_sends_one_message_a_call():
    (found, sent), (other, _) = World(2).run(counted)
    assert found == other and list(found) == ["our ring"]
    sizes = [2**k for k in range(10, 23, 2)]
    assert list(found["our ring"]) == sizes and all(seconds > 0 for seconds in found["our ring"].values())
    assert 63 * sum(sizes) <= sent <= 1.01 * 63 * sum(sizes)  # 3 × 20 rounds, each 20 after a warm-up


def test_the_best_of_the_three_times_counts(monkeypatch):
    """The second time is the best here: neither the first nor the last may stand in its place."""
    times = [3.0] * 7 + [1.0] * 7 + [2.0] * 7
    monkeypatch.setattr(timing, "best_seconds", lambda *_: times.pop(0))
    (found,) = World(1).run(time_messages)
    assert set(found["our ring"].values()) == {1.0}


def test_a_process_that_fails_is_told_with_its_output(monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="NameError: name 'doubled'\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"time_messages failed in a process:\nNameError: name 'doubled'$"):
        torchrun(time_messages, 2)
