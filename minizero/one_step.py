"""python -m minizero.memory: one training step of the demo model, its memory measured.

It prints the memory by phase and by module. Beside that it prints what others count: PyTorch's allocator, the operating
system, a GPU's allocator. The model is a plain module here; `python -m minizero.train` measures it on several ranks.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from minizero.cli import Parser, check_device, check_output, check_shapes, positive, run_command, write_files
from minizero.memory.allocators import compare, describe_gap, return_memory_at_once
from minizero.memory.estimate import estimate, free_memory
from minizero.memory.ledger import Ledger
from minizero.memory.tables import MIB, print_comparison, print_peak
from minizero.models.gpt import GPT, GPTConfig


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. `ValueError` if one is unknown or cannot be read."""
    shapes = GPTConfig()
    parser = Parser(prog="python -m minizero.memory", description="Measure the memory of one training step of a GPT.")
    add = parser.add_argument
    add("--batch-size", type=positive, default=2, metavar="N", help="sequences (default: %(default)s)")
    add(
        "--sequence-length",
        type=positive,
        default=shapes.sequence_length,
        metavar="N",
        help="(default: %(default)s)",
    )
    add("--width", type=positive, default=shapes.width, metavar="N", help="of a token (default: %(default)s)")
    add("--layers", type=positive, default=shapes.layers, metavar="N", help="blocks (default: %(default)s)")
    add("--heads", type=positive, default=shapes.heads, metavar="N", help="divide the width (default: %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--output", type=Path, metavar="FOLDER", help="where memory.png and memory.json go (default: nowhere)")
    return parser.parse_args(argv)


def prepare(config: GPTConfig, batch_size: int, device: torch.device) -> tuple[GPT, Any, Callable[[], None]]:
    """The model, its optimizer, and a function that runs one training step. It has run once already."""
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(config.vocabulary, (2, batch_size, config.sequence_length), generator=generator).to(device)

    def step() -> None:
        model(*tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure one step and print it. With --output, write memory.png and memory.json."""
    config = GPTConfig(256, options.sequence_length, options.width, options.layers, options.heads)
    check_shapes(config)
    check_device(options.device)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":  # a GPU's allocator raises an error; Linux would kill this process
        needed = estimate(config, 1, [0], options.batch_size, torch.float32)
        if needed > (free := free_memory()):
            raise ValueError(
                f"this needs about {needed / MIB:,.0f} MiB, this machine has {free / MIB:,.0f} MiB free: "
                "use a smaller --batch-size, --sequence-length, --width or --layers"
            )
    if options.output is not None:
        check_output(options.output)
    return_memory_at_once()  # before anything large exists
    model, optimizer, step = prepare(config, options.batch_size, device)
    with Ledger(model, optimizer) as ledger:
        step()
    with quiet():
        compared = compare(ledger, step, device)
    shapes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(config).items())
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{n_parameters:,} parameters, batch size {options.batch_size}: {shapes}", highlight=False)
    console.print(f"torch {torch.__version__}, AdamW, FP32, on {describe(device)}\n", highlight=False)
    print_peak(summary := ledger.summary(), console)
    print_comparison(compared, console)
    if options.output is not None:
        given = {"batch_size": options.batch_size, "device": describe(device), "torch": torch.__version__}
        numbers = {"config": vars(config) | given, "compared": compared} | summary
        figure = Figure(figsize=(16, 9), layout="constrained")
        ledger.plot(figure.subplots(), describe_gap(compared))
        figure.savefig(picture := io.BytesIO(), format="png", dpi=120)
        files = {"memory.json": json.dumps(numbers).encode(), "memory.png": picture.getvalue()}
        for path in write_files(files, options.output):
            console.print(f"wrote {path}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what is written to standard error: PyTorch's profiler announces itself there, past Python's sys.stderr."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def describe(device: torch.device) -> str:
    """The GPU's name, or "the CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for wrong input, or 130 after Ctrl-C."""
    return run_command(
        "python -m minizero.memory", lambda: run(parse(argv), Console()), "--batch-size, --width or --layers"
    )


if __name__ == "__main__":
    sys.exit(main())
