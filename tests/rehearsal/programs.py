"""The README's code, the notebooks' cells, the examples in docstrings and two commands, on the pretend GPUs."""

import importlib
import inspect
import json
import linecache
import re
import subprocess
import tempfile
import textwrap
import threading
from collections import ChainMap
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from matplotlib.animation import Animation

import minizero.train.command
from minizero import DDP, GPT, Comm, GPTConfig, World
from precision import DynamicLossScaler
from tests.rehearsal.device import ROOT, files
from tests.rehearsal.left_out import CELLS, GPU_TESTS, GPU_VALUES, SHORTER

ROOT = Path(ROOT)
thread = threading.local()  # .comm: this rank's, for what torchrun would have started as a process


def execute(source, name, namespace, first_line=1):
    """Run code. Messages and tracebacks call its lines `name`, counted from `first_line`."""
    text = "\n" * (first_line - 1) + source
    key = f"<{name}>"
    files[key] = name
    linecache.cache[key] = (len(text), None, text.splitlines(True), key)
    exec(compile(text, key, "exec"), namespace)


# Programs of torchrun: their ranks are threads here.


def of_this_thread(group=None):
    return thread.comm


def torchrun(source, name, namespace, ranks=2, first_line=1):
    def rank(comm):
        thread.comm = comm
        execute(source, name, dict(namespace), first_line)

    World(ranks).run(rank)


run_process = subprocess.run


def run_instead(command, **options):
    """In place of `subprocess.run`: what a cell starts by torchrun runs here."""
    if "torch.distributed.run" not in command:
        return run_process(command, **options)
    program, ranks = Path(options.get("cwd") or ".", command[-1]), int(command[command.index("--nproc-per-node") + 1])
    source = program.read_text().replace('f"{comm.rank}.pt"', "'x'")
    with redirect_stdout(StringIO()) as output:
        torchrun(source.replace("f'{comm.rank}.pt'", f"f'{program.parent}/{{comm.rank}}.pt'"), "its program", {}, ranks)
    return subprocess.CompletedProcess(command, 0, output.getvalue(), "")


# What is rehearsed.


def readme():
    """Every block of Python, one after the other."""
    text = (ROOT / "README.md").read_text()
    namespace = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert blocks, "README.md has no block of Python"
    for block in blocks:
        first = text.count("\n", 0, block.start(1)) + 1
        if "from_process_group" in block[1]:
            torchrun(block[1], "README.md", {**namespace, "Comm": Comm}, 2, first)
        else:
            execute(block[1], "README.md", namespace, first)


def notebook(path):
    """Its cells, but those that are left out. Devices alone are judged: what a cell asserts may fail here."""
    namespace = {"__name__": "notebook"}
    left_out, shorter = dict(CELLS.get(path.stem, {})), dict(SHORTER.get(path.stem, {}))
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if "setup" not in cell["metadata"].get("tags", [])]
    ran = 0
    for number, cell in enumerate(cells, 2):  # as in the notebook
        source = "".join(cell["source"])
        if found := [words for words in left_out if words in source]:
            for words in found:
                del left_out[words]
            continue
        for long in [words for words in shorter if words in source]:
            source = source.replace(long, shorter.pop(long))
        try:
            execute(source, f"notebooks/{path.name}, cell [{number}]", namespace)
            ran += 1
        except Exception as error:
            if not isinstance(cause_of(error), AssertionError | NameError):  # it needs what is left out
                raise
    assert not left_out | shorter, f"left_out.py: {path.name} has no {list(left_out | shorter)}"
    assert ran > len(cells) / 2, f"{path.name}: only {ran} of {len(cells)} cells ran"


def cause_of(error):
    """What a rank raised stands behind RankFailed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


ASSUMED = ("precision.histogram", "precision.emulate", "precision", "minizero.engines.timeline")
EXAMPLES = (
    "minizero.engines.timeline",
    "precision.emulate",
    "precision.histogram:collect",
    "precision.master:MasterWeights",
)


def docstrings():
    """The indented paragraph of each of these docstrings that trains, with the names that it assumes."""
    for place in EXAMPLES:
        module, _, member = place.partition(":")
        thing = importlib.import_module(module)
        text = inspect.getdoc(getattr(thing, member) if member else thing)
        paragraphs = re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE)
        (code,) = [textwrap.dedent(p) for p in paragraphs if re.search(r"\.backward\(\)|^    with ", p)]
        with tempfile.TemporaryDirectory() as folder, chdir(folder):  # one of them writes a file
            World(2).run(example, code, f"the docstring of {place}")


def example(comm, source, name):
    dtype = torch.float16 if "MasterWeights" in name else torch.float32
    model = GPT(GPTConfig(width=32, layers=2, heads=2)).to(comm.device, dtype)
    if "timeline" in name:
        model = DDP(model, comm)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), DynamicLossScaler()
    x = y = torch.zeros(1, 64, dtype=torch.long, device=comm.device)
    loss = model(x, y)

    def train(model, optimizer):
        model(x, y).backward()
        optimizer.step()

    execute(source, name, dict(ChainMap(locals(), *(vars(importlib.import_module(module)) for module in ASSUMED))))


def demo():
    """The main job, small."""
    options = "--world-size 2 --steps 2 --batch-size 1 --width 32 --layers 2 --heads 2"
    assert minizero.train.command.main(options.split()) == 0, "python -m minizero.train failed on the pretend GPUs"


def gpu():
    """tests/gpu, at the sizes at which they are tried on a CPU."""
    importlib.import_module("tests.gpu.device").size = lambda on_gpu, on_cpu: on_cpu
    left_out = [f"--deselect=tests/gpu/{name}" for name in GPU_TESTS]
    options = ["tests/gpu", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    assert pytest.main([*options, *left_out], [ByValue()]) == 0, "a test of tests/gpu failed on the pretend GPUs"


class ByValue:
    """A plugin of pytest: the tests that compare values which only a card has may fail at their assertions."""

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.originalname in GPU_VALUES:
                item.add_marker(pytest.mark.xfail(raises=AssertionError, reason=GPU_VALUES[item.originalname]))


# torchrun is not started here, and its ranks are threads.
Comm.from_process_group, subprocess.run = staticmethod(of_this_thread), run_instead
torch.set_num_threads(1)  # two that find one core busy wait for each other
torch.set_num_threads = lambda count: None
Animation.to_jshtml = lambda *args, **kwargs: ""  # drawn picture by picture, for seconds

PARTS = {"readme": readme, "docstrings": docstrings, "demo": demo, "gpu": gpu}
paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARTS |= {path.stem: lambda path=path: notebook(path) for path in paths}
