"""Processes: ranks, over gloo, started and their results fetched; and a module that is run as a program."""

import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from minizero.ranks.comm import Comm


def rank_main(fn, threads, rank, size, folder):
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    with Comm.from_process_group() as comm:
        result = fn(comm)
    assert dist.is_initialized()  # it was there before
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def context():
    """Processes that are forked off one which has imported torch already: they start in no time.

    Their environment is the one that the first of them met.
    """
    server = multiprocessing.get_context("forkserver")
    # The third is what the first optimizer of a process imports, in over a second.
    server.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "minizero"])
    return server


def spawn(main, size, folder: Path, *args, patience=600):
    """`main(rank, size, folder, *args)` in processes of their own; their exit codes, once all have ended."""
    processes = [context().Process(target=main, args=(rank, size, folder, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + patience
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run(fn, size, folder):
    """Results of `fn(comm)` in rank order."""
    assert spawn(functools.partial(rank_main, fn, torch.get_num_threads()), size, folder) == [0] * size
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def printed_by(module, *arguments, **variables):
    """What `python -m module` prints, in a process of its own that has these variables."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    root, environment = Path(__file__).parents[2], os.environ | variables
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
