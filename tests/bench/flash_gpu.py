"""python -m tests.bench.flash_gpu: attention on this GPU, beside PyTorch's backends and FlexAttention.

TFLOP/s, the ratio to SDPA's FLASH, the share of the measured matmul rate, and memory: how they are measured is said in
notebooks/tools/card_attention.py. FLASH_AUTOTUNE=1 tries block shapes first.
"""

import itertools
import math

import torch

from notebooks.tools.card import card, matmul_rate
from notebooks.tools.card_attention import LENGTHS, NAMES, measure
from tests.bench.gpu_tools import main, picture


def line_of(name, results, matmul):
    """What is printed of one name."""
    line = f"    {name:10}"
    for which in ("forward", "backward"):
        rate, flash = results[name].get(which), results.get("FLASH", {}).get(which)
        if rate:
            ratio = f", {rate / flash:.2f} × FLASH" if flash else ""
            line += f"  {which} {rate:6.1f} TFLOP/s ({rate / matmul:4.0%} of matmul{ratio})"
    return f"{line}  {results[name].get('memory', math.nan) / 2**20:8.0f} MiB"


def panels(rows, matmul, title):
    """TFLOP/s against N: a panel for each head dim, mask and pass. rows: {(head dim, causal, N): results}."""
    from matplotlib.figure import Figure

    cases = list(itertools.product(sorted({(d, causal) for d, causal, _ in rows}), ("forward", "backward")))
    figure = Figure(figsize=(18, 4 * -(-len(cases) // 4)))
    styles = dict(zip(NAMES, ("-", "--", "-.", ":", (0, (1, 3)), (0, (5, 1, 1, 1)))))
    for place, ((d, causal), which) in enumerate(cases, start=1):
        ax = figure.add_subplot(-(-len(cases) // 4), 4, place)
        lengths = sorted(n for *kind, n in rows if tuple(kind) == (d, causal))
        for name in NAMES:
            points = [(n, rows[d, causal, n].get(name, {}).get(which)) for n in lengths]
            points = [point for point in points if point[1]]
            if points:
                width = 2.5 if name == "flash" else 1.3
                ax.plot(*zip(*points), linestyle=styles[name], marker="o", ms=3, lw=width, label=name)
        ax.axhline(matmul, color="gray", lw=0.8)
        ax.set(xscale="log", title=f"{which}, d = {d}{', causal' if causal else ''}", ylabel="TFLOP/s")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        if place == 1:
            ax.legend()
    figure.suptitle(f"{title}; gray: measured matmul rate")
    figure.tight_layout()
    return figure


def against_math(rows, head_dim):
    """The line that says how much faster flash is than plain attention, forward and backward, at each N."""
    ratios = []
    for (d, causal, n), results in sorted(rows.items()):
        flash, plain = results.get("flash", {}), results.get("MATH", {})
        if d == head_dim and not causal and flash.keys() >= {"forward", "backward"} <= plain.keys():
            times = [1 / x["forward"] + 2.5 / x["backward"] for x in (flash, plain)]
            ratios.append(f"{times[1] / times[0]:.1f} × at {n:,}")
    return f"flash / MATH, forward + backward, d {head_dim}: {', '.join(ratios) or 'not measured'}"


def run(report, tiny):
    """Measure, draw, and return the lines of the short table."""
    lengths, head_dims, rounds = ((32, 64), (64,), 1) if tiny else (LENGTHS, (64, 128), 5)
    names = ("flash", "MATH") if tiny else NAMES
    sizes = dict(tokens=64, width=128) if tiny else {}
    rate = report.measure("matmul", lambda: matmul_rate(torch.float16, 64 if tiny else 8192) / 1e12) or math.nan
    rows, lines = {}, []
    for d, causal, n in itertools.product(head_dims, (False, True), lengths):
        name = f"d {d}, {'causal' if causal else 'full'}, N {n}"
        found = report.measure(name, lambda: measure(n, d, causal, torch.float16, names, rounds, **sizes))  # noqa: B023
        if found:
            rows[d, causal, n] = found
            print("\n".join(line_of(each, found, rate) for each in found), flush=True)
            if n == min(max(lengths), 4096):
                lines += [f"{name}: {line_of('flash', found, rate).strip()}"] if "flash" in found else []
    from flash import launch

    if launch.fastest:  # FLASH_AUTOTUNE=1
        report.figures["autotuned"] = {str(key): blocks for key, blocks in launch.fastest.items()}
    title = f"{card()}, float16, torch {torch.__version__}"
    if rows:
        picture(report.path.parent / "flash.png", panels, rows, rate, title)
    return lines + [against_math(rows, d) for d in head_dims]


if __name__ == "__main__":
    main("flash", __doc__, run)
