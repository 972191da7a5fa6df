"""Gradient accumulation: a large batch in the memory of a small one.

A batch whose activations do not fit is cut into k micro-batches: the window. Their gradients add up, and the
optimizer steps once. The loss of a batch is a mean over its tokens, so each micro-batch counts by its tokens:

    L = Σ nᵢ Lᵢ / Σ nᵢ      Lᵢ: mean loss of micro-batch i; nᵢ: its targets; sums over the window, on all ranks

The mean of the means, Σ Lᵢ / k, is another number if the nᵢ differ: a token in a short micro-batch would weigh
more than a token in a long one. Several libraries trained on that until October 2024:
Hugging Face, 2024, "Fixing Gradient Accumulation".
"""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from minizero.engines.any_model.engine import AnyModel
from minizero.memory import tag
from minizero.ranks.collectives import all_gather, all_reduce

IGNORED = -100  # PyTorch's mark of a position without a target
MicroBatch = Any  # a pair (x, y), or a dict of keyword arguments
Count = Callable[[MicroBatch], Any]  # returns one number


def targets_in(micro_batch: MicroBatch) -> torch.Tensor:
    """How many targets a micro-batch has: all that are not -100."""
    y = micro_batch["labels"] if isinstance(micro_batch, Mapping) else micro_batch[1]
    return (y != IGNORED).sum()


def accumulate(
    model: nn.Module, micro_batches: Iterable[MicroBatch], *, count: Count = targets_in, no_sync: bool = True
) -> torch.Tensor:
    """Add the gradient of the window's mean loss to `.grad`; returns that loss: FP32, detached, of all ranks.

    model: a plain module or an engine.
    micro_batches: pairs (x, y), for which model(x, y) is the loss; or dicts of keyword arguments, for which
    model(**micro_batch) has the loss as `.loss`, as in Hugging Face's models. The loss must be the mean over the
    targets: over all of y, or of the dict's "labels", that are not -100.
    count: a function of a micro-batch. It says how many targets the model's mean is over, if that is another number.
    A causal model that shifts its labels inside never sees the first of a row:
    `lambda batch: (batch["labels"][:, 1:] != -100).sum()`. A mean with class weights is over their sum, a fraction:
    `lambda batch: weights[batch[1][batch[1] != -100]].sum()`.
    no_sync: if True, an engine sends its gradients once, with the last micro-batch. Until then it holds full ones, in
    FP32. If False, it averages the gradients of every micro-batch, and sends k times as much. Then stages 2 and 3 hold
    only shards in between.

    The whole window is held until the end, because every weight needs all counts. Activations exist for one micro-batch
    at a time. A rank with fewer micro-batches than another repeats one with weight 0.

    `ValueError` if some rank has no micro-batch, if no rank has a target, if `count` does not return a number of at
    least 0, or if a dict has Hugging Face's `num_items_in_batch`, with which the loss is no mean.
    `TypeError` if the model has no parameters, or if the window holds something else than micro-batches.
    `RuntimeError` if the loss has no gradient.
    """
    if not hasattr(micro_batches, "__iter__") and not hasattr(micro_batches, "__getitem__"):
        raise TypeError(
            f"accumulate: micro_batches must be a list, or another iterable, not {type(micro_batches).__name__}"
        )
    window = list(micro_batches)
    counts = [_checked_count(micro_batch, count) for micro_batch in window]
    if isinstance(model, AnyModel):
        return _accumulate_on_ranks(model, window, counts, no_sync)
    if not isinstance(model, nn.Module) or not [*model.parameters()]:
        raise TypeError(
            "accumulate: model must be an engine or a module with parameters, whose gradients add up, not "
            f"{getattr(model, '__name__', type(model).__name__)}"
        )
    if hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync"):
        raise TypeError(
            f"accumulate: {type(model).__name__} averages over ranks by itself, whatever they count: "
            "wrap the module in an engine of minizero, or give the plain module"
        )
    total = _check_window([[len(window), sum(counts)]])
    loss = torch.zeros((), device=[*model.parameters()][-1].device)  # where the model ends
    with sums_in_fp32(model) if len(window) > 1 else contextlib.nullcontext():
        for micro_batch, targets in zip(window, counts):
            if targets:  # without a target the mean is 0/0; the micro-batch adds nothing
                loss += _backward(model, micro_batch, targets / total)
    return loss


def _accumulate_on_ranks(model: AnyModel, window: list[MicroBatch], counts: list[float], no_sync: bool) -> torch.Tensor:
    comm = model.comm
    mine = torch.tensor([[len(window), sum(counts)]], dtype=torch.float64, device=comm.device)
    everyone = all_gather(mine, comm, label="accumulate").tolist()
    total = _check_window(everyone)
    loss = torch.zeros((), device=comm.device)
    rounds = int(max(length for length, _ in everyone))
    for number in range(rounds):
        # Under stage 3 all ranks must run a forward together. A rank that has no micro-batch left, or one without a
        # target, takes part with a weight of 0.
        targets = counts[number] if number < len(window) else 0
        micro_batch = window[number] if targets else _stand_in(window, counts)
        with model.no_sync() if no_sync and number < rounds - 1 else contextlib.nullcontext():
            # The engine takes the mean over ranks. The formula has the sum, so each weight is `size` times larger.
            loss += _backward(model, micro_batch, comm.size * targets / total)
    return all_reduce(loss, comm, "mean", label="accumulate")


def _stand_in(window: list[MicroBatch], counts: list[float]) -> MicroBatch:
    """A micro-batch whose loss is a number, not 0/0: one with targets, or else the last one with made-up targets."""
    for micro_batch, targets in zip(window, counts):
        if targets:
            return micro_batch
    last = window[-1]
    if isinstance(last, Mapping):
        return {**last, "labels": torch.zeros_like(last["labels"])} if "labels" in last else last
    return last[0], torch.zeros_like(last[1])


def _backward(model: nn.Module, micro_batch: MicroBatch, weight: float) -> torch.Tensor | float:
    """Add the gradient of weight · loss to `.grad`, and return weight · loss."""
    if isinstance(micro_batch, Mapping):
        call = "model(**micro_batch).loss"
        loss = getattr(model(**micro_batch), "loss", None)
    else:
        call = "model(x, y)"
        loss = model(*micro_batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"accumulate: {call} must be one number, the mean loss, not {what}")
    if not loss.requires_grad:
        raise RuntimeError(
            "accumulate: the loss has no gradient, as under no_grad or inference_mode, or if all weights are frozen: "
            "call accumulate to train; a loss alone is what the model returns"
        )
    if not weight and not loss.isfinite():
        raise ValueError(
            f"accumulate: the loss is {loss.item()} for what stands in for a micro-batch without targets, and 0 times "
            "that is no number: give each rank a micro-batch that has targets"
        )
    if loss.dtype.itemsize > 2 or not weight:
        (loss * weight).backward()
    else:
        # The gradient of a 16-bit loss has 16 bits. A weight would be rounded there, and with it every gradient, in one
        # direction. So the weight multiplies each gradient where it arrives.
        inputs = micro_batch.values() if isinstance(micro_batch, Mapping) else micro_batch
        with contextlib.ExitStack() as hooks:
            for end in (*(model.module if isinstance(model, AnyModel) else model).parameters(), *inputs):
                if isinstance(end, torch.Tensor) and end.requires_grad:
                    hooks.enter_context(end.register_hook(lambda gradient: gradient * weight))
            loss.backward()
    return loss.detach().float().view(()) * weight if weight else 0.0


@contextlib.contextmanager
def sums_in_fp32(model: nn.Module) -> Iterator[None]:
    """In the block, gradients of 16-bit parameters add up in FP32. At its end `.grad` is rounded to 16 bits, once.

    A sum in bfloat16 has 8 bits: it does not grow any more once what is added is below 1/512 of it.
    """
    halves = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    sums = {id(p): _gradient(p.grad, torch.float32) for p in halves if p.grad is not None}

    def add(parameter: torch.Tensor) -> None:  # called when a backward has written a parameter's gradient
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total = sums.get(id(parameter))
        sums[id(parameter)] = _gradient(gradient, torch.float32) if total is None else total.add_(gradient)

    before = [p.grad for p in halves]
    hooks = [p.register_post_accumulate_grad_hook(add) for p in halves]
    try:
        for parameter in halves:
            parameter.grad = None
        yield
        before = [_gradient(sums[id(p)], p.dtype) if id(p) in sums else None for p in halves]
    finally:  # if the block raised, `before` still holds the gradients from before it
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(halves, before):
            parameter.grad = gradient


def _gradient(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in another dtype, tagged as a gradient for the ledger."""
    converted = tensor.to(dtype)
    tag(converted, "gradients")
    return converted


def _checked_count(micro_batch: Any, count: Count) -> float:
    """How many targets a micro-batch has.

    `TypeError` if it is no micro-batch, or if `count` is no function. `ValueError` if `count` returns no such number.
    """
    is_dict = isinstance(micro_batch, Mapping)
    is_pair = isinstance(micro_batch, tuple | list) and len(micro_batch) == 2
    labels = micro_batch.get("labels") if is_dict else micro_batch[1] if is_pair else None
    lacks_labels = count is targets_in and not hasattr(labels, "shape")
    if lacks_labels or not (is_dict or is_pair):
        several = isinstance(micro_batch, tuple | list)
        kinds = [type(part).__name__ for part in micro_batch] if several else type(micro_batch).__name__
        raise TypeError(
            "accumulate: micro_batches must give pairs (x, y) with y a tensor, or dicts with a tensor at 'labels' (or "
            f"else count=, a function that says how many targets each has), not {kinds}: a single one goes into a list"
        )
    if not callable(count):
        raise TypeError(f"accumulate: count must be a function of a micro-batch, not {type(count).__name__}")
    if is_dict and micro_batch.get("num_items_in_batch") is not None:
        raise ValueError(
            "accumulate: with num_items_in_batch Hugging Face's models return a sum divided by that number, not the "
            "mean that is weighted here: leave it out of the dict"
        )
    number = count(micro_batch)
    value = number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
    if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(
            f"accumulate: count must give a number of at least 0, not {value!r}: the number of targets that the "
            "model's mean is over, or the sum of their weights"
        )
    return float(value)


def _check_window(everyone: list[list[float]]) -> float:
    """How many targets the window has. everyone: for each rank, how many micro-batches and targets it has.

    `ValueError` if a rank has no micro-batch, or if no rank has a target.
    """
    lengths = [length for length, _ in everyone]
    if not min(lengths):
        where = f" on rank {lengths.index(0)}; others have up to {max(lengths):.0f}" if len(lengths) > 1 else ""
        raise ValueError(f"accumulate: no micro-batch{where}: give at least one")
    total = sum(targets for _, targets in everyone)
    if not total:
        raise ValueError(
            f"accumulate: no target in the window, every y is {IGNORED}, or every count 0: leave it out, on all ranks"
        )
    return total
