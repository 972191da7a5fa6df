"""One unit's gradient on this rank, from the first parameter that has one to the average over the ranks.

    put, put, … ──► take ──► (averaged over the ranks) ──► Unit.set_gradient        a backward
    put, put, … ──► show ──► go_on ──► put, put, … ──► take ──► …                   under no_sync, then outside

Backward brings the parameters' gradients one by one, each to its place in one flat buffer, so that one collective
reduces the whole unit. A parameter that was not used leaves zeros in its place.

Under no_sync several backwards add up, and nothing is sent. Between two of them the shards' .grad are views of this
rank's sum (with offload on a GPU: copies of it), so that zero_grad() can drop it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minizero.engines.layout import Layout
from minizero.memory import tag


class LocalGradient:
    """It lives from the beginning of a backward until the shards have their average.

    full: (size,), this rank's sum; None before the first `put` and after `take`. chunk: gives the part that the shards
    show; None if they show all. before: the shards' .grad without the sum. shown: each .grad's `_version` (PyTorch's
    count of in-place writes) after `show`, until `go_on`.
    """

    def __init__(
        self, layout: Layout, shards: Sequence[nn.Parameter], chunk: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.layout, self.shards, self.chunk = layout, shards, chunk
        self.full: Tensor | None = None
        self.places: list[Tensor] = []
        self.unwritten: dict[int, Tensor] = {}  # the places that nothing came to yet, and the padding
        self.before: list[Tensor | None] = []
        self.shown: list[int] = []

    def put(self, number: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """The gradient of parameter `number` goes to its place. dtype: of the buffer, if this put makes it."""
        if self.full is None:
            self.full = torch.empty(self.layout.size, dtype=dtype, device=gradient.device)
            tag(self.full, "gradients")
            self.places = self.layout.views(self.full)
            self.unwritten = dict(enumerate([*self.places, self.full[self.layout.numel :]]))
        if number in self.unwritten:  # a copy costs a third of adding to zeros
            self.unwritten.pop(number).copy_(gradient)
        else:  # it came before: in an earlier backward under no_sync, or in one inside this one (reentrant checkpoint)
            self.places[number].add_(gradient)

    def zero_unwritten(self) -> None:
        """The gradient of a parameter that was not used is zero."""
        for place in self.unwritten.values():
            place.zero_()

    def take(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The full gradient in the unit's dtype, to be averaged. From now on only the caller holds it."""
        if self.full is None:  # unused on this rank, but perhaps not on others
            self.full = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self.zero_unwritten()
        full, self.full, self.places, self.unwritten = self.full.to(dtype), None, [], {}
        tag(full, "gradients")
        return full

    def show(self) -> None:
        """A backward under no_sync is over: let the shards' .grad be views of the sum so far."""
        assert self.full is not None
        self.zero_unwritten()
        self.before = [shard.grad for shard in self.shards]
        mine = self.chunk(self.full) if self.chunk else self.full
        for shard, piece in zip(self.shards, pieces(mine, self.shards), strict=True):
            shard.grad = piece.to(shard.device)
            shard.grad.held_back = True  # type: ignore[attr-defined]  # an optimizer may not step with it
        self.shown = [shard.grad._version for shard in self.shards]  # type: ignore[union-attr]

    def go_on(self) -> None:
        """The next backward begins. Until its end .grad is that of before the sum."""
        self.shown = []
        for shard, before in zip(self.shards, self.before, strict=True):
            shard.grad = before


def pieces(flat: Tensor, shards: Sequence[nn.Parameter]) -> list[Tensor]:
    """A flat buffer cut into pieces of the shards' shapes. Padding at its end belongs to no shard, and is left out."""
    sizes = [shard.numel() for shard in shards]
    return [piece.view(shard.shape) for piece, shard in zip(flat[: sum(sizes)].split(sizes), shards, strict=True)]
