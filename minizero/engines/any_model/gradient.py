"""One unit's gradient on this rank, from the first parameter that has one to the average over the ranks.

    put, put, … ──► take ──► (averaged over the ranks) ──► Unit.set_gradient        a backward
    put, put, … ──► show ──► begin ──► put, put, … ──► take ──► …                   under no_sync, then outside

Backward brings the parameters' gradients one by one, each to its place in one flat buffer, so that one collective
reduces the whole unit. A parameter that was not used leaves zeros in its place.

no_sync, from its first backward to the step. `Wrapped.no_sync` clears the engine's `sync`. `begin_gradients` copies
that to `sends`, which holds for the whole backward. If it is False, `bring` lets `put` add in FP32,
`reduce_what_is_complete` does nothing, and `end_backward` sends nothing. It calls `show`: the shards' .grad become
views of this rank's sum (with offload on a GPU: copies), so that zero_grad() can drop it. In the next backward
`begin` looks whether they are still there, and lets the sum go on, or drops it. The first backward outside sends:
`take` gives the sum in the unit's dtype, and that is averaged. Before then guards/no_sync.py refuses a step, and
clipping.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minizero import torch_private
from minizero.memory import tag


class LocalGradient:
    """A unit's gradient so far. full: (size,), this rank's sum; None before the first `put` and after `take`.

    shown: from `show` to `begin`, for each shard: its .grad, the `_version` of that (PyTorch's count of in-place
    writes), and its .grad without the sum.
    """

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        self.drop()

    def drop(self) -> None:
        self.full: Tensor | None = None
        self.places: list[Tensor] = []
        self.written: set[int] = set()  # the places that a gradient has come to; the others become zero in the end
        self.shown: list[tuple[Any, int, Tensor | None]] = []
        self.goes_on = False  # is a sum of backwards before in it?

    def begin(self) -> None:
        """A backward begins. What the shards' .grad holds, and what becomes of that:

        None, after zero_grad()         a sum that no_sync left is dropped
        an average of another backward  `Unit.set_gradient` will add the two
        a view of what no_sync left     that sum goes on; until the backward's end .grad is that of before the sum
        """
        shards = self.unit.shards
        if not self.shown:
            return
        if all(shard.grad is None for shard in shards):
            return self.drop()
        whole = self.unit.unsharded  # all of the sum is shown: what the loop made of it counts
        for shard, (view, _, before) in zip(shards, self.shown, strict=True):
            dropped = whole and shard.grad is None
            if whole and shard.grad is not view:
                view.copy_(0 if dropped else shard.grad)
            shard.grad = None if dropped else before
        self.shown, self.goes_on = [], True  # if this backward raises, the next forward drops the sum (engine.py)

    def put(self, number: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """The gradient of parameter `number` goes to its place. dtype: of the buffer, if this put makes it."""
        if self.full is None:
            self.full = torch.empty(self.unit.size, dtype=dtype, device=gradient.device)
            tag(self.full, "gradients")
            self.places = self.unit.layout.views(self.full)
        if number in self.written:  # in a backward before under no_sync, or in one inside this (reentrant checkpoint)
            self.places[number].add_(gradient)
        else:  # a copy costs a third of adding to zeros
            self.places[number].copy_(gradient)
            self.written.add(number)

    def zero_the_rest(self, full: Tensor) -> None:
        """What no gradient has come to is zero, and so is the padding."""
        for number in {*range(len(self.places))} - self.written:
            self.places[number].zero_()
        full[self.unit.layout.numel :].zero_()

    def take(self) -> Tensor:
        """The full gradient in the unit's dtype, to be averaged. From now on only the caller holds it."""
        full = self.full
        if full is None:  # unused on this rank, but perhaps not on others
            full = torch.zeros(self.unit.size, dtype=self.unit.dtype, device=self.unit.comm.device)
        self.zero_the_rest(full)
        self.drop()
        full = full.to(self.unit.dtype)
        tag(full, "gradients")
        return full

    def show(self) -> None:
        """A backward under no_sync is over: let the shards' .grad be views of the sum so far."""
        if self.full is None:  # unused on this rank
            return
        self.zero_the_rest(self.full)
        mine = self.full if self.unit.unsharded else self.unit.chunk(self.full)
        for shard, piece in zip(self.unit.shards, pieces(mine, self.unit.shards), strict=True):
            before, shard.grad = shard.grad, piece.to(shard.device)
            view: Any = shard.grad
            self.shown.append((view, view._version, before))


def pieces(flat: Tensor, shards: Sequence[nn.Parameter]) -> list[Tensor]:
    """A flat buffer cut into pieces of the shards' shapes. Padding at its end belongs to no shard, and is left out."""
    with torch_private.as_plain_tensors():  # a shard answers each question in Python
        sizes = [shard.numel() for shard in shards]
        return [piece.view(shard.shape) for piece, shard in zip(flat[: sum(sizes)].split(sizes), shards, strict=True)]
