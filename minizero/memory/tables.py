"""The ledger's figures as tables: by phase, by module.

The tables read plain data, as `Ledger.summary()` returns it. One MiB is 2^20 bytes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MIB = 2**20
STATES = ("parameters", "gradients", "optimizer", "activations")
COUNTED_BY = {
    "the ledger: tensors": "ledger",
    "PyTorch's profiler: + scratch in operators": "profiler",
    "the operating system: all that is resident": "process",
    "the GPU's allocator: blocks handed out": "allocated",
    "the GPU's allocator: + its reserve": "reserved",
}


def by_module(holders: Iterable[Mapping[str, Any]], rows: int | None = None) -> dict[str, dict[str, int]]:
    """Bytes by module, then by category, with `total` and `tensors`; the largest module first.

    What was born in no module's forward stands under its phase, such as "(backward)".
    rows: at most so many modules. If there are more, layers are added up (`blocks.0.up` and `blocks.1.up` become
    `blocks.*.up`). If there are still more, the smallest are added up as "others".
    """
    holders = list(holders)
    names = [row["module"] or f"({row['phase'] or 'older'})" for row in holders]
    if rows is not None and len(set(names)) > rows:
        names = [re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names]
    found: dict[str, dict[str, int]] = {}
    for name, row in zip(names, holders):
        module = found.setdefault(name, {"total": 0, "tensors": 0})
        for key, more in ((row["category"], row["bytes"]), ("total", row["bytes"]), ("tensors", row["tensors"])):
            module[key] = module.get(key, 0) + more
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]["total"]))
    if rows is None or len(ordered) <= rows:
        return ordered
    kept = dict(list(ordered.items())[: rows - 1])
    rest = [module for name, module in ordered.items() if name not in kept]
    return kept | {f"{len(rest)} others": {key: sum(m.get(key, 0) for m in rest) for key in set().union(*rest)}}


def print_peak(summary: Mapping[str, Any], console: Console, rows: int = 14) -> None:
    """Prints two tables that fit 80 columns: the peaks by category and phase, and who holds the joint peak."""
    phases, peak = summary["peak_by_phase"], summary["peak"]
    console.print("Peak MiB, measured, within each phase", style="italic")
    table = _table("category", *phases, "whole")
    for category in [*(name for name in peak if name != "total" and peak[name]), "total"]:
        if category == "total":
            table.add_section()
        held = [phase[category] for phase in phases.values()]
        table.add_row("joint total" if category == "total" else category, *map(_mib, [*held, peak[category]]))
    console.print(table)
    console.print("Categories peak at different moments: they do not add up to the joint total.\n")

    curve = summary["curve"]
    moment = curve["total"].index(peak["total"])
    phase, operator = curve["phase"][moment], curve["operator"][moment].removesuffix(".default")
    console.print(f"Who holds the joint peak (in {phase}, after {operator}), MiB, measured", style="italic")
    modules = by_module(summary["holders"], rows)
    others = [name for name in peak if name not in (*STATES, "total")]
    table = Table("module", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "activa-\ntions", "other", "total"):
        table.add_column(heading, justify="right", min_width=7)
    for name, module in modules.items():
        other = sum(module.get(category, 0) for category in others)
        table.add_row(name, *(_mib(module.get(category, 0)) for category in STATES), _mib(other), _mib(module["total"]))
    console.print(table)


def print_comparison(compared: Mapping[str, Any], console: Console) -> None:
    """Prints what the ledger and others counted, as `allocators.compare` returns it."""
    console.print("Peak above the start of the step, MiB, measured by", style="italic")
    table = _table("", "MiB", "against the ledger")
    for name, key in COUNTED_BY.items():
        if compared[key] is not None:
            more = f"{(compared[key] / compared['ledger'] - 1) * 100:+.2f} %" if key != "ledger" else "-"
            table.add_row(name, _mib(compared[key]), more)
    console.print(table)
    scratch = [(name.removesuffix(".default"), taken) for name, taken in compared["scratch"].items()]
    largest = ", ".join(f"{name} {_mib(taken)}" for name, taken in scratch[:3] if taken >= MIB / 200)
    console.print(f"Most scratch in one call, MiB: {largest or 'none worth naming'}.")


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _mib(count: int) -> str:
    return f"{count / MIB:,.2f}" if count else "-"
