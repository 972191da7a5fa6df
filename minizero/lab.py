"""A cluster measured: how fast do its ranks talk? Start it as the training will be started.

torchrun --standalone --nproc-per-node 4 -m minizero.lab --output lab

It times all-gather, reduce-scatter and all-reduce, our rings beside PyTorch's own (gloo, or NCCL on GPUs), in turns. On
N ranks a ring has N - 1 hops, an all-reduce twice as many; in each hop a rank sends 1/N of the tensor's S bytes:

    t = hops · (α + S/N / β)                  fitted: α, seconds of a hop; β, bytes a second
    bus bandwidth = hops · S/N / t            what a rank sends a second, as nccl-tests counts it: at most β

lab.json holds all of it, lab.png the bus bandwidth. `python -m minizero.simulate --measured lab/lab.json` predicts
training steps with these α and β. With NCCL nobody has run it.

Hockney, 1994 (α and β); NVIDIA, nccl-tests, doc/PERFORMANCE.md (bus bandwidth).
"""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from minizero import cli
from minizero.pictures.style import draw_lines, label_axes, sheet
from minizero.ranks.comm import Comm
from minizero.ranks.timing import alpha_and_beta, time_collectives

TIMES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # so many times N - 1 hops
LOOKS = {"all-gather": "#0072B2", "reduce-scatter": "#E69F00", "all-reduce": "black"}


def measure(comm: Comm) -> dict[str, Any]:
    """What lab.json holds. A collective of at least 2 ranks."""
    operations = {}
    for operation, by_whom in time_collectives(comm, list(TIMES)).items():
        hops = TIMES[operation] * (comm.size - 1)
        operations[operation] = {whose: described(times, hops) for whose, times in by_whom.items()}
    on_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size))
    sizes = {"ranks": comm.size, "ranks_per_host": on_a_host}
    return {"machine": cli.machine(comm.device), **sizes, "operations": operations}


def described(times: dict[int, float], hops: int) -> dict[str, Any]:
    """α, β, and points: (bytes of a hop, seconds, bus bandwidth). times: {bytes of a hop: seconds}."""
    alpha, beta = alpha_and_beta({hops * nbytes: seconds for nbytes, seconds in times.items()})
    points = [(nbytes, seconds, hops * nbytes / seconds) for nbytes, seconds in times.items()]
    return {"alpha": alpha / hops, "beta": beta, "points": points}


def draw(found: dict[str, Any]) -> bytes:
    """The bus bandwidth over the bytes of a hop, as PNG."""
    axes = sheet(13, 6)
    for operation, by_whom in found["operations"].items():
        for whose, its in by_whom.items():
            nbytes, _, bandwidth = zip(*its["points"])
            look = {"marker": "o", "color": LOOKS[operation], "linestyle": "solid" if whose == "our ring" else "dashed"}
            draw_lines(axes, nbytes, {f"{operation}, {whose}": bandwidth}, [look], 1e9)
    axes.set_xscale("log", base=2)
    label_axes(axes, "bytes of a hop", "bus bandwidth, 10⁹ bytes a second", legend="beside", yscale="log")
    axes.figure.savefig(buffer := io.BytesIO(), format="png", dpi=100)
    return buffer.getvalue()


def run(argv: list[str] | None) -> None:
    """`ValueError` outside torchrun, with one rank, or for a folder into which nobody can write."""
    parser = cli.Parser(prog="python -m minizero.lab", description="How fast ranks talk; under torchrun.")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where lab.json and lab.png go")
    options = parser.parse_args(argv)
    with Comm.from_process_group() as comm:
        if comm.size == 1:
            raise ValueError("one rank sends nothing: start 2 or more, as torchrun --nproc-per-node 2 -m minizero.lab")
        if comm.rank == 0:
            cli.check_output(options.output)
        found = measure(comm)
        if comm.rank:
            return
    print(f"{found['ranks']} ranks, {found['ranks_per_host']} on a host, {found['machine']['device']}")
    for operation, by_whom in found["operations"].items():
        for whose, its in by_whom.items():
            most = max(bandwidth for *_, bandwidth in its["points"])
            line = f"α {1e6 * its['alpha']:8.1f} µs a hop, β {its['beta'] / 1e9:7.2f} GB/s; bus {most / 1e9:7.2f} GB/s"
            print(f"{operation:15} {whose:14} {line}")
    for path in cli.write_files({"lab.json": json.dumps(found).encode(), "lab.png": draw(found)}, options.output):
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(cli.run_command("python -m minizero.lab", lambda: run(None), "message"))
