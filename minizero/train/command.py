"""The command: its options, and the stages that it runs, on threads or as one rank of torchrun."""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from minizero import cli
from minizero.engines import STAGES
from minizero.memory.estimate import check_memory, estimate
from minizero.models.gpt import ATTENTIONS, RECOMPUTE, GPTConfig
from minizero.models.text import TEXT, read_text
from minizero.ranks.comm import Comm
from minizero.ranks.processes.torchrun import is_a_rank
from minizero.ranks.world import World
from minizero.train import report
from minizero.train.loop import Job, train


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. `ValueError` where one is unknown or cannot be read."""
    parser = cli.Parser(
        prog="python -m minizero.train",
        description="Train a small GPT under DDP and ZeRO 1 to 3, and measure memory and traffic.",
        epilog="torchrun --standalone --nproc-per-node N -m minizero.train [options] makes each rank a process.",
    )
    shapes = GPTConfig()
    add: Any = parser.add_argument
    count = {"type": cli.positive, "metavar": "N"}
    stages = [*map(str, range(len(STAGES))), "all"]
    add("--stage", choices=stages, default="all", help="0 is DDP (default: all, one by one)")
    add("--world-size", **count, help="ranks (default: 4; under torchrun or another launcher, its own)")
    add("--steps", **count, default=40, help="of training, in this run (default: %(default)s)")
    add("--batch-size", **count, default=2, help="sequences per rank (default: %(default)s)")
    add("--sequence-length", **count, default=shapes.sequence_length, help="bytes in a sequence (default: %(default)s)")
    add("--width", **count, default=shapes.width, help="of a token (default: %(default)s)")
    add("--layers", **count, default=shapes.layers, help="blocks (default: %(default)s)")
    add("--heads", **count, default=shapes.heads, help="divide the width (default: %(default)s)")
    add("--attention", choices=ATTENTIONS, default="naive", help="flash and tiled hold no scores (default: naive)")
    add(
        "--recompute",
        nargs="?",
        choices=list(RECOMPUTE),
        const="full",
        default="none",
        help="run blocks again in backward; selective: all but their matrix products (default: none)",
    )
    add("--dtype", choices=list(cli.DTYPES), default="float32", help="to compute in; the masters stay float32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    # At 1e-3 this model, which has no warm-up, diverges for a step or two at any seed.
    add("--learning-rate", type=cli.rate, default=3e-4, metavar="X", help="AdamW's (default: %(default)s)")
    add("--seed", type=cli.seed, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="any UTF-8 file (default: the text that ships)")
    add("--output", type=Path, metavar="FOLDER", help="where PNG and JSON files go (default: nowhere)")
    add("--trace", action="store_true", help="beside --output: the last step of all ranks, for ui.perfetto.dev")
    add("--save", type=Path, metavar="FOLDER", help="where the state goes: of one --stage, not of all")
    add("--save-every", **count, default=10, help="steps; a run that is killed leaves the last state (default: 10)")
    add(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="go on for --steps more from the state that --save left there. Repeat the options: they are not saved. "
        "--stage and --world-size may differ. If world size times batch size stays, so do the batches",
    )
    return parser.parse_args(argv)


def run(options: argparse.Namespace, console: Console) -> None:
    """Run the stages that the options ask for, on threads or as one rank of torchrun; report on rank 0."""
    shapes = (256, options.sequence_length, options.width, options.layers, options.heads)
    config = GPTConfig(*shapes, options.seed, options.attention, options.recompute)
    dtype = cli.DTYPES[options.dtype]
    state = options.save, options.resume, options.save_every
    job = Job(config, options.steps, options.batch_size, options.learning_rate, dtype, *state, options.trace)
    stages = range(4) if options.stage == "all" else [int(options.stage)]
    processes = is_a_rank()
    world_size = int(os.environ["WORLD_SIZE"]) if processes else options.world_size or 4
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if processes else world_size
    if processes and options.world_size not in (None, world_size):
        raise ValueError(f"--world-size {options.world_size}: the launcher started {world_size} ranks: leave it out")
    if options.save is not None and len(stages) > 1:
        raise ValueError(f"--save {options.save}: it holds the state of one stage: say which, for example --stage 3")
    if options.trace and options.output is None:
        raise ValueError("--trace: its files need a place: add --output FOLDER")
    if config.width % config.heads:
        raise ValueError(f"--width {config.width} must be divisible by --heads {config.heads}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA GPU here: use --device cpu")
    text = read_text(options.text, config.sequence_length)
    if options.device == "cpu" or not torch.cuda.is_available():  # a GPU refuses what is too large by itself
        check_memory(estimate(config, world_size, stages, job.batch_size, job.dtype), on_this_machine)
    for option in ("output", "save"):
        if (folder := getattr(options, option)) is not None and own_rank() == 0:
            cli.check_output(folder, f"--{option}")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // on_this_machine))

    columns = "{task.fields[name]}", BarColumn(20), MofNCompleteColumn(), "{task.fields[status]}"
    with contextlib.ExitStack() as stack:
        if processes:
            comm = stack.enter_context(Comm.from_process_group())
            device, run_stage = comm.device, lambda *given: train(comm, *given)
        else:
            world = World(world_size, options.device)
            device, run_stage = world.device, lambda *given: world.run(train, *given)[0]
        if options.device not in ("auto", device.type):
            raise ValueError(f"--device {options.device}: under torchrun the ranks run on {device.type}: leave it out")
        progress = stack.enter_context(Progress(*columns, console=console, disable=own_rank() > 0))
        runs, interrupted = [], False
        for stage in stages:
            task = progress.add_task("", total=job.steps, name=STAGES[stage].__name__.ljust(5), status="")

            def show(step: int, loss: float, speed: float, held: int, task: Any = task) -> None:
                status = f"loss {loss:.3f}  {speed:6,.0f} tokens/s  peak {held / 2**20:5.1f} MiB per rank"
                progress.update(task, completed=step, status=status)

            try:
                runs.append(run_stage(stage, text, job, show))
            except KeyboardInterrupt:  # of a user who has seen enough: what is finished is reported
                if not runs:
                    raise
                interrupted = True
                break
    if own_rank() > 0:
        return
    given = {"batch_size": job.batch_size, "steps": job.steps, "learning_rate": job.learning_rate}
    results = {
        "machine": cli.machine(device),
        "config": dataclasses.asdict(config) | given | {"dtype": options.dtype},
        "world_size": world_size,
        "cards": world_size if processes else min(world_size, torch.cuda.device_count()),
        "n_parameters": config.count_parameters()[0],
        "runs": runs,
    }
    report.print_table(results, console)
    if options.save is not None:
        done = runs[0]["steps_before"] + job.steps
        console.print(f"saved the state after step {done}: go on with --resume {options.save}", markup=False)
    if options.output is not None:
        for path in report.save(results, options.output):
            console.print(f"wrote {path}")
    if interrupted:
        raise KeyboardInterrupt


def own_rank() -> int:
    """Which process of a launcher this is; 0 also where there is none."""
    return int(os.environ["RANK"]) if is_a_rank() else 0


def main(argv: list[str] | None = None) -> int:
    """The command line: 0, or 2 where the input was wrong, 130 after Ctrl-C, with one line on standard error."""
    smaller = "--batch-size, --sequence-length, --width, --layers or --world-size"
    status, message = cli.attempt(lambda: run(parse(argv), Console()), smaller)
    if not status:
        return 0
    if own_rank() > 0:  # torchrun ends this process as soon as rank 0 has said the same
        time.sleep(5)
        message = f"rank {own_rank()}: {message}"
    print(f"python -m minizero.train: {message}", file=sys.stderr)
    return status
