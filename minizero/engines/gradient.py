"""One unit's gradient on this rank, from the first parameter that has one to the average over the ranks.

    Unit.begin_gradient ──► put, put, … ──► take ──► (averaged over the ranks) ──► Unit.set_gradient
    backward begins         Engine.deposit  reduce_next (passes.py), then the stage's `reduce`

Backward brings the parameters' gradients one by one, each to its place in one flat buffer, so that one collective
reduces the whole unit. A parameter that was not used leaves zeros in its place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minizero.engines.layout import Layout
from minizero.memory import tag


class LocalGradient:
    """It lives from the beginning of a backward until the shards have their average.

    full: (size,), this rank's sum; None before the first `put`. Under no_sync several backwards add to it. before: the
    shards' .grad without the sum. shown: each .grad's `_version` when no_sync.py last set it to show the sum.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        self.full: Tensor | None = None
        self.places: list[Tensor] = []
        self.unwritten: dict[int, Tensor] = {}  # the places that nothing came to yet, and the padding
        self.before: list[Tensor | None] = []
        self.shown: list[int] = []

    def put(self, number: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """The gradient of parameter `number` goes to its place. dtype: of the buffer, if this put makes it."""
        if self.full is None:
            self.full = torch.empty(self.layout.size, dtype=dtype, device=self.device)
            tag(self.full, "gradients")
            self.places = self.layout.views(self.full)
            self.unwritten = dict(enumerate([*self.places, self.full[self.layout.numel :]]))
        if number in self.unwritten:  # a copy costs a third of adding to zeros
            self.unwritten.pop(number).copy_(gradient)
        else:  # it came before: in an earlier backward under no_sync, or in one inside this one (recompute)
            self.places[number].add_(gradient)

    def zero_unwritten(self) -> None:
        """The gradient of a parameter that was not used is zero."""
        for place in self.unwritten.values():
            place.zero_()

    def take(self) -> Tensor:
        """The full gradient in the unit's dtype, to be averaged. From now on only the caller holds it."""
        if self.full is None:  # unused on this rank, but perhaps not on others
            self.full = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        self.zero_unwritten()
        full, self.full, self.places, self.unwritten = self.full.to(self.dtype), None, [], {}
        tag(full, "gradients")
        return full


def pieces(flat: Tensor, shards: Sequence[nn.Parameter]) -> list[Tensor]:
    """A flat buffer cut into pieces of the shards' shapes. Padding at its end belongs to no shard, and is left out."""
    sizes = [shard.numel() for shard in shards]
    return [piece.view(shard.shape) for piece, shard in zip(flat[: sum(sizes)].split(sizes), shards, strict=True)]
