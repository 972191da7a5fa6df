"""Flat buffers: parameters end to end, padded, so that N ranks can each own one of N equal chunks.

    |  weight  | bias |    weight    | bias |pad|      one unit (say, a transformer block)
    |  rank 0  |  rank 1  |  rank 2  |  rank 3  |      its N chunks; rank r owns chunk r

One collective then moves a whole unit. A cut may fall inside a parameter. The optimizer sees a rank's chunk as one
parameter, a shard. `group_by` gives each parameter a group (say, with or without decay); then a run of equal groups is
a shard.
Rajbhandari et al., 2019, "ZeRO", section 5; Zhao et al., 2023, "PyTorch FSDP", section 3.2.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

GroupBy = Callable[[str, nn.Parameter], Any]


def pad(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """`tensor` with zeros appended along dimension 0 until `multiple` divides it."""
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def divide(module: nn.Module, blocks: Collection[str]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit, by name: of the root, "", and of each block. blocks: their names in the module.

    A parameter belongs to the innermost block around it; one that two units share belongs to the root.
    """
    homes: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = [block for block in blocks if name.startswith(f"{block}.")]
        homes.setdefault(id(parameter), set()).add(max(around, key=len, default=""))
    units: dict[str, dict[str, nn.Parameter]] = {name: {} for name in ("", *blocks)}
    for name, parameter in module.named_parameters():
        home, *others = homes[id(parameter)]
        units["" if others else home][name] = parameter
    return units


class Layout:
    """Where each parameter lies in a flat buffer of `size` elements, which `ranks` divides.

    numel: elements without the padding. offsets: where each parameter begins.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[torch.Size], ranks: int) -> None:
        self.names, self.shapes = list(names), list(shapes)
        *self.offsets, self.numel = accumulate((shape.numel() for shape in shapes), initial=0)
        self.size = -(-self.numel // ranks) * ranks  # the next multiple of `ranks`

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat buffer, each in its own shape."""
        pieces = flat[: self.numel].split([s.numel() for s in self.shapes])
        return [piece.view(s) for piece, s in zip(pieces, self.shapes, strict=True)]

    def __str__(self) -> str:
        return ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(self.names, self.shapes, strict=True))


def cut(
    layout: Layout, groups: Sequence[Any], master: torch.Tensor, start: int, trains: bool
) -> tuple[list[nn.Parameter], list[Any]]:
    """`master`, which begins at `start` of the flat buffer, as shards, and the group of each.

    groups: of each parameter. A group that this rank holds nothing of has an empty shard. So a step writes to
    something of each on every rank, and all ranks agree that the replica is old (`Unit.replica_is_stale`).
    """
    runs: list[tuple[Any, int, int]] = []  # group, and where the run begins and ends in `master`
    ends = [*layout.offsets[1:], layout.size]  # the padding goes with the last parameter
    for group, low, high in zip(groups, layout.offsets, ends, strict=True):
        low, high = max(low - start, 0), min(high - start, master.numel())
        if low < high:  # else this rank holds nothing of the parameter
            if runs and runs[-1][0] == group:  # one shard with the parameter before
                low = runs.pop()[1]
            runs.append((group, low, high))
    held = [group for group, *_ in runs]
    runs += [(group, 0, 0) for group in dict.fromkeys(groups) if group not in held]
    shards = [nn.Parameter(master[low:high], requires_grad=trains) for _, low, high in runs]
    return shards, [group for group, *_ in runs]
