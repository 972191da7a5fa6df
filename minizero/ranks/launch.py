"""A function on N processes: what `World(n).run(fn)` does with threads, `torchrun(fn, n)` does with processes.

The command torchrun starts one program N times, and tells each copy its rank. So the function becomes a program of its
own, in a temporary folder, and each process leaves its result there.
"""

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

IMPORTS = """import torch
import torch.distributed as dist
from minizero.ranks.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from minizero.ranks.comm import Comm
"""
MAIN = """with Comm.from_process_group() as comm:
    torch.save({name}(comm), f'{{comm.rank}}.pt')
"""


def torchrun(fn: Callable[..., Any], size: int, *helpers: Callable[..., Any], timeout: float = 300.0) -> list:
    """Call `fn(comm)` in `size` processes of this machine. Returns what `torch.save` could save, in rank order.

    helpers: functions that `fn` calls, if it is written in a notebook. There each function travels as its source, which
    may use what IMPORTS names. A function of a module is imported. `RuntimeError` with the output if a process fails.
    While they run, torchrun's store listens on every network interface, and asks for no password.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    parts = [IMPORTS, *map(_as_text, (*helpers, fn)), MAIN.format(name=fn.__name__)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text("\n\n".join(parts), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # they import what we can
        options: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run([*command, "program.py"], timeout=timeout, check=False, **options)
        if done.returncode:
            raise RuntimeError(f"torchrun: {fn.__name__} failed in a process:\n{done.stderr.strip()}")
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(size)]


def _as_text(fn: Callable[..., Any]) -> str:
    """The line that imports the function, or its source if no module has it."""
    home = sys.modules.get(fn.__module__)
    if fn.__module__ != "__main__" and getattr(home, fn.__name__, None) is fn:
        return f"from {fn.__module__} import {fn.__name__}"
    return inspect.getsource(fn)
