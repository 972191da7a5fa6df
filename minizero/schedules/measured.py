"""What each layer of a real chain costs: seconds and bytes, measured on one sample.

A layer becomes a `Stage` by one taped forward and backward. Its tape is the larger of two sizes:

    what is there when forward is over         beyond the layer's input and output (parameters live anyway)
    what backward's worst moment holds         beyond input, output and their gradients

The second is there because a layer of several operators has gradients inside, and a budget has to cover them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minizero.memory import Ledger, tag
from minizero.schedules.chain import Stage

Layer = Callable[[torch.Tensor], torch.Tensor]

REPEATS = 3  # of as many runs the shortest counts


def measure_chain(model: nn.Module | Sequence[Layer], sample: torch.Tensor) -> list[Stage]:
    """The stages of `model`, an nn.Sequential or a list of layers, each of one tensor to one tensor.

    Times are in seconds, sizes in bytes. Parameters, their gradients, buffers and the generators' states stay as they
    were. Raises `TypeError` if the model is no chain, `ValueError` if it has no layers or a layer changes its input
    in place.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        raise TypeError(f"fit: the model must be an nn.Sequential or a list of layers, not {type(model).__name__}")
    if not isinstance(sample, torch.Tensor):
        raise TypeError(f"fit: the sample must be one tensor, not {type(sample).__name__}")
    layers: list[Any] = list(model)  # type: ignore[arg-type]
    if not layers:
        raise ValueError("fit: the model has no layers: a chain needs at least one stage")
    stages, last = [], len(layers) - 1
    x = sample.detach().clone().requires_grad_(sample.requires_grad)  # a clone: a layer may change it
    devices = [x.device] if x.is_cuda else []
    for i, layer in enumerate(layers):
        buffers = [(buffer, buffer.clone()) for buffer in _tensors(layer, "buffers")]
        with torch.random.fork_rng(devices), torch.enable_grad():
            output = _dry_run(layer, x, i)
            tape = _measure_bytes(layer, x)
            forward, backward = (min(times) for times in zip(*(_measure_seconds(layer, x) for _ in range(REPEATS))))
        for buffer, before in buffers:
            buffer.copy_(before)
        stages.append(Stage(forward, backward, x.nbytes, tape, output.nbytes if i == last else None))
        x = output
    return stages


def _dry_run(layer: Layer, x: torch.Tensor, i: int) -> torch.Tensor:
    """The layer's output, detached. Checks the layer, and does what only a first run has to do."""
    version = x._version
    name = f"fit: layer {i} ({type(layer).__name__})"
    with torch.no_grad():
        output = layer(x)
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"{name} gave {type(output).__name__}: each layer must take one tensor and give one")
    if x._version != version:
        raise ValueError(f"{name} changes its input in place, which a second forward needs: use an out-of-place one")
    trains = x.requires_grad or any(p.requires_grad for p in _tensors(layer, "parameters"))
    return output.detach().requires_grad_(trains and output.is_floating_point())


def _measure_bytes(layer: Layer, x: torch.Tensor) -> int:
    """The layer's tape in bytes, as above."""
    with Ledger() as ledger:
        output = layer(x)
        saved = ledger.current["total"] - output.nbytes  # below 0 if the output is a view
        gradients = _backward(layer, x, output)
        for gradient in gradients[x.requires_grad :]:
            if gradient is not None:
                tag(gradient, "gradients")
        worst = max(sample["activations"] + sample["temporary"] for sample in ledger.curve)
    return max(0, saved, worst - x.nbytes - 2 * output.nbytes)


def _backward(layer: Layer, x: torch.Tensor, output: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """The gradients of x, if it requires one, and of the layer's parameters. None is written to `.grad`."""
    inputs = [t for t in (x, *_tensors(layer, "parameters")) if t.requires_grad]
    if not (inputs and output.requires_grad):
        return ()
    return torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)


def _measure_seconds(layer: Layer, x: torch.Tensor) -> tuple[float, float]:
    """Of one forward, and of one backward."""
    times = [_clock(x)]
    output = layer(x)
    times.append(_clock(x))
    _backward(layer, x, output)
    times.append(_clock(x))
    return times[1] - times[0], times[2] - times[1]


def _clock(x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _tensors(layer: Any, kind: str) -> list[torch.Tensor]:
    return list(getattr(layer, kind)()) if isinstance(layer, nn.Module) else []
