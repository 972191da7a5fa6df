"""What the optimizer sees of a unit: its shards, their names, and the norm of their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minizero.engines.layout import pad

GroupBy = Callable[[str, nn.Parameter], Any]


def cut(unit: Any) -> tuple[list[nn.Parameter], list[Any]]:
    """The unit's `master` as parameters, and for each its value of `group_by`, by which alone they are cut.

    A value that this rank holds nothing of has an empty shard. So every rank has something of each, and what
    writes it on all ranks (an optimizer's step, a loop under no_grad) is seen by all: see `Unit.replica_is_stale`.
    """
    shards: list[nn.Parameter] = []
    groups: list[Any] = []
    start = 0 if unit.whole else unit.comm.rank * unit.master.numel()
    ends = [*unit.layout.offsets[1:], unit.size]  # the padding goes with the last parameter
    for group, low, high in zip(unit.group_of, unit.layout.offsets, ends, strict=True):
        low, high = max(low - start, 0), min(high - start, unit.master.numel())
        if low >= high:  # this rank holds nothing of the parameter
            continue
        if groups and groups[-1] == group:  # one shard with the parameter before
            low = int(shards.pop().storage_offset() - unit.master.storage_offset())
            groups.pop()
        groups.append(group)
        shards.append(nn.Parameter(unit.master[low:high], requires_grad=unit.trains))
    for group in dict.fromkeys(unit.group_of):
        if group not in groups:
            groups.append(group)
            shards.append(nn.Parameter(unit.master[:0], requires_grad=unit.trains))
    return shards, groups


def names_of(unit: Any, prefix: str) -> list[str]:
    """A name for each shard: the parameter's own (FP32 DDP), or the unit's with the group's."""
    if unit.original:
        return [prefix + name for name in unit.layout.names]
    return [f"{prefix}{unit.name}" + ("" if group is None else f".{group}") for group in unit.groups]


def gradient_norms(unit: Any, norm_type: float) -> torch.Tensor:
    """The norm of each N-th of the gradient, for N ranks, that this rank holds."""
    gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in unit.shards]
    flat = pad(torch.cat([gradient.view(-1) for gradient in gradients]), unit.master.numel())
    return torch.stack([torch.linalg.vector_norm(c, norm_type) for c in flat.split(unit.size // unit.everyone.size)])
