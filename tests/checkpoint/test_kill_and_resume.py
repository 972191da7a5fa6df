"""A job one of whose ranks is killed, and that torchrun starts again, ends as if nothing had happened.

What a crash at each operation of a save leaves on the disk: test_checkpoint.py.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minizero import Comm, Zero3
from minizero.checkpoint import NoCheckpoint, load, save
from tests.support.checkpoints import wrap
from tests.support.helpers import run, same, steps

STEPS = 12


def train(comm, folder, at_step=lambda step: None):
    """Resume where there is something to resume from, save every other step; the first step, losses, and parameters."""
    (model, optimizer), first, losses = wrap(comm, Zero3), 0, []
    with contextlib.suppress(NoCheckpoint):
        first = load(folder, model, optimizer)
    for step in range(first, STEPS):
        at_step(step)
        losses += steps(model, optimizer, [step])
        if step % 2 == 1:
            save(folder, model, optimizer, step + 1)
    return first, losses, model.gather_state_dict()


def torchrun_main(folder):
    """A rank under torchrun, which starts all ranks again when one has died."""
    torch.set_num_threads(1)

    def die_once(step):
        if (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (7, "1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)

    with Comm.from_process_group() as comm:
        found = train(comm, folder / "checkpoint", die_once)
        (folder / f"result-{comm.rank}").write_bytes(pickle.dumps(found))


@pytest.mark.slow
def test_torchrun_restarts_a_job_and_it_resumes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", __file__, str(tmp_path)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert job.returncode == 0, job.stderr
    for rank, (_, expected, state) in enumerate(run(2, train, tmp_path / "uninterrupted")):
        first, losses, resumed = pickle.loads((tmp_path / f"result-{rank}").read_bytes())
        assert first == 6 and losses == expected[6:] and same(resumed, state)  # bit for bit


if __name__ == "__main__":
    torchrun_main(Path(sys.argv[1]))
