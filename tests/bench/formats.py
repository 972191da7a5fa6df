"""Our conversions beside NumPy's, PyTorch's and gfloat's: 2^22 numbers, one thread.

Interleaved and the best of many, since other work on the machine only ever slows a run down. Ratios are
theirs / ours: above 1 we are faster. "with extremes": an eighth of the numbers overflows, a quarter is subnormal.
"""

import argparse
import math
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from precision import BF16, FP16

try:
    import gfloat
    import gfloat.formats
except ImportError:
    gfloat = None

SIZE = 2**22


def best_times(calls, rounds):
    """Seconds of each call, the best of many, all in turn; those that take long are called less often."""
    best = dict.fromkeys(calls, math.inf)
    for i in range(rounds):
        for name, call in calls.items():
            if best[name] < 0.2 or i % 10 == 0:
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def by_gfloat(x):
    info = gfloat.formats.format_info_binary16
    return gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x))


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench.formats", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="default: 60")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    normal = np.random.default_rng(0).standard_normal(SIZE, np.float32)
    extremes = normal.copy()
    extremes[::4] *= 1e-6
    extremes[1::8] *= 1e6
    wide, tensor, bits = normal.astype(np.float64), torch.from_numpy(normal), FP16.encode(normal)
    compiled = torch.compile(FP16.encode)
    half = bits.view(np.float16)
    rows = [
        ("NumPy, FP16.encode / astype(float16)", lambda: FP16.encode(normal), lambda: normal.astype(np.float16)),
        ("the same, with extremes", lambda: FP16.encode(extremes), lambda: extremes.astype(np.float16)),
        ("the same, from float64", lambda: FP16.encode(wide), lambda: wide.astype(np.float16)),
        ("NumPy, FP16.decode / astype(float32)", lambda: FP16.decode(bits), lambda: half.astype(np.float32)),
        ("torch.compile, FP16.encode / half()", lambda: compiled(tensor), lambda: tensor.half()),
        ("torch, FP16.encode / half()", lambda: FP16.encode(tensor), lambda: tensor.half()),
        ("torch, BF16.encode / bfloat16()", lambda: BF16.encode(tensor), lambda: tensor.bfloat16()),
    ]
    if gfloat is not None:
        rows.append(("NumPy, FP16.encode / gfloat", lambda: FP16.encode(normal), lambda: by_gfloat(normal)))
    with np.errstate(over="ignore", under="ignore"):
        calls = {(name, side): call for name, *pair in rows for side, call in enumerate(pair)}
        times = best_times(calls, options.rounds)

    versions = f"NumPy {np.__version__}, torch {torch.__version__}"
    table = Table(title=f"2^22 numbers, best of {options.rounds}, one thread, {versions}")
    for column in ("what", "ours, ms", "theirs, ms", "theirs / ours"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, *_ in rows:
        ours, theirs = times[name, 0], times[name, 1]
        table.add_row(name, f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{theirs / ours:.2f}")
    Console().print(table)
    if gfloat is None:
        Console().print("gfloat is not installed: its row is left out (pip install gfloat)")


if __name__ == "__main__":
    main()
