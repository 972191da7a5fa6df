"""What notebooks 07 to 07c measure with: seconds, peaks, the blocks that kernels take, a kernel with another line."""

import importlib.util
import inspect
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

import flash
from flash.gpus import GPUS, PROCESSORS
from flash.options import Options
from flash.traffic import hbm_bytes
from minizero.memory import Ledger
from minizero.schedules.depth import seconds

HAS_TRITON = importlib.util.find_spec("triton") is not None
NO_OPTIONS = Options(None, None, None, 1.0, None, None, False, False, 0.0)


def peak(function, *inputs):
    """The most bytes that the call holds at once, beside what was there before."""
    with Ledger() as ledger:
        function(*inputs)
    return ledger.peak["total"]


def limits():
    """Of one core of this machine: seconds of the smallest call; bytes a second, from a cache and from memory, read and
    written; operations a second, in a product of matrices.
    """

    def repeat(times, operator, x, other):
        out = torch.empty_like(x)
        return lambda: [operator(x, other, out=out) for _ in range(times)]

    cached, long, square = torch.ones(2**16), torch.ones(2**25), torch.ones(512, 512)
    calls = {"call": repeat(1000, torch.add, torch.ones(1), 1), "cache": repeat(200, torch.add, cached, 1)}
    calls |= {"memory": repeat(1, torch.add, long, 1), "product": repeat(1, torch.mm, square, square)}
    best = seconds(calls, repeats=40)
    return {
        "call": best["call"] / 1000,
        "cache": 200 * 2 * cached.nbytes / best["cache"],
        "memory": 2 * long.nbytes / best["memory"],
        "product": 2 * 512**3 / best["product"],
    }


def blocks(gpu, kernel="forward", head_dim=64, itemsize=2, **options):
    """What `flash.launch.choose` answers on this product of `flash.gpus.GPUS`, which need not be here."""
    from flash import launch

    with mock.patch.object(launch, "architecture", lambda: PROCESSORS[GPUS[gpu].kind].blocks):
        return launch.choose(kernel, head_dim, itemsize, NO_OPTIONS._replace(**options))


def kernel_bytes(gpu, n, head_dim):
    """What the kernels move with those blocks in 16 bits, per head: (forward, backward)."""
    forward, dkdv, dq = (blocks(gpu, kernel, head_dim) for kernel in ("forward", "dkdv", "dq"))
    there = hbm_bytes(n, head_dim, block_q=forward.rows, block_k=forward.keys, algorithm="kernels")
    back = hbm_bytes(n, head_dim, block_q=dq.rows, block_k=dkdv.keys, algorithm="kernels", backward=True)
    return there.total, back.total


def change(module, old, new):
    """The module once more, with `new` in place of `old`. Triton asks `linecache` for the source of a kernel."""
    source, name = inspect.getsource(module), f"<{module.__name__}, changed>"
    if old not in source:
        raise ValueError(f"change: {module.__name__} has no {old!r}")
    source = source.replace(old, new)
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    made = ModuleType(name)
    exec(compile(source, name, "exec"), made.__dict__)
    return made


def compile_kernels(*kinds):
    """The rows of `python -m flash.compile` for these processors, head dim 64, 16 bits."""
    command = [sys.executable, "-m", "flash.compile", "--json", "--head-dims", "64", "--options", "plain", "--gpus"]
    look = {"cwd": Path(flash.__file__).parents[1], "env": os.environ | {"TRITON_INTERPRET": "0"}, "text": True}
    found = [subprocess.Popen([*command, kind], stdout=subprocess.PIPE, **look) for kind in kinds]  # at once
    rows = [json.loads(line) for one in found for line in one.communicate()[0].splitlines()]
    assert not any(one.returncode for one in found), "the compiler has said why"
    return rows
