"""python -m minizero.xray: who holds the peak of a training step, and what would help."""

import argparse
import contextlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from minizero.cli import Parser, check_output, positive, run_command
from minizero.models.gpt import GPT, GPTConfig
from minizero.xray.case import case_of
from minizero.xray.hugging_face import from_config
from minizero.xray.report import Report


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. `ValueError` if one is unknown or cannot be read."""
    parser = Parser(prog="python -m minizero.xray", description="Where a training step's memory goes, for any model.")
    add = parser.add_argument
    add("make", nargs="?", metavar="FILE.py:make", help="a function that returns (model, inputs); without: our GPT")
    add("--hf", type=Path, metavar="CONFIG.json", help="a model of Hugging Face, by its configuration; no download")
    add("--batch", type=positive, default=2, metavar="N", help="samples, for --hf and our GPT (default: %(default)s)")
    add("--length", type=positive, metavar="N", help="tokens of a sample (default: 2048, our GPT's 64)")
    add("--ranks", type=positive, default=8, metavar="N", help="devices to shard over (default: %(default)s)")
    add("--fit", type=budget, metavar="80GiB", help="a device's memory: find the cheapest stack that fits it")
    add("--no-table", action="store_true", help="only the picture of the step, without the runs of each technique")
    add("--output", type=Path, metavar="FOLDER", help="where xray.png, .html and .json go (default: nowhere)")
    return parser.parse_args(argv)


def budget(text: str) -> float:
    """The type of --fit: bytes, as 80GiB, 500MiB or 80GB."""
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
    for unit, each in units.items():
        with contextlib.suppress(ValueError):
            if text.endswith(unit) and float(text.removesuffix(unit)) > 0:
                return float(text.removesuffix(unit)) * each
    raise argparse.ArgumentTypeError(f"must be a size such as 80GiB or 500MiB, not {text!r}")


def maker(options: argparse.Namespace) -> tuple[Callable[[], Any], str]:
    """The function that returns a model and its inputs, and a name for the report."""
    if options.hf is not None:
        return lambda: from_config(options.hf, options.batch, options.length or 2048), ""
    if options.make is None:
        config = GPTConfig(sequence_length=options.length or GPTConfig.sequence_length)
        return lambda: (
            GPT(config),
            torch.zeros(2, options.batch, config.sequence_length, dtype=torch.long).unbind(),
        ), ""
    file, _, name = options.make.rpartition(":")
    if not file or not Path(file).is_file():
        raise ValueError(f"{options.make!r}: expected FILE.py:make, a file and a function in it")
    sys.path.insert(0, str(Path(file).parent.resolve()))  # what lies beside the file can be imported
    if not callable(make := runpy.run_path(file).get(name)):
        raise ValueError(f"{file} has no function {name}(): it must return your model and its inputs")
    return make, Path(file).name


def run(options: argparse.Namespace, console: Console) -> None:
    """X-ray the model that the options name: print the tables, and write the files."""
    if options.output is not None:
        check_output(options.output)
    make, name = maker(options)
    report = Report(case_of(make), options.ranks, name)
    report.show(console)
    if not options.no_table:
        report.what_would_help(console)
    if options.fit is not None:
        report.fit(options.fit)
        report.show_fit(console)
    if options.output is not None:
        for path in report.save(options.output):
            console.print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for wrong input, or 130 after Ctrl-C."""
    return run_command("python -m minizero.xray", lambda: run(parse(argv), Console(width=100)), "model")


if __name__ == "__main__":
    sys.exit(main())
