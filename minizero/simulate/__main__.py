"""The simulator's command line: one step, a search, or the published figures beside the simulated ones.

python -m minizero.simulate --model gpt-175b --cluster a100-80 --gpus 512 --recompute --batch-size 2
python -m minizero.simulate --model mpt-7b --gpus 16 --batch-size 8 --search
python -m minizero.simulate --published
python -m minizero.simulate --model mpt-7b --gpus 16 --measured lab/lab.json
"""

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from minizero.cli import DTYPES, Parser, check_output, number, positive, run_command, write_files
from minizero.models.gpt import RECOMPUTE
from minizero.pictures.timeline import chrome_trace
from minizero.simulate import tables
from minizero.simulate.clusters import CLUSTERS, choose
from minizero.simulate.machine import with_measured
from minizero.simulate.remedies import remedies
from minizero.simulate.search import frontier, search
from minizero.simulate.shapes import MODELS, Model, gpt, model
from minizero.simulate.step import Prediction, simulate
from minizero.simulate.strategy import Constants, Strategy


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. Raises `ValueError` if one is unknown or cannot be read."""
    parser = Parser(
        prog="python -m minizero.simulate",
        description="Memory, traffic and time of one training step on a cluster, predicted.",
        epilog=f"Models: {', '.join(MODELS)}. Clusters: {', '.join(CLUSTERS)}.",
    )
    usual = Constants()
    add: Any = parser.add_argument
    count, share = {"type": positive, "metavar": "N"}, number(float, 0, 1, "a number from 0 to 1")
    part = {"type": share, "metavar": "X"}
    add("--model", default="mpt-30b", metavar="NAME", help="one of those below (default: %(default)s)")
    add("--layers", **count, help="with --width and --heads: a GPT of another shape")
    add("--width", **count, help="of a token")
    add("--heads", **count, help="divide the width")
    add("--vocabulary", **count, default=50257, help="of that GPT; minizero.train's is 256 (default: %(default)s)")
    add("--sequence-length", **count, help="tokens (default: the model's usual)")
    add("--cluster", default="a100-80", metavar="NAME", help="one of those below (default: %(default)s)")
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="lab.json of python -m minizero.lab: its link, not the data sheet's",
    )
    add("--gpus", **count, default=512, help="whole hosts, or part of one (default: %(default)s)")
    add("--stage", type=int, choices=range(4), default=3, help="of ZeRO; 0 is DDP (default: %(default)s)")
    add("--sharding-factor", type=positive, metavar="F", help="divides the GPUs (default: all of them)")
    add("--batch-size", **count, default=1, help="sequences of a GPU at a time (default: 1)")
    add("--micro-batches", **count, default=1, help="before the optimizer's step (default: 1)")
    add("--global-batch-size", **count, help="sequences of all GPUs in a step, instead of --batch-size")
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="to compute in (default: %(default)s)")
    add("--recompute", nargs="?", choices=list(RECOMPUTE), const="full", default="none", help="(default: none)")
    add("--flash", action="store_true", help="attention that keeps no scores")
    add("--offload", action="store_true", help="shards and optimizer on the CPU")
    add("--efficiency", **part, default=usual.efficiency, help="share of the peak (default: %(default)s)")
    add("--interference", **part, default=usual.interference, help="see step.py (default: none)")
    add("--jitter", **part, default=usual.jitter, help="see step.py (default: none)")
    add("--search", action="store_true", help="find the best stage, factor, micro-batch, recompute and offload")
    add("--published", action="store_true", help="others' figures beside the simulator's, fitted and predicted")
    add("--output", type=Path, metavar="FOLDER", help="where step.png, step.json and trace.json go (default: nowhere)")
    return parser.parse_args(argv)


def choose_model(options: argparse.Namespace) -> Model:
    """The known model of that name, or a GPT of the shape that the options give."""
    shape = (options.layers, options.width, options.heads)
    if any(shape):
        if not all(shape):
            raise ValueError("--layers, --width and --heads go together: give all three")
        return gpt(*shape, options.sequence_length or 2048, options.vocabulary)
    return model(options.model, options.sequence_length)


def batch_size(options: argparse.Namespace) -> int:
    """Sequences in a micro-batch of one GPU. Raises `ValueError` if the global batch does not divide."""
    if options.global_batch_size is None:
        return int(options.batch_size)
    parts = options.gpus * options.micro_batches
    if options.global_batch_size % parts:
        raise ValueError(
            f"--global-batch-size {options.global_batch_size:,} is not a multiple of the {parts:,} micro-batches of "
            f"{options.gpus:,} GPUs: use a multiple of {parts:,}"
        )
    return int(options.global_batch_size // parts)


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulates what the options ask for, prints it, and saves it if they name a folder."""
    if options.output is not None:
        check_output(options.output)
    if options.published:
        tables.print_published(console)
        return
    chosen = choose_model(options)
    cluster = choose(CLUSTERS, options.cluster, "cluster")
    if options.measured is not None:
        cluster = with_measured(cluster, options.measured)
        for where, link in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
            speed = f"α {1e6 * link.latency:.1f} µs a hop, β {link.bandwidth / 1e9:.2f} GB/s for a GPU"
            console.print(f"{where}: {speed} ({link.source})", markup=False, highlight=False)
    constants = Constants(options.efficiency, options.interference, options.jitter)
    size = batch_size(options)
    if options.search:
        fixed = {"dtype": options.dtype, "flash": options.flash}
        steps = search(chosen, cluster, options.gpus, size * options.micro_batches, constants, **fixed)
        tables.print_search(steps, frontier(steps), console)
        step = steps[0]
    else:
        names = ("stage", "micro_batches", "sharding_factor", "dtype", "recompute", "flash", "offload")
        plan = Strategy(options.gpus, batch_size=size, **{name: getattr(options, name) for name in names})
        step = simulate(chosen, cluster, plan, constants)
    tables.print_step(step, console)
    if not step.fits:
        tables.print_remedies(remedies(step, constants), console)
    if options.output is not None:
        for path in save(step, options.output):
            console.print(f"wrote {path}")


def save(step: Prediction, folder: Path) -> list[Path]:
    """Writes step.png, step.json (the numbers) and trace.json (the timeline, for Chrome's or Perfetto's viewer)."""
    numbers = {"model": step.model.name, "parameters": step.model.parameters, "gpu": step.cluster.gpu.name}
    numbers |= {"plan": dataclasses.asdict(step.plan), "memory": step.memory, "fits": step.fits}  # type: ignore[dict-item]
    names = ("seconds", "exposed_seconds", "tokens_per_second", "tflops", "sent", "sent_between")
    numbers |= {name: getattr(step, name) for name in names}
    tables.draw_step(step).savefig(picture := io.BytesIO(), format="png", dpi=100)
    files = {"step.png": picture.getvalue(), "trace.json": chrome_trace(step.events()).encode()}
    return write_files(files | {"step.json": json.dumps(numbers).encode()}, folder)


def main(argv: list[str] | None = None) -> int:
    """Returns 0; with one line on standard error 2 if the input was wrong, and 130 after Ctrl-C."""
    return run_command("python -m minizero.simulate", lambda: run(parse(argv), Console()), "--layers")


if __name__ == "__main__":
    sys.exit(main())
