"""python -m tests.bench.gpu_train: the card's own rates, and beside them what our code reaches.

Copy bandwidth and matmul rate; a training step of a GPT in FP32, TF32, FP16 and BF16; encode and decode of `precision`
against the copy bandwidth; softmax and batch norm with arithmetic in FP32 and in FP16; a step under offload, with
and without the copies beside the computation; the main job on this device.
"""

import torch

from minizero import GPTConfig
from notebooks.tools.card import CUDA, DEVICE, GIB, best_times, copy_bandwidth
from notebooks.tools.card_steps import BATCH, COLUMNS, DTYPES, LARGE, ROWS, arithmetic, matmul_rates, steps
from precision import FP16
from tests.bench.gpu_tools import main


def conversions(elements, rounds):
    """Bytes a second, read and written, of FP16's encode and decode, as they are and compiled."""
    x = torch.randn(elements, device=DEVICE)
    bits = FP16.encode(x)
    functions = {"encode": lambda: FP16.encode(x), "decode": lambda: FP16.decode(bits), "half()": lambda: x.half()}
    if CUDA:
        encode, decode = torch.compile(FP16.encode), torch.compile(FP16.decode)
        functions |= {"encode, compiled": lambda: encode(x), "decode, compiled": lambda: decode(bits)}
    return {name: 6 * elements / spent for name, spent in best_times(functions, rounds).items()}


def job(folder, tiny):
    """The main job: losses of every stage."""
    from minizero.train import command as main_job

    sizes = ["--steps", "2", "--width", "32", "--layers", "1", "--world-size", "2"] if tiny else ["--steps", "40"]
    arguments = ["--device", DEVICE, "--attention", "flash", "--output", str(folder), *sizes]
    if main_job.main(arguments):
        raise RuntimeError("python -m minizero.train failed: see the lines above")
    return "train/"


def run(report, tiny):
    """Measure, and return the lines of the short table."""
    rounds = 1 if tiny else 5
    config, batch_size = (GPTConfig(width=32, layers=1), 1) if tiny else (LARGE, BATCH)

    copy = report.measure("copy bandwidth", lambda: copy_bandwidth(2**12 if tiny else 2**30, rounds))
    rates = report.measure("matmul rates", lambda: matmul_rates(64 if tiny else 8192, rounds))
    lines = []
    if copy and rates:
        each = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in rates.items())
        lines.append(f"copy {copy / 1e9:,.0f} GB/s; matmul {each} TFLOP/s")

    each = report.measure(
        "step", lambda: steps(config, batch_size, rounds, {name: {"dtype": dtype} for name, dtype in DTYPES.items()})
    )
    if each:
        lines.append("step: " + ", ".join(f"{t} {x['seconds'] * 1e3:.1f} ms" for t, x in each.items()))

    ways = {
        "resident": {},
        "offload": {"offload": True, "prefetch": 0},
        "offload, prefetch": {"offload": True, "prefetch": 1},
    }
    ways = {name: {"dtype": torch.bfloat16} | more for name, more in ways.items()}
    offload = report.measure("offload", lambda: steps(config, batch_size, rounds, ways))
    if offload:
        each = (f"{t} {x['seconds'] * 1e3:.1f} ms, {x['bytes'] / GIB:.2f} GiB" for t, x in offload.items())
        lines.append("a step takes: " + "; ".join(each))

    converted = report.measure("conversions", lambda: conversions(2**12 if tiny else 2**28, rounds))
    if converted and copy:
        each = ", ".join(f"{name} {rate / copy:.2f}" for name, rate in converted.items())
        lines.append(f"FP16, share of the copy bandwidth: {each}")

    sizes = (4, 64) if tiny else (ROWS, COLUMNS)
    for name, x in (report.measure("arithmetic", lambda: arithmetic(*sizes, rounds)) or {}).items():
        ratio = x["FP32"]["seconds"] / x["FP16"]["seconds"]
        errors = x["FP32"]["error"], x["FP16"]["error"]
        lines.append(
            f"{name}: FP32 / FP16 arithmetic {ratio:.2f} of the time, errors {errors[0]:.1e} and {errors[1]:.1e}"
        )

    report.measure("main job", lambda: job(report.path.parent / "train", tiny))
    return lines


if __name__ == "__main__":
    main("train", __doc__, run)
