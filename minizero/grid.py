"""Who holds what: ranks down, units across, boxes that fill and empty through a training step, live.

    python -m minizero.grid --stage 3 --delay 0.3
    python -m minizero.grid --by-hand

Each box has three bars, for the unit's parameters (blue), gradients (yellow) and optimizer states (green). A bar says
how much of them this rank holds at this moment, measured by the size of the tensors. A rank stops for `--delay` seconds
after everything that its engine does, so that a lecture hall can follow. With `--by-hand` it stops until Enter comes.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from minizero.cli import Parser, positive, run_command
from minizero.engines import STAGES, Zero3
from minizero.engines.any_model.engine import AnyModel
from minizero.engines.timeline import around_each_call
from minizero.models.gpt import GPT, GPTConfig
from minizero.pictures.shards import STATES
from minizero.pictures.style import COLORS
from minizero.ranks.comm import Comm
from minizero.ranks.world import World

LEVELS = "·▁▂▃▄▅▆▇█"
Holding = dict[str, dict[str, float]]  # by unit, then by state: a share, from 0 (none of it) to 1 (all of it)


def holding(model: AnyModel, optimizer: torch.optim.Optimizer) -> Holding:
    """What share of each unit this rank holds: bytes of its tensors / bytes of the whole, in FP32 with Adam."""
    shares = {}
    for unit in model.units:
        gradients = [shard.grad for shard in unit.shards]
        gradients += [getattr(gradient, "full", None) for gradient in (unit.gradient, *gradients)]
        states = [value for shard in unit.shards for value in optimizer.state.get(shard, {}).values()]
        held = storage_bytes([unit.replica, unit.master]), storage_bytes(gradients), storage_bytes(states) / 2
        shares[unit.name] = {state: min(size / (4 * unit.size), 1.0) for state, size in zip(STATES, held)}
    return shares


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the tensors' storages. A storage that several of them share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def step_by_step(
    comm: Comm, stage: int, config: GPTConfig, steps: int, show: Callable[[int, str, Holding], None]
) -> None:
    """Train, and call `show(rank, what happened, holding)` after everything that changes what this rank holds."""
    kind = STAGES[stage]
    model = kind(GPT(config), comm, prefetch=0) if kind is Zero3 else kind(GPT(config), comm)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(comm.rank)
    x, y = torch.randint(config.vocabulary, (2, 1, config.sequence_length), generator=generator)

    def tell(what: str) -> None:
        show(comm.rank, what, holding(model, optimizer))

    def after(method: str, *args: Any) -> None:
        if method in ("gather", "release", "reduce"):
            tell(f"{'backward' if model.backward else 'forward'}: {args[0].name}")

    with around_each_call(model, lambda: None, after):
        for _ in range(steps):
            model(x, y).backward()
            optimizer.step()
            tell("optimizer step")
            optimizer.zero_grad()
            tell("zero_grad")


def frame(board: list[tuple[str, Holding]]) -> Group | Text:
    """All that the terminal shows: what just happened, the board, and what its signs mean."""
    if not all(units for _, units in board):
        return Text("The ranks begin …")
    states = Text.assemble(*((f"██ {state}   ", COLORS[state]) for state in STATES))
    signs = Text("██ all of it   ▂▂ a part of it: a shard   ·· nothing")
    return Group(Text(board[0][0], style="bold"), draw_text(board), states, signs)


def draw_text(board: list[tuple[str, Holding]]) -> Table:
    """The board as a table for a terminal. board: for each rank, what happened last, and its holding."""
    names = board[0][1]
    table = Table("", *(Column(name.removeprefix("blocks."), justify="center") for name in names), pad_edge=False)
    for rank, (_, units) in enumerate(board):
        cells = (Text.assemble(*((bar(units[name][s]), COLORS[s]) for s in STATES)) for name in names)
        table.add_row(f"rank {rank}", *cells)
    return table


def bar(share: float) -> str:
    """The smallest share is still seen."""
    return 2 * LEVELS[max(round(share * (len(LEVELS) - 1)), share > 0)] + " "


def run(argv: list[str] | None, console: Console) -> None:
    """Parse the options, run the steps and show them. `ValueError` if an option is wrong."""
    parser = Parser(prog="python -m minizero.grid", description="Watch which rank holds what, through training steps.")
    add = parser.add_argument
    add("--stage", type=int, choices=range(len(STAGES)), default=3, help="0: DDP (default: %(default)s)")
    add("--world-size", type=positive, default=4, metavar="N", help="ranks (default: %(default)s)")
    add("--layers", type=positive, default=4, metavar="N", help="blocks (default: %(default)s)")
    add("--steps", type=positive, default=2, metavar="N", help="(default: %(default)s)")
    add("--delay", type=float, default=0.2, metavar="SECONDS", help="after each event (default: %(default)s)")
    add("--by-hand", action="store_true", help="go on with Enter, one event at a time")
    options = parser.parse_args(argv)
    if not 0 <= options.delay < 60:
        raise ValueError(f"--delay {options.delay}: give seconds, from 0 to 60")
    config = GPTConfig(width=64, layers=options.layers, heads=2)
    board: list[tuple[str, Holding]] = [("", {})] * options.world_size

    def wait_for_enter() -> None:
        console.clear()
        console.print(frame(board), Text("Enter: on   q and Enter: end", style="dim"))
        with contextlib.suppress(EOFError):
            if input().strip() == "q":
                ended.set()  # what is left of the steps takes no second

    ended, together = threading.Event(), threading.Barrier(options.world_size, wait_for_enter)

    def show(rank: int, what: str, units: Holding) -> None:
        board[rank] = what, units
        if options.by_hand and not ended.is_set():
            together.wait()
        elif not options.by_hand:
            time.sleep(options.delay)

    live = Live(get_renderable=lambda: frame(board), console=console, refresh_per_second=20)
    with contextlib.nullcontext() if options.by_hand else live:
        World(options.world_size, "cpu").run(step_by_step, options.stage, config, options.steps, show)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for wrong input, or 130 after Ctrl-C."""
    return run_command("python -m minizero.grid", lambda: run(argv, Console()), "--layers or --world-size")


if __name__ == "__main__":
    sys.exit(main())
