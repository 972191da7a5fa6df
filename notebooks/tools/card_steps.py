"""A training step on a GPU in 32 and 16 bits, and operators whose arithmetic is in 32 or 16 bits."""

import contextlib

import torch

from minizero import GPTConfig, World, Zero3
from minizero.ranks.timing import best_seconds
from notebooks.tools.card import CUDA, DEVICE, best_times, copy_bandwidth, matmul_rate, most_bytes
from notebooks.tools.card_memory import initial_values_by_the_device, training
from precision import DynamicLossScaler

DTYPES = {"FP32": None, "TF32": None, "FP16": torch.float16, "BF16": torch.bfloat16}
LARGE = GPTConfig(sequence_length=1024, width=1024, layers=12, heads=16, attention="flash")  # 150 million parameters
BATCH = 8
ROWS, COLUMNS = 2**16, 4096  # of the FP16 numbers that softmax and batch norm read


@contextlib.contextmanager
def products(name):
    """What a card makes of a product of FP32 numbers: under TF32 it reads 10 of their 23 digits, else all."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_rates(size, rounds):
    """{name: operations a second} of a large square matmul in each format."""
    found = {}
    for name, dtype in DTYPES.items():
        with products(name):
            found[name] = matmul_rate(dtype or torch.float32, size, rounds)
    return found


def step_of(comm, config, batch_size, rounds, **options):
    """Seconds of a training step on one rank, the best of some, and the most bytes that it takes on the device."""
    # FP16's gradients would vanish, and its infinities stay, without one.
    scaler = DynamicLossScaler() if options.get("dtype") is torch.float16 else None
    *_, step = training(comm, config, Zero3, batch_size, scaler, **options)
    step()  # the optimizer's states are made, kernels are compiled
    _, taken = most_bytes(step)
    return {"seconds": best_seconds(step, comm, rounds), "bytes": taken}


def steps(config, batch_size, rounds, options):
    """{name: seconds and bytes} of a step under each of these options, on one rank."""
    world, found = World(1, DEVICE, timeout=300), {}
    for name, each in options.items():
        with products(name), initial_values_by_the_device():
            found[name] = world.run(step_of, config, batch_size, rounds, **each)[0]
    return found


def arithmetic(rows, columns, rounds):
    """For softmax and batch norm: seconds and largest error with arithmetic in FP32 and in FP16."""
    from notebooks.tools import card_arithmetic

    x = torch.randn(rows, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).half()
    y = torch.empty_like(x)
    found = {}
    for name in card_arithmetic.KERNELS:
        functions = {t: lambda t=t: card_arithmetic.run_kernel(name, t, x, y) for t in ("FP32", "FP16")}  # noqa: B023
        times = best_times(functions, rounds)
        errors = {t: card_arithmetic.largest_error(name, t, x[:64]) for t in functions}
        found[name] = {t: {"seconds": times[t], "error": errors[t]} for t in functions}
    return found


def measure():
    """The part "train" of `make gpu` as far as lesson 04b draws it, in some seconds."""
    if CUDA and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("below compute capability 8.0 a card has neither TF32 nor BF16")
    return {
        "copy bandwidth": copy_bandwidth(2**27, 3),
        "matmul rates": matmul_rates(8192, 2),
        "step": steps(LARGE, BATCH, 2, {name: {"dtype": dtype} for name, dtype in DTYPES.items()}),
        "arithmetic": arithmetic(ROWS, COLUMNS, 3),
    }
