"""The main job: train a small GPT on real text under DDP and ZeRO 1, 2, 3, and measure each.

    python -m minizero.train                                    4 ranks as threads, every stage
    torchrun --nproc-per-node 4 -m minizero.train --stage 3     each rank a process

It ends with a table and, with --output, with pictures and their numbers. The loop in `train` is the
one that every PyTorch user knows; only the line that wraps the model differs between the stages.
"""

import argparse
import contextlib
import dataclasses
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from minizero import report
from minizero.collectives import all_gather, all_reduce
from minizero.comm import Comm, RankFailed
from minizero.ddp import DDP
from minizero.gpt import GPT, GPTConfig
from minizero.memory import CATEGORIES, Ledger, predict, predict_sent
from minizero.world import World
from minizero.zero1 import Zero1
from minizero.zero2 import Zero2
from minizero.zero3 import Zero3

STAGES = (DDP, Zero1, Zero2, Zero3)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEXT = Path(__file__).parent / "data" / "text.txt"


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run; `batch_size` sequences per rank."""

    config: GPTConfig
    steps: int
    batch_size: int
    learning_rate: float
    dtype: torch.dtype


def batches(text: torch.Tensor, job: Job, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each step's batch: x and y, (batch_size, sequence_length), y one byte ahead of x."""
    length = job.config.sequence_length
    generator = torch.Generator().manual_seed(job.config.seed)  # every rank draws the same, and takes its part
    while True:
        starts = torch.randint(len(text) - length, (world_size, job.batch_size), generator=generator)[rank]
        windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]


def train(comm: Comm, stage: int, text: torch.Tensor, job: Job, show: Callable[..., None]) -> dict[str, Any]:
    """Train under one stage, and measure: returns a run as `report` describes it.

    A ledger watches every other step, on one rank at a time; the steps between give the time.
    """
    model = STAGES[stage](GPT(job.config), comm, dtype=None if job.dtype == torch.float32 else job.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    always = job.steps < 2 * comm.size  # too few steps for the ranks to take turns
    losses, seconds = [], []
    for step, (x, y) in zip(range(job.steps), batches(text, job, comm.rank, comm.size)):
        sent, start = comm.bytes_sent, time.perf_counter()
        watched = always or step % (2 * comm.size) == 2 * comm.rank
        with Ledger(model, optimizer) if watched else contextlib.nullcontext() as ledger:
            loss = model(x.to(comm.device), y.to(comm.device))
            loss.backward()
            optimizer.step()
            if ledger is not None:
                persistent = ledger.current
            optimizer.zero_grad()

        sent = comm.bytes_sent - sent
        if ledger is not None:
            measured = ledger
        if always or step % 2 == 1:
            seconds.append(time.perf_counter() - start)
        losses.append(all_reduce(loss.detach(), comm, "mean").item())
        tokens = comm.size * job.batch_size * job.config.sequence_length
        if comm.rank == 0:
            show(step + 1, losses[-1], tokens / (time.perf_counter() - start), measured.peak["total"])
    return {
        "stage": stage,
        "name": STAGES[stage].__name__,
        "losses": losses,
        "step_seconds": median(seconds),
        "bytes_sent": sent,
        "ranks": gather_bytes(comm, persistent, measured.peak),
        "curve": {"phase": [s.phase for s in measured.curve]}
        | {key: [sample[key] for sample in measured.curve] for key in (*CATEGORIES, "total")},
        **predictions(model.module, comm.size, stage, job),
    }


def gather_bytes(comm: Comm, persistent: dict[str, int], peak: dict[str, int]) -> list[dict[str, dict[str, int]]]:
    """Every rank's bytes by category."""
    keys = (*CATEGORIES, "total")
    mine = torch.tensor([[held[key] for key in keys] for held in (persistent, peak)], device=comm.device)
    rows = all_gather(mine, comm).view(comm.size, 2, len(keys)).tolist()
    return [dict(zip(("persistent", "peak"), (dict(zip(keys, row)) for row in rank))) for rank in rows]


def predictions(module: torch.nn.Module, world_size: int, stage: int, job: Job) -> dict[str, Any]:
    """What the formulas say of one rank: persistent bytes, and bytes sent in a step."""
    sizes = GPT(job.config)
    total = sum(p.numel() for p in sizes.parameters())
    root = total - sum(p.numel() for p in sizes.blocks.parameters())
    sent = predict_sent(total, world_size, stage, n_root=root, bytes_each=job.dtype.itemsize)
    return {"predicted": predict(total, world_size, stage, dtype=job.dtype), "bytes_sent_formula": sent}


def read_text(path: Path, sequence_length: int) -> torch.Tensor:
    """The bytes of a UTF-8 file, as a tensor. `ValueError` where it is missing, empty, not UTF-8 or too short."""
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


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
    }


class Parser(argparse.ArgumentParser):
    """An error is one line, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m minizero.train", description="Train a small GPT under DDP and ZeRO, and measure it."
    )
    shapes = GPTConfig()

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
        return int(text)

    def rate(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < float(text) < float("inf"):
                return float(text)
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")

    parser.add_argument("--stage", choices=["0", "1", "2", "3", "all"], default="all", help="0 is DDP (default: all)")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks (default: 4; under torchrun its own)")
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="default: 40")
    parser.add_argument("--batch-size", type=positive, default=2, metavar="N", help="sequences per rank (default: 2)")
    parser.add_argument(
        "--sequence-length", type=positive, default=shapes.sequence_length, metavar="N", help="bytes (default: 64)"
    )
    parser.add_argument("--width", type=positive, default=shapes.width, metavar="N", help="default: 256")
    parser.add_argument("--layers", type=positive, default=shapes.layers, metavar="N", help="default: 4")
    parser.add_argument("--heads", type=positive, default=shapes.heads, metavar="N", help="default: 4")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="computing dtype; masters stay FP32")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--learning-rate", type=rate, default=1e-3, metavar="X", help="AdamW's (default: 0.001)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the parameters and the batches (default: 0)"
    )
    parser.add_argument(
        "--text", type=Path, default=TEXT, metavar="FILE", help="any UTF-8 file (default: the text that ships)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where PNG and JSON files go (default: nowhere)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, console: Console) -> None:
    """Run the stages that the options ask for, on threads or as one rank of torchrun; report on rank 0."""
    config = GPTConfig(256, options.sequence_length, options.width, options.layers, options.heads, options.seed)
    if config.width % config.heads:
        raise ValueError(f"--width {config.width} must be divisible by --heads {config.heads}")
    job = Job(config, options.steps, options.batch_size, options.learning_rate, DTYPES[options.dtype])
    text = read_text(options.text, config.sequence_length)
    if options.output is not None:
        check_output(options.output)
    stages = range(4) if options.stage == "all" else [int(options.stage)]
    processes = "TORCHELASTIC_RUN_ID" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if processes else options.world_size or 4
    if processes and options.world_size not in (None, world_size):
        raise ValueError(f"--world-size {options.world_size}: torchrun started {world_size} ranks: leave it out")
    if world_size * job.batch_size > len(text) - config.sequence_length:
        raise ValueError(
            f"--batch-size {job.batch_size} on {world_size} ranks: the text has fewer sequences: use a smaller one"
        )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    columns = "{task.fields[name]}", BarColumn(20), MofNCompleteColumn(), "{task.fields[status]}"
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(Comm.from_process_group()) if processes else None
        world = None if processes else World(world_size, options.device)
        device = comm.device if comm else world.device  # type: ignore[union-attr]
        progress = stack.enter_context(Progress(*columns, console=console, disable=comm is not None and comm.rank > 0))
        runs = []
        for stage in stages:
            task = progress.add_task("", total=job.steps, name=STAGES[stage].__name__.ljust(5), status="")

            def show(step: int, loss: float, speed: float, held: int, task: Any = task) -> None:
                status = f"loss {loss:.3f}  {speed:6,.0f} tokens/s  peak {held / 2**20:5.1f} MiB per rank"
                progress.update(task, completed=step, status=status)

            if comm is not None:
                runs.append(train(comm, stage, text, job, show))
            else:
                runs.append(world.run(train, stage, text, job, show)[0])  # type: ignore[union-attr]
    if comm is not None and comm.rank > 0:
        return
    results = {
        "machine": machine(device),
        "config": dataclasses.asdict(config)
        | {"batch_size": job.batch_size, "steps": job.steps, "dtype": options.dtype},
        "world_size": world_size,
        "n_parameters": sum(p.numel() for p in GPT(config).parameters()),
        "runs": runs,
    }
    report.print_table(results, console)
    if options.output is not None:
        for path in report.save(results, options.output):
            console.print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """The command line: 0 where all went well, 2 with one line on standard error where the input was wrong."""
    try:
        run(parse(argv), Console())
    except (ValueError, OSError) as error:
        print(f"python -m minizero.train: error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        cause = error.__cause__
        if not isinstance(cause, RuntimeError) or "memory" not in str(cause).lower():
            raise
        print(
            "python -m minizero.train: error: this does not fit in memory: use a smaller --batch-size, "
            "--sequence-length, --width or --layers, or a higher --stage",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
