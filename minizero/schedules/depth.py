"""How deep a network fits: bytes and seconds of one training step against depth, plain and with a schedule.

Of n blocks with boundary 1 and tape w each, the plain run holds n(w+1). Regions of k blocks hold their inputs
and the tape of one region, and cost one more forward:

    n/k + k(w+1)      least at k = √(n/(w+1)), where it is 2√(n(w+1))

So k = √n is the answer if a layer's tape is no larger than its boundary. For transformer blocks it is far too much:
their tape is some 20 boundaries, and up to a hundred blocks it is best to keep the input of each one or two.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"; the ResNet against depth is drawn after
cybertronai/gradient-checkpointing.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minizero.memory import Ledger
from minizero.models.gpt import GPT, GPTConfig
from minizero.models.networks import Residual, classifier, normalised
from minizero.recompute.sequential import checkpoint_sequential
from minizero.schedules.chain import Schedule, Stage, group
from minizero.schedules.rules import every_k

# Chains of equal parts.


def equal_layers(n: int, width: int = 32) -> list[nn.Module]:
    """n times a linear layer and tanh, (batch, width) to the same. Each saves its input and its output."""
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n)]


def resnet_layers(n: int, channels: int = 8) -> list[nn.Module]:
    """A ResNet of 6n + 2 layers (He et al., 2015, section 4.2) for grey images.

    A stem, 3n blocks of two convolutions, a classifier. From one third of the blocks to the next the channels double,
    and height and width halve. The memory format is the one in which a CPU's convolutions are fastest.
    """
    # At least 8 channels: with fewer, on processors with AVX2 alone, oneDNN 3.12 writes beyond its memory in the
    # backward of a 1 × 1 convolution with a stride. https://github.com/uxlfoundation/oneDNN/issues/6035
    layers: list[nn.Module] = [normalised(1, channels, 3)]
    inputs = channels
    for width in (channels, 2 * channels, 4 * channels):
        for _ in range(n):
            layers.append(Residual(inputs, width, stride=width // inputs))
            inputs = width
    network = nn.Sequential(*layers, classifier(4 * channels))
    return [*network.to(memory_format=torch.channels_last)]  # type: ignore[call-overload]


class Embed(nn.Module):
    """Bytes, (batch, sequence), to the stream, (batch · sequence, width)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.embedding, self.positions = gpt.embedding, gpt.positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.embedding(x) + self.positions.weight[: x.shape[1]]).flatten(0, 1)


def gpt_layers(config: GPTConfig) -> list[nn.Module]:
    """The GPT as a chain: embedding, blocks, norm with head. The first layer takes (batch, sequence) integers."""
    gpt = GPT(config)
    mask = torch.full((config.sequence_length,) * 2, float("-inf")).triu(1)
    for block in gpt.blocks:  # a layer takes one tensor
        block.register_forward_pre_hook(lambda _, stream: (*stream, mask.to(stream[0])))
    return [Embed(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.head)]


def regions(layers: Sequence[nn.Module], k: int) -> list[nn.Module]:
    """The same chain in regions of k layers, each of which counts as one. `chain.group` does so for stages."""
    return [nn.Sequential(*layers[start : start + k]) for start in range(0, len(layers), k)]


def best_region(n: int, w: float) -> int:
    """The k nearest to √(n/(w+1)), for n blocks whose tape is w boundaries."""
    return max(1, round(math.sqrt(n / (w + 1))))


# One training step, its bytes and its seconds.


def step(layers: Sequence[nn.Module], x: torch.Tensor, schedule: Schedule | None = None) -> None:
    """Forward, and backward from the sum of the outputs. schedule: None for the plain run."""
    # No name holds the output: a language model's loss would not need it either once it has its gradient.
    run: Callable[[torch.Tensor], torch.Tensor] = nn.Sequential(*layers)
    if schedule is not None:
        run = functools.partial(checkpoint_sequential, layers, schedule=schedule)
    run(x).sum().backward()


def step_in_regions(layers: Sequence[nn.Module], x: torch.Tensor, k: int) -> None:
    """A step in regions of k layers. The input of each region is kept; each but the last runs forward once more."""
    chain = regions(layers, k)
    step(chain, x, every_k(len(chain), 1))


def in_regions(stages: Sequence[Stage], k: int) -> Schedule:
    """The schedule of `step_in_regions`, on such stages."""
    chain = group(stages, k)
    return every_k(len(chain), 1).on(chain)


def held_bytes(run: Callable[..., object], layers: Sequence[nn.Module], *arguments: Any) -> int:
    """The peak of all that `run(layers, *arguments)` holds beside parameters, their gradients and buffers."""
    model = nn.Sequential(*layers)
    model.zero_grad()
    with Ledger(model) as ledger:
        run(layers, *arguments)
    states = ("parameters", "gradients", "buffers")
    peak = max(sample["total"] - sum(sample[state] for state in states) for sample in ledger.curve)
    model.zero_grad()
    return peak


def seconds(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each run. The runs take turns, so that what disturbs one disturbs all.

    Without a GPU it is the processor's time, which does not grow while other programs run.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in [*runs.items()] * (repeats + 1):
        start = clock()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[name].append(clock() - start)
    return {name: min(found[1:]) for name, found in times.items()}  # the first of each warms up


Row = dict[str, float]


def against_depth(
    make: Callable[[int], Sequence[nn.Module]],
    depths: Sequence[int],
    runs: Mapping[str, Callable[[Sequence[nn.Module]], object]],
    repeats: int = 0,
) -> dict[str, list[Row]]:
    """Measures each run on `make(depth)`: {name: rows of depth, bytes and, with repeats, seconds}."""
    rows: dict[str, list[Row]] = {name: [] for name in runs}
    for depth in depths:
        layers = make(depth)
        ready = {name: functools.partial(run, layers) for name, run in runs.items()}
        times = seconds(ready, repeats) if repeats else {}
        for name, run in runs.items():
            row: Row = {"depth": depth, "bytes": held_bytes(run, layers)}
            rows[name].append(row | ({"seconds": times[name]} if repeats else {}))
    return rows
