"""Where a training step's memory goes, for any model, and what would help.

A file of yours, FILE.py, has a function make() that returns (model, inputs): model(*inputs), or model(**inputs) if they
are a dict, must give the loss, or an object with .loss. The batch is one rank's. Or make() returns (model, inputs,
optimizer), or (model, step), where step() is a step of your own loop: model and optimizer may be globals of the file.
What is made for "cuda" is on the card, the rest on the host. FILE.py is imported, so what trains in it must stand in
step(), or under: if __name__ == "__main__":
"""

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from flash.gpus import GPUS
from minizero.cli import Parser, check_output, positive, run_command
from minizero.models.gpt import GPT, GPTConfig
from minizero.xray.card import card_of
from minizero.xray.case import NotPossible, case_of, reason, refusing_own
from minizero.xray.hugging_face import from_config
from minizero.xray.recorded import read
from minizero.xray.report import Report, size

FOUR_LINES = (
    "a script that trains as it is read needs four lines: def step(): above the body of its loop; if __name__ == "
    '"__main__": above the loop, which calls step(); def make(): return model, step'
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. `ValueError` if one is unknown or cannot be read."""
    parser = Parser(prog="python -m minizero.xray", description=__doc__)
    add = parser.add_argument
    add("make", nargs="?", metavar="FILE.py:make", help="a model of your own, see above; without: the demo's GPT")
    add("--hf", type=Path, metavar="CONFIG.json", help="a model of transformers, by its configuration; no download")
    add("--snapshot", type=Path, metavar="OOM.pickle", help="what torch.cuda.memory._dump_snapshot wrote on a GPU")
    add("--batch", type=positive, metavar="N", help="samples, for --hf and the demo's GPT (default: 2)")
    add("--length", type=positive, metavar="N", help="tokens, for --hf (default: 2048, or all) and the GPT (64)")
    add("--card", default="h100", help="the GPU: h200, a100, l4, t4, 4090 …; cpu: as on a CPU (default: h100)")
    add("--optimizer", default="AdamW", metavar="NAME", help="of torch.optim, such as sgd (default: AdamW)")
    add("--ranks", type=positive, default=1, metavar="N", help="how many cards you have, for ZeRO's rows (default: 1)")
    bytes_of: dict[str, Any] = {"type": budget, "nargs": "?", "const": 0.0, "metavar": "80GiB"}
    add("--fit", **bytes_of, help="the memory of each, by default the card's: find the cheapest stack that fits")
    add("--largest", **bytes_of, help="the same: find the largest batch that fits")
    add("--taken", type=budget, default=0.0, metavar="3GiB", help="what other processes have of it, for these two")
    add("--no-table", action="store_true", help="only the picture of the step, without the runs of each technique")
    add("--output", type=Path, metavar="FOLDER", help="where xray.html and the other files go (default: nowhere)")
    options = parser.parse_args(argv)
    asked = {name for name, value in vars(options).items() if value != parser.get_default(name)}
    if options.snapshot and asked - {"snapshot", "output"}:
        raise ValueError("--snapshot: a recorded run has its own model, step and card: only --output goes with it")
    if options.make and (options.hf or options.batch or options.length):
        raise ValueError("--hf, --batch and --length are not for FILE.py:make: make() has chosen model and batch")
    return options


def budget(text: str) -> float:
    """The type of --fit: bytes, as 80GiB, 500MiB or 80GB."""
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
    if (match := re.fullmatch(r"(\d+\.?\d*)([GM]i?B)", text)) and float(match[1]) > 0:
        return float(match[1]) * units[match[2]]
    raise argparse.ArgumentTypeError(f"must be a size such as 80GiB or 500MiB, not {text!r}")


def optimizer_of(name: str) -> Any:
    """The class of torch.optim with this name, in whatever case."""
    kinds = {kind.lower(): kind for kind in dir(torch.optim) if isinstance(getattr(torch.optim, kind), type)}
    if name.lower() not in kinds or name.lower() == "optimizer":
        raise ValueError(f"--optimizer: torch.optim has no {name}: use one of {', '.join(kinds.values())}")
    return getattr(torch.optim, kinds[name.lower()])


def maker(options: argparse.Namespace) -> Callable[[], Any]:
    """The function that returns a model and its inputs."""
    batch = options.batch or 2
    if options.hf is not None:
        return lambda: from_config(options.hf, batch, options.length)
    if options.make is None:
        config = GPTConfig(sequence_length=options.length or GPTConfig.sequence_length)
        tokens = (2, batch, config.sequence_length)
        return lambda: (GPT(config), torch.zeros(tokens, dtype=torch.long).unbind())
    file, colon, name = options.make.rpartition(":")
    if colon and not Path(file).is_file():
        raise ValueError(f"{options.make!r}: expected FILE.py:make, a file that exists and a function in it")
    file, name = (file, name) if colon else (options.make, "make")
    sys.path.insert(0, str(Path(file).parent.resolve()))  # what lies beside the file can be imported

    def import_and_make() -> Any:
        with mock.patch.object(sys, "argv", [file]):  # the user's parser shall not read ours
            try:
                with refusing_own(FOUR_LINES):
                    made = runpy.run_path(file).get(name)
            except (Exception, SystemExit) as error:
                kind = NotPossible if isinstance(error, NotPossible) else ImportError
                raise kind(f"{file} cannot be imported: {reason(error)}") from error
            if not callable(made):
                raise NotPossible(f"{file} has no function {name}(): {FOUR_LINES}")
            return made()

    return import_and_make


def run(options: argparse.Namespace, console: Console) -> None:
    """X-ray the model that the options name: print the tables, and write the files."""
    if options.output is not None:
        check_output(options.output)
    if options.snapshot is not None:
        recorded = read(options.snapshot)
        recorded.show(console)
        for path in recorded.save(options.output) if options.output else ():
            console.print(f"wrote {path}, which pytorch.org/memory_viz shows in colour")
        return
    name = Path(options.make.rpartition(":")[0]).name if options.make else ""
    card = None if options.card == "cpu" else card_of(options.card)
    if card is None and 0 in (options.fit, options.largest):
        raise ValueError("--fit, --largest: a CPU has no memory of its own: give a size, such as 80GiB")
    whole = GPUS[card].usable * 2**30 if card else 0.0  # where no size is given

    def room(given: float | None) -> float | None:
        """What a plan may use. `ValueError` if others have it all."""
        if given is not None and (given or whole) <= options.taken:
            raise ValueError(f"--taken: {size(options.taken)} of {size(given or whole)} leaves nothing")
        return None if given is None else (given or whole) - options.taken

    fit, largest = room(options.fit), room(options.largest)
    case = case_of(maker(options), optimizer_of(options.optimizer), card)
    if largest and case.loops:
        raise ValueError("--largest: make() has returned a loop, which makes its own batch: return (model, inputs)")
    report = Report(case, options.ranks, name)
    report.show(console)
    if not options.no_table:
        report.what_would_help(console)
    if largest:
        for plan, samples in report.largest(largest).items():
            console.print(f"The largest batch that fits {size(largest)}, {plan}: {samples}", highlight=False)
    if fit:
        report.fit(fit)
        report.show_fit(console)
    for path in report.save(options.output) if options.output else ():
        console.print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for wrong input, or 130 after Ctrl-C."""
    return run_command("python -m minizero.xray", lambda: run(parse(argv), Console(width=100)), "model")


if __name__ == "__main__":
    sys.exit(main())
