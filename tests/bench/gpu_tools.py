"""What the GPU benchmarks share: a report that keeps every figure as soon as it is there."""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

from notebooks.tools.card import CUDA, attempt, card, machine


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

    def finish(self, **more):
        """Next time this part is skipped, unless something could not be measured."""
        self.mine |= {"done": not self.missing, "missing": self.missing} | more
        self.save()

    def save(self):
        """In one step: what is cut off leaves the old file."""
        self.data["machine"] = self.data.get("machine") or machine() | {"command": "python -m tests.bench.gpu"}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)


def picture(path, draw, *arguments):
    """Save the figure that `draw` returns as a PNG. A line that says so where there is no matplotlib."""
    try:
        draw(*arguments).savefig(path, dpi=110)
    except ImportError as error:
        print(f"    {path.name} is not drawn: {error}")


def main(part, description, run):
    """The command line of one part: `run(report, tiny)` measures, draws, and returns the lines of its short table."""
    name = sys.modules["__main__"].__spec__.name
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--output", type=Path, default=Path("results") / "gpu", help="folder (default: results/gpu)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU too: does it run?")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        sys.exit(f"{parser.prog}: this needs a CUDA GPU, and PyTorch finds none here: --tiny tries it on the CPU")
    report = Report(arguments.output, part)
    report.finish(headlines=run(report, arguments.tiny))
