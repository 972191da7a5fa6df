"""Flat buffers: parameters end to end, padded, so that N ranks can each own one of N equal chunks.

    |  weight  | bias |    weight    | bias |pad|      one unit (say, a transformer block)
    |  rank 0  |  rank 1  |  rank 2  |  rank 3  |      its N chunks; rank r owns chunk r

One collective then moves a whole unit. A cut may fall inside a parameter. The optimizer sees a rank's chunk as one
parameter, a shard.
Rajbhandari et al., 2019, "ZeRO", section 5; Zhao et al., 2023, "PyTorch FSDP", section 3.2.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn


def pad(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """`tensor` with zeros appended along dimension 0 until `multiple` divides it."""
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def divide(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit, by name: of the root, "", and of each block. blocks: by name.

    A parameter belongs to the innermost block around it; one that two units share belongs to the root. (A block that
    the module has under several names, as in ALBERT, is one unit.)
    """
    names = {block: name for name, block in blocks.items()}
    block_of = {"": ""}  # by a part's name: the name of the innermost block around it
    homes: dict[int, set[str]] = {}  # of each parameter: the blocks that it is in
    for name, part in module.named_modules(remove_duplicate=False):  # a part comes after what is around it
        parent = name.rpartition(".")[0]
        block_of[name] = names[part] if part in names else block_of[parent]
        for parameter in part.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(block_of[name])
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
