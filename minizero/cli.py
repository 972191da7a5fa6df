"""What command lines share: the parser, what an option may be, how a command ends, and the files that it writes.

Each check raises `ValueError` with one line that says what was wrong and what to do.
"""

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from minizero.ranks.errors import RankFailed

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Parser(argparse.ArgumentParser):
    """Raises `ValueError` for a wrong option, instead of printing the usage and leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def number(read: Callable[[str], Any], low: float, high: float, words: str) -> Callable[[str], Any]:
    """The type of an option that is a number from `low` to `high`; the error says what it must be, in `words`."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := read(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")

    return parse


def whole(text: str) -> int:
    """A number that is written with digits alone; -1 for another."""
    return int(text) if text.isdecimal() else -1


positive = number(whole, 1, 999_999_999, "a whole number from 1 to 999999999")  # counts something
seed = number(whole, 0, 10**18 - 1, "a whole number of at most 18 digits")
rate = number(float, sys.float_info.min, 1e30, "a positive number up to 1e30")  # an optimizer multiplies by it in FP32


def attempt(run: Callable[[], None], smaller: str) -> tuple[int, str]:
    """Run a command; returns its exit status, and one line that says why it failed, instead of a traceback.

    0: it succeeded. 2: wrong input, or too little memory. 130: Ctrl-C. Any other error is raised.
    smaller: the options to suggest if memory runs out.
    """
    try:
        run()
        return 0, ""
    except KeyboardInterrupt:
        return 130, "interrupted"
    except (ValueError, OSError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else error
        if isinstance(cause, ValueError | OSError):
            return 2, f"error: {cause}"
        # PyTorch has no error class of its own for a CPU's memory: only the words tell.
        words = ("allocate memory", "out of memory", "start new thread")
        if isinstance(cause, MemoryError) or any(word in str(cause) for word in words):
            return 2, f"error: this does not fit in memory: use a smaller {smaller}"
        raise


def run_command(command: str, run: Callable[[], None], smaller: str) -> int:
    """`attempt` a command, and print the line on standard error; returns the exit status.

    command: the name that the line begins with.
    """
    status, message = attempt(run, smaller)
    if status:
        print(f"{command}: {message}", file=sys.stderr)
    return status


def check_output(folder: Path, option: str = "--output") -> None:
    """`ValueError` unless files can be written into `folder`. The check leaves nothing behind."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{option}: cannot write to {folder}: {error.strerror}: give another folder") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures are measured on: cpu, cores, python, torch, and the device's name."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), **versions, "device": name}


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Writes files, by name, into `folder`, which it creates; returns their paths.

    It writes all of them beside their places first, and then moves them: a full disk must not leave half a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as beside:
        for name, content in files.items():
            try:
                Path(beside, name).write_bytes(content)
            except OSError as error:  # a full disk's error names no path
                raise OSError(f"cannot write {folder / name}: {error.strerror or error}") from error
        for name in files:
            os.replace(Path(beside, name), folder / name)
    return [folder / name for name in files]
