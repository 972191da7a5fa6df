"""The command line of the main job: what may be asked for, and checked before anything starts.

Each check raises `ValueError` with one line that says what was wrong and what to do. Memory is
estimated instead of tried: Linux kills a process that takes too much, and asks nobody first.
"""

import argparse
import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch

from minizero.memory import predict
from minizero.models.gpt import ATTENTIONS, RECOMPUTE, GPTConfig
from minizero.ranks.comm import RankFailed

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEXT = Path(__file__).parent / "data" / "text.txt"
MIB = 2**20


class Parser(argparse.ArgumentParser):
    """An error is one line, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def positive(text: str) -> int:
    """A count."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 999999999, not {text!r}")
    return int(text)


def seed(text: str) -> int:
    """What torch takes as a seed."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number of at most 18 digits, not {text!r}")
    return int(text)


def rate(text: str) -> float:
    """A positive finite number."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")


def attempt(run: Callable[[], None], smaller: str) -> tuple[int, str]:
    """Run a command: its exit status and the line that says why. 2: wrong input, 130: Ctrl-C; no traceback for either.

    smaller: the options to name where memory did not suffice.
    """
    try:
        run()
        return 0, ""
    except KeyboardInterrupt:
        return 130, "interrupted"
    except (ValueError, OSError) as error:
        return 2, f"error: {error}"
    except RuntimeError as error:
        if not too_large(error.__cause__ if isinstance(error, RankFailed) else error):
            raise
        return 2, f"error: this does not fit in memory: use a smaller {smaller}"


def too_large(error: BaseException | None) -> bool:
    """Whether memory or threads ran out. PyTorch has no type of its own for a CPU's memory."""
    words = ("allocate memory", "out of memory", "start new thread")
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(w in str(error) for w in words)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. `ValueError` where one is unknown or cannot be read."""
    parser = Parser(
        prog="python -m minizero.train",
        description="Train a small GPT under DDP and ZeRO 1 to 3, and measure memory and traffic.",
        epilog="torchrun --standalone --nproc-per-node N -m minizero.train [options] makes each rank a process.",
    )
    shapes = GPTConfig()
    add = parser.add_argument
    add("--stage", choices=["0", "1", "2", "3", "all"], default="all", help="0 is DDP (default: all, one by one)")
    add("--world-size", type=positive, metavar="N", help="ranks (default: 4; under torchrun, its own)")
    add("--steps", type=positive, default=40, metavar="N", help="training steps (default: %(default)s)")
    add("--batch-size", type=positive, default=2, metavar="N", help="sequences per rank (default: %(default)s)")
    add(
        "--sequence-length",
        type=positive,
        default=shapes.sequence_length,
        metavar="N",
        help="bytes in a sequence (default: %(default)s)",
    )
    add("--width", type=positive, default=shapes.width, metavar="N", help="of a token (default: %(default)s)")
    add("--layers", type=positive, default=shapes.layers, metavar="N", help="blocks (default: %(default)s)")
    add("--heads", type=positive, default=shapes.heads, metavar="N", help="divide the width (default: %(default)s)")
    add("--attention", choices=ATTENTIONS, default="naive", help="flash and tiled hold no scores (default: naive)")
    add(
        "--recompute",
        nargs="?",
        choices=list(RECOMPUTE),
        const="full",
        default="none",
        help="run blocks again in backward; selective: all but their matrix products (default: none)",
    )
    add("--dtype", choices=list(DTYPES), default="float32", help="to compute in; the masters stay float32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    # At 1e-3 this model, which has no warm-up, diverges for a step or two at any seed.
    add("--learning-rate", type=rate, default=3e-4, metavar="X", help="AdamW's (default: %(default)s)")
    add("--seed", type=seed, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="any UTF-8 file (default: the text that ships)")
    add("--output", type=Path, metavar="FOLDER", help="where PNG and JSON files go (default: nowhere)")
    return parser.parse_args(argv)


def read_text(path: Path, sequence_length: int) -> torch.Tensor:
    """The bytes of a UTF-8 file, as a tensor. `ValueError` where it is missing, not UTF-8 or too short."""
    try:
        raw = path.read_bytes()
        raw.decode()
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text: {path} is not UTF-8 (byte {error.start}): convert it, or give another file"
        ) from error
    if len(raw) <= sequence_length:
        raise ValueError(
            f"--text: {path} has {len(raw):,} bytes, one sequence needs {sequence_length + 1:,}: "
            "give a longer text or a smaller --sequence-length"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def check_output(folder: Path) -> None:
    """`ValueError` unless files can be written into `folder`; leaves nothing behind."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--output: cannot write to {folder}: {error.strerror}: give another folder") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def count_parameters(config: GPTConfig) -> tuple[int, int]:
    """How many parameters a GPT has, and how many of them outside its blocks, without building it."""
    root = (config.vocabulary + config.sequence_length + 1) * config.width
    return root + config.layers * (12 * config.width**2 + 2 * config.width), root


def estimate(config: GPTConfig, world_size: int, stages: Iterable[int], batch_size: int, dtype: torch.dtype) -> float:
    """Roughly the most bytes that a rank holds at once."""
    total, root = count_parameters(config)
    sequence, tokens = config.sequence_length, batch_size * config.sequence_length
    states = max(predict(total, world_size, stage, dtype=dtype)["total"] for stage in stages)
    # Tiled attention keeps no scores; the textbook's keeps them before and after softmax, and their masks.
    scores = batch_size * config.heads * sequence**2 * {"naive": 1, "reference": 3}.get(config.attention, 0)
    # A block keeps about 16 vectors for each token and its scores; backward makes two more of the scores.
    vector = tokens * config.width
    block = 16 * vector + scores
    # Recomputed, one block at a time is whole; the others keep their input, or the 10 that products give and take.
    kept = {"none": block, "full": vector, "selective": 10 * vector + scores}[config.recompute]
    activations = (config.layers - 1) * kept + block + 2 * scores + (sequence**2 if scores else 0)
    logits = 8 * tokens * config.vocabulary
    # While it is wrapped, a module exists twice. A thread has its stack, a block its Python objects.
    return max(states, 8 * total) + activations * dtype.itemsize + logits + MIB + 2**15 * config.layers


def free_memory() -> float:
    """Bytes that this machine, and the container around us, can still give; infinity where nothing tells."""
    free = math.inf
    with contextlib.suppress(OSError, ValueError, AttributeError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # the limit is a number, or the word "max"
        used = Path("/sys/fs/cgroup/memory.stat").read_text().split()[1]  # "anon", and how much of it
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) - int(used))
    return free


def check_memory(per_rank: float, ranks: int) -> None:
    """`ValueError` where `ranks` ranks on this machine need more than it has free."""
    if per_rank * ranks > (free := free_memory()):
        raise ValueError(
            f"{ranks:,} ranks need about {per_rank * ranks / MIB:,.0f} MiB, this machine has {free / MIB:,.0f} MiB "
            "free: use a smaller --batch-size, --sequence-length, --width, --layers or --world-size"
        )
