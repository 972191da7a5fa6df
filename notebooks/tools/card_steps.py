"""A training step on a GPU in 32 and 16 bits, and operators whose arithmetic is in 32 or 16 bits."""

import time

import torch

from minizero import GPT, World, Zero3
from notebooks.tools.card import DEVICE, best_times, most_bytes, synchronize
from precision import DynamicLossScaler

DTYPES = {"FP32": None, "FP16": torch.float16, "BF16": torch.bfloat16}


def step_of(comm, config, batch_size, dtype, rounds, **options):
    """Seconds of a training step on one rank, the best of some, and the most bytes that it takes on the device."""
    model = Zero3(GPT(config), comm, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # FP16's gradients would vanish, and its infinities stay, without one.
    scaler = DynamicLossScaler() if dtype is torch.float16 else None
    tokens = torch.randint(256, (batch_size, config.sequence_length + 1), device=comm.device)

    def step():
        loss = model(tokens[:, :-1], tokens[:, 1:])
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    step()  # the optimizer's states are made, kernels are compiled
    _, taken = most_bytes(step)
    best = float("inf")
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "bytes": taken}


def steps(config, batch_size, rounds, options):
    """{name: seconds and bytes} of a step under each of these options, on one rank."""
    world = World(1, DEVICE, timeout=300)
    run = lambda more: world.run(step_of, config, batch_size, more.pop("dtype", None), rounds, **more)[0]  # noqa: E731
    return {name: run(dict(more)) for name, more in options.items()}


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
