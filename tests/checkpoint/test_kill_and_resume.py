"""A job that is killed at a random moment of a step or a save, and started again, ends as if nothing had happened."""

import functools
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minizero import Comm, RankFailed
from minizero.checkpoint import NoCheckpoint, load, save
from tests.support.helpers import STAGES
from tests.support.processes import context

STEPS, WORLD_SIZE, PATIENCE = 24, 2, 600.0


def train(comm, folder, stage, tell):
    """Resume where there is something to resume from, save every other step; returns all that there is to compare."""
    torch.manual_seed(0)
    model = stage(nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1)), comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(STEPS, WORLD_SIZE, 16, 8)
    y = x.sum(-1, keepdim=True).sin()
    try:
        first = load(folder, model, optimizer)
    except NoCheckpoint:
        first = 0
    tell("resumed", first)
    losses = []
    for step in range(first, STEPS):
        tell("step", step)
        loss = (model(x[step, comm.rank]) - y[step, comm.rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2 == 1:
            tell("save", step + 1)
            save(folder, model, optimizer, step + 1)
            tell("saved", step + 1)
    return losses, {name: tensor.tolist() for name, tensor in model.gather_state_dict().items()}


def rank_main(rank, folder, attempt, stage):
    """One rank of one attempt, as a process of its own; it keeps a journal, and leaves what it found in the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{attempt}", rank=rank, world_size=WORLD_SIZE)
    with Comm.from_process_group() as comm, (folder / f"journal-{attempt}-{rank}").open("a") as journal:
        try:
            found = train(comm, folder / "checkpoint", stage, lambda *what: print(*what, file=journal, flush=True))
        except RankFailed:  # the other one was killed
            os._exit(3)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(found))
    os._exit(0)


class Attempt:
    """The job, as processes."""

    def __init__(self, folder, number, stage):
        self.journals = [folder / f"journal-{number}-{rank}" for rank in range(WORLD_SIZE)]
        ranks = [(rank, folder, number, stage) for rank in range(WORLD_SIZE)]
        self.processes = [context().Process(target=rank_main, args=args) for args in ranks]
        for process in self.processes:
            process.start()

    def journal(self, rank):
        """What the rank has told, as (word, step)."""
        text = self.journals[rank].read_text() if self.journals[rank].exists() else ""
        lines = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [(word, int(step)) for word, step in lines]

    def kill(self, ranks, word, step, seconds):
        """SIGKILL these ranks `seconds` after the first of them has told `word`; were all still alive?"""
        end = time.monotonic() + PATIENCE
        while (word, step) not in self.journal(ranks[0]):
            assert time.monotonic() < end, f"rank {ranks[0]} never came to {word} {step}"
            time.sleep(0.0005)
        time.sleep(seconds)
        for rank in ranks:
            self.processes[rank].kill()
        return all(self.end()[rank] == -signal.SIGKILL for rank in ranks)

    def end(self):
        """The exit codes; a rank that hangs is an error."""
        end = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        assert None not in codes, "a rank hangs"
        return codes


def results(folder):
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(WORLD_SIZE)]


@functools.cache
def uninterrupted(stage, folder):
    folder.mkdir()
    assert Attempt(folder, 0, stage).end() == [0, 0]
    return results(folder)


def trial(folder, stage, expected, draw):
    """Kill one rank, or both, and resume. Returns what was going on when it was killed; None if it was through."""
    first, ranks = Attempt(folder, 0, stage), draw.choice([[0], [1], [0, 1], [1, 0]])
    word = draw.choice(["step", "save"])
    step = draw.randrange(STEPS // 2) * 2
    if not first.kill(ranks, word, step + 2 * (word == "save"), draw.uniform(0, 0.01)):
        return None
    assert set(first.end()) <= {-signal.SIGKILL, 3}, first.end()
    told = [event for rank in range(WORLD_SIZE) for event in first.journal(rank)]
    saved = max((step for word, step in told if word == "saved"), default=0)
    begun = max((step for word, step in told if word == "save"), default=0)

    second = Attempt(folder, 1, stage)
    assert second.end() == [0, 0]
    (where,) = {second.journal(rank)[0] for rank in range(WORLD_SIZE)}
    assert where in {("resumed", saved), ("resumed", begun)}
    for (losses, state), (all_losses, all_state) in zip(results(folder), expected):
        assert losses == all_losses[where[1] :] and state == all_state  # bit for bit
    assert len(list((folder / "checkpoint").iterdir())) == 2  # no leftovers
    return first.journal(ranks[0])[-1][0]


def trials(count, tmp_path, seed):
    draw, killed_in = random.Random(seed), []
    for number in range(2 * count):
        stage = draw.choice(STAGES)
        expected = uninterrupted(stage, tmp_path / stage.__name__)
        (folder := tmp_path / f"{number}").mkdir()
        killed_in += filter(None, [trial(folder, stage, expected, draw)])
        if len(killed_in) == count:
            return killed_in
    raise AssertionError(f"only {len(killed_in)} jobs could be killed before they were through")


@pytest.mark.slow
def test_three_jobs_killed_and_resumed(tmp_path):
    trials(3, tmp_path, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_jobs_killed_and_resumed(tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # to run the same draws again
    killed_in = trials(100, tmp_path, seed)
    print({word: killed_in.count(word) for word in sorted(set(killed_in))})
    assert killed_in.count("save") >= 10 and killed_in.count("step") >= 10


def torchrun_main(folder):
    """A rank under torchrun, which starts all ranks again when one has died."""
    torch.set_num_threads(1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank = int(os.environ["RANK"])
    with Comm.from_process_group() as comm, (folder / f"journal-{attempt}-{rank}").open("a") as journal:

        def tell(*what):
            print(*what, file=journal, flush=True)
            if (*what, attempt, rank) == ("step", 7, "0", 1):
                os.kill(os.getpid(), signal.SIGKILL)

        found = train(comm, folder / "checkpoint", STAGES[3], tell)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(found))


@pytest.mark.slow
def test_torchrun_restarts_a_job_and_it_resumes(tmp_path):
    expected = uninterrupted(STAGES[3], tmp_path / "uninterrupted")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", __file__, str(tmp_path)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "journal-1-0").read_text().startswith("resumed 6\n")
    for (losses, state), (all_losses, all_state) in zip(results(tmp_path), expected):
        assert losses == all_losses[6:] and state == all_state


if __name__ == "__main__":
    torchrun_main(Path(sys.argv[1]))
