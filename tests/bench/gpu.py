"""python -m tests.bench.gpu: everything that needs a GPU, tested and measured, into one folder.

Each part is a process of its own, and may be run alone; `gpu_parts.py` has their list. Its figures are in results.json
as soon as they are measured, log.txt beside that; lessons draw what lies in notebooks/results. A part that is done is
skipped, one that was cut off goes on where it stood: to measure anew, take another folder. The last lines are a short
table; the exit code is 1 where something is missing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from notebooks.tools.card import CUDA, attempt, card, machine

ROOT = Path(__file__).parents[2]
# In this order, with the seconds after which each is stopped; nine minutes in all. On an H200 with 16 cores a case of
# flash took 10 s, and the notebooks 560 s one after the other.
PARTS = {"tests": 130, "flash": 125, "memory": 65, "train": 50, "xray": 30, "notebooks": 140}


class Report:
    """The figures of one part, in folder/results.json beside the others'. What is there is not measured again."""

    def __init__(self, folder, part):
        self.path, self.part = Path(folder) / "results.json", part
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.data = json.loads(self.path.read_text()) if self.path.exists() else {"parts": {}}
            found = self.data.get("machine", {}).get("card", card())
            parts = self.data["parts"]
        except (ValueError, KeyError, AttributeError) as error:
            raise SystemExit(
                f"{self.path} is no results.json of this command ({error!r}): take another folder"
            ) from None
        if found != card():
            raise SystemExit(f"{self.path} has the figures of {found}, and this is {card()}: take another folder")
        self.mine = parts.setdefault(part, {"done": False, "figures": {}})
        self.figures = self.mine["figures"]
        self.missing = []
        self.lock = threading.Lock()  # notebooks are measured four at once

    def measure(self, name, function):
        """The figure of this name: the one that is there, or else what `function()` returns; None where it cannot."""
        if name not in self.figures:
            start = time.perf_counter()
            value = attempt(name, function)
            if value is None:
                self.missing.append(name)
                return None
            with self.lock:
                self.figures[name] = value
                self.save()
            print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
        return self.figures[name]

    def finish(self):
        """Next time this part is skipped, unless something could not be measured."""
        self.mine |= {"done": not self.missing, "missing": self.missing}
        self.save()

    def save(self):
        """In one step: what is cut off leaves the old file."""
        self.data["machine"] = self.data.get("machine") or machine() | {"command": "python -m tests.bench.gpu"}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)


def run_part(part, folder, tiny, limit, log):
    """Run it in a process of its own, with what it prints on the screen and in the log; stopped after its time."""
    command = [sys.executable, "-u", "-m", "tests.bench.gpu_parts", part, "--output", str(folder)] + ["--tiny"] * tiny
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    say(f"== {part}", log)
    environment = os.environ | {"PYTHONPATH": path}
    # A group of its own, so that what it starts (pytest, kernels of notebooks) ends with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    limit = limit or PARTS[part]
    start, timer = time.monotonic(), threading.Timer(limit, kill, [process])
    timer.start()
    try:
        for line in process.stdout:
            say(line.rstrip(), log)
        status = process.wait()
    finally:  # also at Ctrl-C
        timer.cancel()
        kill(process)
    if status:
        say(f"{part}: {'stopped after its time' if time.monotonic() - start >= limit else f'exit code {status}'}", log)


def kill(process):
    """End it, and on Linux its whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()


def say(line, log):
    """On the screen and in the log."""
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


def table(folder, parts):
    """The short table: what each part found, and whether all of it is there."""
    lines, complete = [], True
    for part in parts:
        mine = Report(folder, part).mine
        missing = ", ".join(mine.get("missing", [])) or "not all of it was measured"
        lines.append(f"{part}: {'done' if mine['done'] else missing}")
        lines += [f"    {name}: {short(figure)}" for name, figure in mine["figures"].items()]
        complete = complete and mine["done"]
    return lines, complete


def short(figure):
    """A figure's numbers in a line, without the lists of curves."""
    if isinstance(figure, dict):
        each = {name: short(part) for name, part in figure.items() if not isinstance(part, list)}
        return "; ".join(f"{name} {words}" for name, words in each.items() if words)
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results") / "gpu", help="folder (default: results/gpu)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--limit", type=float, help="seconds for each part (default: its own, nine minutes in all)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU too: does it run?")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        sys.exit("python -m tests.bench.gpu: PyTorch finds no CUDA GPU here: --tiny tries the same on the CPU")
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        for part in arguments.part:
            if Report(folder, part).mine["done"]:
                say(f"== {part}: done before", log)
                continue
            start = time.monotonic()
            run_part(part, folder, arguments.tiny, arguments.limit, log)
            say(f"== {part}: {time.monotonic() - start:.0f} s", log)
        lines, complete = table(folder, arguments.part)
        say("\n".join(["", *lines]), log)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
