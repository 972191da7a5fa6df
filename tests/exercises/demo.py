"""The command `make demo BREAK=forgot-divide`: what a wrong answer does to training (demo_run.py)."""

import argparse
import difflib
import re
import sys
from pathlib import Path


def names():
    """Of all wrong answers. The files are read, and not imported, which would load PyTorch for seconds."""
    files = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    return {name for text in files for name in re.findall(r'\bwrong\(\s*"([^"]+)"', text)}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.exercises.demo", description=__doc__)
    parser.add_argument("name", help="of a wrong answer: forgot-divide, or ddp_hook/forgot-divide")
    parser.add_argument("--steps", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder (default: %(default)s)")
    options = parser.parse_args(argv)
    name = options.name.rpartition("/")[2]
    if name not in (known := names()):
        near = " or ".join(difflib.get_close_matches(name, known, n=3))
        parser.error(f"there is no wrong answer {options.name!r}" + (f": did you mean {near}?" if near else ""))

    from rich.console import Console

    from minizero.cli import attempt
    from tests.exercises.demo_run import show

    status, message = attempt(lambda: show(options, Console()), "--steps")
    if status:
        print(f"python -m tests.exercises.demo: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
