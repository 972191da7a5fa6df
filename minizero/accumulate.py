"""Gradient accumulation: a large batch in the memory of a small one.

A batch whose activations do not fit is cut into micro-batches. Their gradients add up, and the optimizer
steps once. The loss of a batch is a mean over its tokens, so each part counts by its tokens:

    L = Σ nᵢ Lᵢ / Σ nᵢ      Lᵢ: mean loss of micro-batch i; nᵢ: its targets; sums over the window, on all ranks

The mean of the means, Σ Lᵢ / k, is another number wherever the nᵢ differ: a token in a short micro-batch
would weigh more than one in a long micro-batch. Several libraries trained on that until October 2024:
Hugging Face, 2024, "Fixing Gradient Accumulation".
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minizero.collectives import all_gather, all_reduce
from minizero.engine import Engine
from minizero.memory import tag

IGNORED = -100  # PyTorch's mark of a position without a target
Pair = tuple[Any, torch.Tensor]


def accumulate(model: nn.Module, micro_batches: Iterable[Pair], *, no_sync: bool = True) -> torch.Tensor:
    """Add the gradient of the window's mean loss to `.grad`; returns that loss: FP32, detached, of all ranks.

    model: a plain module or an engine; model(x, y) is the mean over the targets in y, which are all but -100.
    The window's x and y are held until it ends, since every weight needs all counts; activations exist for one
    micro-batch at a time. A rank with fewer micro-batches than another repeats its last one with weight 0.
    no_sync: an engine sends its gradients once, with the last micro-batch, and holds full ones, in FP32, until then;
    with False it averages each micro-batch's, so that stages 2 and 3 hold shards between them, and sends k times as
    much. `ValueError` where the window has no micro-batch on some rank, or no target on any.
    """
    window = [_checked(pair) for pair in micro_batches]
    counts = torch.stack([(y != IGNORED).sum() for _, y in window]).tolist() if window else []
    if isinstance(model, Engine):
        return _accumulate_on_ranks(model, window, counts, no_sync)
    if hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync"):
        raise TypeError(
            f"accumulate: {type(model).__name__} averages over ranks by itself, whatever they count: "
            "wrap the module in an engine of minizero, or give the plain module"
        )
    total = _check_window([[len(window), sum(counts)]])
    loss = torch.zeros((), device=window[0][1].device)
    with sums_in_fp32(model) if len(window) > 1 else contextlib.nullcontext():
        for (x, y), count in zip(window, counts):
            if count:  # without a target the mean is 0/0, and the gradient is nothing
                loss += _backward(model, x, y, count / total)
    return loss


def _accumulate_on_ranks(model: Engine, window: list[Pair], counts: list[int], no_sync: bool) -> torch.Tensor:
    comm = model.comm
    mine = torch.tensor([[len(window), sum(counts)]], device=comm.device)
    everyone = all_gather(mine, comm, label="accumulate").tolist()
    total = _check_window(everyone)
    loss = torch.zeros((), device=comm.device)
    rounds = max(length for length, _ in everyone)
    for number in range(rounds):
        # Under stage 3 a forward is something that all ranks do. Who has no micro-batch left to bring, or one
        # without a target, takes part with a weight of 0; any target will do, and keeps the loss from being 0/0.
        x, y = window[min(number, len(window) - 1)]
        count = counts[number] if number < len(window) else 0
        with model.no_sync() if no_sync and number < rounds - 1 else contextlib.nullcontext():
            # The engine takes the mean over ranks, where the formula has a sum.
            loss += _backward(model, x, y if count else torch.zeros_like(y), comm.size * count / total)
    return all_reduce(loss, comm, "mean", label="accumulate")


def _backward(model: nn.Module, x: Any, y: torch.Tensor, weight: float) -> torch.Tensor | float:
    """Add the gradient of weight · loss, and return that product."""
    loss = model(x, y)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"accumulate: model(x, y) must be one number, the mean loss, not {what}")
    (loss * weight).backward()
    return loss.detach().float().view(()) * weight if weight else 0.0


@contextlib.contextmanager
def sums_in_fp32(model: nn.Module) -> Iterator[None]:
    """Backward passes in here add up the gradients of 16-bit parameters in FP32; `.grad` is rounded once, at the end.

    A sum in bfloat16 has 8 bits: it stands still as soon as what is added is below 1/512 of it.
    """
    halves = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    sums = {id(p): _gradient(p.grad, torch.float32) for p in halves if p.grad is not None}

    def add(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if id(parameter) in sums:
            sums[id(parameter)].add_(gradient)
        else:
            sums[id(parameter)] = _gradient(gradient, torch.float32)

    before = [p.grad for p in halves]
    hooks = [p.register_post_accumulate_grad_hook(add) for p in halves]
    try:
        for parameter in halves:
            parameter.grad = None
        yield
        before = [_gradient(sums[id(p)], p.dtype) if id(p) in sums else None for p in halves]
    finally:  # a window that broke off leaves what was there before it
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(halves, before):
            parameter.grad = gradient


def _gradient(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In this dtype, and counted as what it is."""
    converted = tensor.to(dtype)
    tag(converted, "gradients")
    return converted


def _checked(pair: Any) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
        kinds = [type(part).__name__ for part in pair] if isinstance(pair, tuple | list) else type(pair).__name__
        raise TypeError(
            f"accumulate: micro_batches must give pairs (x, y) with y a tensor, not {kinds}: "
            "a single pair goes into a list"
        )
    return pair[0], pair[1]


def _check_window(everyone: list[list[int]]) -> int:
    """How many targets the window has. everyone: for each rank its micro-batches and its targets."""
    lengths = [length for length, _ in everyone]
    if not min(lengths):
        where = f" on rank {lengths.index(0)}; others have up to {max(lengths)}" if len(lengths) > 1 else ""
        raise ValueError(f"accumulate: no micro-batch{where}: give at least one (x, y)")
    total = sum(targets for _, targets in everyone)
    if not total:
        raise ValueError(f"accumulate: no target in the window, every y is {IGNORED}: leave it out, on all ranks")
    return total
