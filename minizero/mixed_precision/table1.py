"""Mixed precision against FP32, as in the paper's Table 1: six image networks, and a language model beside them.

    python -m minizero.mixed_precision --output results         every network, 3 seeds: minutes on 2 cores
    python -m minizero.mixed_precision --short                  a glance: 2 networks, 1 seed, few steps

The mixed runs differ from the baseline by one line: forward and backward run inside `emulate(FP16)`, with FP32
accumulation and, as in the paper's Table 1, without a loss scale. The FP32 parameters are the master weights.
Micikevicius et al., 2018, "Mixed Precision Training", section 4.1 and Table 1.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import nn
from torch.nn import functional as F

from minizero.cli import Parser, check_output, machine, positive, run_command
from minizero.memory import Ledger
from minizero.mixed_precision import report
from minizero.mixed_precision.step_memory import crossover, peaks
from minizero.models import images
from minizero.models.gpt import GPT, GPTConfig
from minizero.models.networks import NETWORKS
from minizero.models.text import TEXT, read_text, windows
from precision.emulate import emulate
from precision.formats import FP16

# Top-1 accuracy on ImageNet in percent: baseline, mixed precision.
PUBLISHED = {
    "alexnet": (56.77, 56.93),
    "vgg": (65.40, 65.43),  # VGG-D
    "inception_v1": (68.33, 68.43),  # GoogLeNet
    "inception_v2": (70.03, 70.02),
    "inception_v3": (73.85, 74.13),
    "resnet": (75.92, 76.04),  # ResNet-50
}
LANGUAGE_MODEL = "gpt"
CONFIG = GPTConfig(sequence_length=64, width=96, layers=3, heads=4)
BATCH_SIZE = 64  # images
SEQUENCES = 16  # a batch of the language model
Job = tuple[str, int | None, bool]  # a network; the seed of its training, None for the memory of one step; mixed?


@dataclasses.dataclass(frozen=True)
class Runs:
    """What to run: each network with each seed in both precisions."""

    networks: tuple[str, ...] = (*NETWORKS, LANGUAGE_MODEL)
    seeds: int = 3
    steps: int = 470  # 5 epochs
    language_steps: int = 600
    memory: str = "vgg"  # the network whose peak is measured, with these batch sizes
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


SHORT = Runs(("alexnet", "resnet", LANGUAGE_MODEL), seeds=1, steps=60, language_steps=60, batch_sizes=(1, 4, 16))


def in_fp16(mixed: bool) -> contextlib.AbstractContextManager[None]:
    """A context that emulates FP16 if `mixed`, and else leaves FP32 alone."""
    return emulate(FP16) if mixed else contextlib.nullcontext()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the model's logits."""
    return model(x, y) if isinstance(model, GPT) else F.cross_entropy(model(x), y)


def make(network: str, seed: int) -> nn.Module:
    """A fresh model: one of the six, or the language model."""
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(CONFIG, seed=seed)) if network == LANGUAGE_MODEL else NETWORKS[network]()


def batches(network: str, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Training batches without end: images and their classes, or windows of the text and the bytes that follow."""
    if network != LANGUAGE_MODEL:
        yield from images.batches(*images.load("train"), BATCH_SIZE, seed)
    generator = torch.Generator().manual_seed(seed)
    text = read_text(TEXT, CONFIG.sequence_length)
    while True:
        yield draw_windows(text[: len(text) * 19 // 20], SEQUENCES, generator)


def draw_windows(text: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y, (count, sequence_length): windows at random places in the text, and the bytes one place ahead."""
    starts = torch.randint(len(text) - CONFIG.sequence_length, (count,), generator=generator)
    return windows(text, starts.tolist(), CONFIG.sequence_length)


def train(network: str, seed: int, mixed: bool, steps: int) -> nn.Module:
    """A trained model. AdamW steps in FP32 in both precisions. Its learning rate warms up, then falls as a cosine."""
    model = make(network, seed)
    optimizer = torch.optim.AdamW(model.parameters())
    highest = 1e-3 if network == LANGUAGE_MODEL else 3e-3
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for _, (x, y) in zip(range(steps), batches(network, seed)):
        with in_fp16(mixed):
            loss_of(model, x, y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def accuracy(network: str, seed: int, mixed: bool, steps: int) -> float:
    """Percent of the test images that a trained network classifies correctly."""
    model = train(network, seed, mixed, steps)
    x, y = images.load("test")
    with torch.no_grad(), in_fp16(mixed):
        correct = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500)))
    return 100 * correct / len(y)


def bits_per_byte(seed: int, mixed: bool, steps: int) -> float:
    """Bits per byte of a trained language model on the last twentieth of the text, which it has not seen."""
    model = train(LANGUAGE_MODEL, seed, mixed, steps)
    text = read_text(TEXT, CONFIG.sequence_length)
    generator = torch.Generator().manual_seed(0)  # every model is asked about the same places
    losses = []
    for _ in range(8):
        x, y = draw_windows(text[len(text) * 19 // 20 :], 64, generator)
        with torch.no_grad(), in_fp16(mixed):
            logits = model(x)
        losses.append(F.cross_entropy(logits.flatten(0, 1), y.flatten()).item())
    return mean(losses) / math.log(2)


def activations(network: str, mixed: bool) -> int:
    """Bytes that one training step keeps from forward to backward, measured by the ledger."""
    model, (x, y) = make(network, 0), next(batches(network, 0))
    with Ledger(model) as ledger, in_fp16(mixed):
        loss_of(model, x, y).backward()
    return ledger.peak["activations"]


def work(plan: Runs, job: Job) -> float:
    """Measures a job: an accuracy, bits per byte, or the bytes of the activations."""
    torch.set_num_threads(1)  # the same numbers on any number of cores
    network, seed, mixed = job
    if seed is None:
        return activations(network, mixed)
    if network == LANGUAGE_MODEL:
        return bits_per_byte(seed, mixed, plan.language_steps)
    return accuracy(network, seed, mixed, plan.steps)


def measure(plan: Runs, processes: int, done: Callable[[Job, float], None] = lambda job, value: None) -> dict[str, Any]:
    """Measures everything in the plan; `report` says what is returned. done: called with each job and its result."""
    seeds = (*range(plan.seeds), None)
    jobs: list[Job] = list(itertools.product(plan.networks[::-1], seeds, (True, False)))
    found = {}
    with contextlib.ExitStack() as stack:
        one_by_one: Callable[..., Iterator[float]] = map
        if processes > 1:
            # Ctrl-C reaches every process: the parent alone answers it.
            ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)
            one_by_one = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes, *ignore)).imap
        for job, value in zip(jobs, one_by_one(functools.partial(work, plan), jobs)):
            found[job] = value
            done(job, value)
    rows = [
        {
            "network": network,
            "unit": "bits per byte" if network == LANGUAGE_MODEL else "%",
            "published": PUBLISHED.get(network),
            "baseline": [found[network, seed, False] for seed in range(plan.seeds)],
            "mixed": [found[network, seed, True] for seed in range(plan.seeds)],
            "activations": {"baseline": found[network, None, False], "mixed": found[network, None, True]},
        }
        for network in plan.networks
    ]
    held = peaks(NETWORKS[plan.memory], *images.load("train"), plan.batch_sizes)
    where = crossover(plan.batch_sizes, held["baseline"], held["mixed"])
    memory = {"network": plan.memory, "batch_sizes": plan.batch_sizes, **held, "crossover": where}
    return {"rows": rows, "memory": memory, "plan": dataclasses.asdict(plan)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. Raises `ValueError` if one is unknown or cannot be read."""
    parser = Parser(
        prog="python -m minizero.mixed_precision", description="Mixed precision against FP32: the paper's Table 1."
    )
    add = parser.add_argument
    add("--short", action="store_true", help=f"only {', '.join(SHORT.networks)}, one seed, few steps")
    add("--seeds", type=positive, metavar="N", help=f"for each network (default: {Runs().seeds}; --short: 1)")
    add("--processes", type=positive, default=os.cpu_count() or 1, metavar="N", help="at a time (default: one a core)")
    add("--output", type=Path, metavar="FOLDER", help="where table1.json and table1.png go (default: nowhere)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, console: Console) -> None:
    """Measures what the options ask for, prints it, and saves it if they name a folder."""
    if options.output is not None:
        check_output(options.output)
    plan = SHORT if options.short else Runs()
    plan = dataclasses.replace(plan, seeds=options.seeds or plan.seeds)
    columns = "{task.description}", BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        total = len(plan.networks) * 2 * (plan.seeds + 1)
        task = progress.add_task("Table 1", total=total)
        results = measure(plan, options.processes, lambda job, value: progress.advance(task))
    results |= {"short": options.short, "processes": options.processes, "seconds": time.perf_counter() - start}
    results["machine"] = machine(torch.device("cpu"))
    report.print_table(results, console)
    if options.output is not None:
        for path in report.save(results, options.output):
            console.print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """Returns 0; with one line on standard error 2 if the input was wrong, and 130 after Ctrl-C."""
    return run_command("python -m minizero.mixed_precision", lambda: run(parse(argv), Console()), "--processes")
