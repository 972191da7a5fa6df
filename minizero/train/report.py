"""The main job's report: its tables, the machine that it ran on, and its files.

Everything here reads one dictionary, `results`. The file results.json holds the same. So
`python -m minizero.train.report results.json` shows a run again without running it.

    machine                  cpu, cores, python, torch, device
    config                   the options of the run
    world_size, cards        ranks; GPUs that they compute on, if any
    n_parameters             of the model
    runs                     a list, with one dictionary for each stage:
        stage, name          0, "DDP"
        steps_before         how many steps an earlier run had done, whose state this one began with
        losses               of every step
        step_seconds         the median step's, of those that no ledger watched; None if a ledger watched all
        bytes_sent           per rank, in the last step
        bytes_sent_formula   what the formula predicts for that
        ranks                for each rank: `persistent` and `peak` bytes by category
        predicted            persistent bytes per rank, by category
        events               of all ranks in the last step, for --trace; not in the file, but in trace-DDP.json, …
        curve                rank 0 during one training step: the phase, the operator's number, and bytes by category

Measured and predicted never share a column. One MiB is 2^20 bytes.
"""

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minizero.cli import run_command, write_files
from minizero.pictures.memory import Results, describe_size, draw_curves, draw_losses, shown_categories
from minizero.pictures.shards import draw_boxes
from minizero.pictures.style import PREDICTED, mib
from minizero.pictures.timeline import chrome_trace
from minizero.simulate.clusters import GPUS
from minizero.simulate.shapes import gpt


def print_table(results: Results, console: Console) -> None:
    """Prints the run's machine and sizes, then three tables that fit 80 columns."""
    runs = results["runs"]
    seen = results["machine"]
    versions = f"Python {seen['python']}, torch {seen['torch']}, device {seen['device']}"
    options = ", ".join(f"{name} {value}" for name, value in results["config"].items())
    console.print(f"{seen['cpu']} ({seen['cores']} cores), {versions}", markup=False, highlight=False)
    console.print(f"{describe_size(results)}: {options}\n", markup=False, highlight=False)

    console.print("Persistent MiB per rank, between steps (largest rank)", style="italic")
    table = Table("category", "stage", box=box.SIMPLE_HEAD)
    table.add_column("measured", justify="right", style="bold")
    table.add_column("predicted", justify="right", style=PREDICTED["color"])
    held = [run["predicted"] for run in runs] + [rank["persistent"] for run in runs for rank in run["ranks"]]
    for category in [*shown_categories(held), "total"]:
        for run in runs:
            predicted = mib(run["predicted"].get(category, 0))
            table.add_row(category, run["name"], _largest(run, "persistent", category), predicted)
        table.add_section()
    console.print(table)

    console.print("Peak MiB per rank, measured (largest rank)", style="italic")
    table = Table("category", box=box.SIMPLE_HEAD)
    for run in runs:
        table.add_column(run["name"], justify="right", style="bold")
    for category in shown_categories(rank["peak"] for run in runs for rank in run["ranks"]):
        table.add_row(category, *(_largest(run, "peak", category) for run in runs))
    table.add_section()
    table.add_row("joint total", *(_largest(run, "peak", "total") for run in runs))
    console.print(table)
    console.print("The categories peak at different moments: they do not add up to the joint total.\n")

    console.print("One training step", style="italic")
    table = Table("stage", box=box.SIMPLE_HEAD)
    table.add_column("sent per rank,\nmeasured, MiB", justify="right", style="bold")
    table.add_column("sent per rank,\npredicted, MiB", justify="right", style=PREDICTED["color"])
    for heading in ("seconds,\nmeasured", "seconds\n/ DDP's", "final\nloss"):
        table.add_column(heading, justify="right", style="bold")
    for run in runs:
        sent = mib(run["bytes_sent"]), mib(run["bytes_sent_formula"])
        table.add_row(run["name"], *sent, *_seconds(run, runs[0]), f"{run['losses'][-1]:.6f}")
    console.print(table)
    for line in mfu(results):
        console.print(line, markup=False, highlight=False)
    console.print("Seconds: the median step here, where the ranks share the cores: no benchmark.")
    if any(run["step_seconds"] is None for run in runs):
        console.print("A dash: so few steps that a ledger watched, and slowed, each. Use more --steps.")
    if runs[0].get("steps_before", 0) + len(runs[0]["losses"]) == 1:
        console.print("The first step starts from fresh parameters: Zero1 and Zero2 send half as much.")


def save(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes results.json, curves.png, boxes.png and losses.png into `folder`, which it creates; returns their paths.

    `OSError` if that fails. Each file is then new and whole, or as it was before.
    """
    traces = {f"trace-{run['name']}.json": chrome_trace(run.pop("events", [])).encode() for run in results["runs"]}
    traces = {name: trace for name, trace in traces.items() if b'"X"' in trace}
    return write_files({"results.json": json.dumps(results).encode(), **_pictures(results), **traces}, Path(folder))


def mfu(results: Results) -> list[str]:
    """Model FLOPs utilization: a step's FLOPs, without what recompute runs again, over what the cards' peak allows.

    A line, or none if the card is not in `simulate.clusters.GPUS`, whose peak of float32 is TF32's.
    Chowdhery et al., 2022, "PaLM", appendix B.
    """
    device, config = results["machine"]["device"], results["config"]
    known = [gpu for name, gpu in GPUS.items() if all(part in device for part in name.split("-"))]
    peak = known[0].peak.get(config["dtype"]) if known and not ("PCIe" in device or "NVL" in device) else None
    if peak is None:
        return []
    shape = (config[name] for name in ("layers", "width", "heads", "sequence_length", "vocabulary"))
    flops = gpt(*shape).flops() * config["batch_size"] * results["world_size"] / results.get("cards", 1)
    shares = [
        f"{run['name']} {flops / run['step_seconds'] / peak:.1%}" for run in results["runs"] if run["step_seconds"]
    ]
    return [f"MFU, of {peak / 1e12:.0f} TFLOP/s by the data sheet: {', '.join(shares)}"] if shares else []


def _pictures(results: Results) -> dict[str, bytes]:
    pictures = {}
    for name, draw in {"curves.png": draw_curves, "boxes.png": draw_boxes, "losses.png": draw_losses}.items():
        draw(results).savefig(buffer := io.BytesIO(), format="png", dpi=120)
        pictures[name] = buffer.getvalue()
    return pictures


def _seconds(run: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[str, str]:
    """A run's seconds per step, and their ratio to DDP's; a dash for what was not measured. first: DDP's, if it ran."""
    mine = run["step_seconds"]
    ddp = first["step_seconds"] if first["stage"] == 0 else None
    return f"{mine:.3f}" if mine else "-", f"{mine / ddp:.2f}" if mine and ddp else "-"


def _largest(run: Mapping[str, Any], kind: str, category: str) -> str:
    """The largest rank's MiB. kind: "persistent" or "peak"."""
    return mib(max(rank[kind].get(category, 0) for rank in run["ranks"]))


def show(argv: list[str]) -> None:
    """Shows a saved run again: prints its tables, and draws its pictures beside it. `ValueError` if it is none."""
    if len(argv) != 1:
        raise ValueError("usage: python -m minizero.train.report results.json")
    path = Path(argv[0])
    try:
        results = json.loads(path.read_text())
        print_table(results, Console())
        pictures = _pictures(results)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no results.json of a run: {error}: give one that --output wrote") from error
    write_files(pictures, path.parent)


def main() -> int:
    """The command line: 0, or 2 if the file is none that can be shown, with one line on standard error."""
    return run_command("python -m minizero.train.report", lambda: show(sys.argv[1:]), "file")


if __name__ == "__main__":
    sys.exit(main())
