"""A unit of any model: what it has beside that of core.py.

    replica   may be in 16 bits: then `master` is FP32, memory of its own, and rounded when the replica is filled
    shards    one, or with `group_by` one for each run of equal groups; in FP32 DDP the module's own parameters
    gradient  this rank's, while backward brings it, and longer under no_sync: a `LocalGradient` (gradient.py)
    released  parameters that are away, or old, are empty, and a use of them is an error

The master of a frozen unit has the computing dtype.

16 bits, from input to step: `AnyModel.forward` casts the inputs. The replica is rounded from the master (`keep`,
`gather` and `fill` of the stages). A gradient's buffer is 16-bit, under no_sync FP32 (gradient.py). It is averaged
in 16 bits (ranks/combining.py). `set_gradient` makes it FP32 for the optimizer, which steps the master. norms.py
lets batch norms compute in FP32.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines import core
from minizero.engines.any_model.gradient import LocalGradient, pieces
from minizero.engines.any_model.guards.shards import Piece, Shard
from minizero.engines.any_model.released import Released
from minizero.engines.layout import pad
from minizero.memory import tag
from minizero.ranks.comm import Comm

GroupBy = Callable[[str, nn.Parameter], Any]  # a parameter's group: say, with or without weight decay


class Unit(core.Unit):
    """parameters: by name, all trained or all frozen.

    everyone: all ranks, as the engine's `comm`; their number divides `size`. comm: the ranks that the unit is sharded
    over: all, unless a sharding factor makes groups.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        everyone: Comm,
        comm: Comm,
        dtype: torch.dtype,
        group_by: GroupBy | None,
    ) -> None:
        super().__init__(name, module, parameters, everyone)
        self.everyone, self.comm, self.dtype = everyone, comm, dtype
        self.kinds = [type(parameter) for parameter in self.parameters]
        self.trains = self.parameters[0].requires_grad
        self.group_of = [group_by(n, p) if group_by else None for n, p in parameters.items()]  # of each parameter
        self.groups: list[Any] = []  # of each shard
        self.gradient = LocalGradient(self)
        self.uses: weakref.WeakSet[Any] = weakref.WeakSet()  # to which a backward may come
        # Only if `original` (below): a parameter's .grad of before, by number; those of the backward that runs, with
        # their counts of writes, as it began; autograd's nodes, so that hooks stay.
        self.aside: dict[int, torch.Tensor | None] = {}
        self.before: list[tuple[torch.Tensor | None, int]] = []
        self.nodes: list[Any] = []

    @property
    def unsharded(self) -> bool:
        """Does this rank's optimizer hold all of the unit (DDP, or one rank)?"""
        return self.master.numel() == self.size

    @property
    def original(self) -> bool:
        """Are the shards the module's own parameters (DDP in FP32)? Then autograd and the optimizer share a .grad."""
        return self.shards is self.parameters

    @property
    def is_empty(self) -> bool:
        """Are the module's parameters empty, since the unit is away, or its replica is old?"""
        return isinstance(self.parameters[0], Released)

    def from_rank_0(self, comm: Comm, values: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        full = super().from_rank_0(comm, values)
        if not self.trains:
            full = full.to(self.dtype)
            tag(full, "parameters")
        return full

    def point_parameters_at(self, flat: torch.Tensor) -> None:
        for parameter, kind in zip(self.parameters, self.kinds, strict=True):
            parameter.__class__ = kind
        super().point_parameters_at(flat)
        self.writes = [parameter._version for parameter in self.parameters]  # `check_writes` finds later ones

    def empty_parameters(self) -> None:
        """The unit is away, or its replica is old: nobody may read the module's parameters."""
        empty = torch.empty(0, 0, dtype=self.dtype, device=self.comm.device)
        for parameter, kind in zip(self.parameters, self.kinds, strict=True):
            parameter.__class__ = kind  # so that .data can be set
            parameter.data = empty
            parameter.__class__ = Released

    def cut_shards(self) -> None:
        """Make the optimizer's parameters from `master`: `shards`, and for each its value of `group_by`, `groups`.

        A group that this rank holds nothing of has an empty shard. So a step writes to something of each on every rank,
        and all ranks agree that the replica is old (`replica_is_stale`).
        """
        tag(self.master, "parameters" if self.dtype == self.master.dtype else "optimizer")
        start = 0 if self.unsharded else self.comm.rank * self.master.numel()
        runs: list[tuple[Any, int, int]] = []  # group, and where the run begins and ends in `master`
        ends = [*self.layout.offsets[1:], self.size]  # the padding goes with the last parameter
        for group, low, high in zip(self.group_of, self.layout.offsets, ends, strict=True):
            low, high = max(low - start, 0), min(high - start, self.master.numel())
            if low < high:  # else this rank holds nothing of the parameter
                if runs and runs[-1][0] == group:  # one shard with the parameter before
                    low = runs.pop()[1]
                runs.append((group, low, high))
        held = [group for group, *_ in runs]
        runs += [(group, 0, 0) for group in dict.fromkeys(self.group_of) if group not in held]
        self.groups = [group for group, *_ in runs]
        self.shards = [nn.Parameter(self.master[low:high], requires_grad=self.trains) for _, low, high in runs]

    def shard_names(self) -> list[str]:
        """A name for each shard: the parameter's own (FP32 DDP), or the unit's with the group's."""
        if self.original:
            return self.layout.names
        return [self.name if group is None else f"{self.name}.{group}" for group in self.groups]

    # The gradient.

    def note_gradients(self) -> None:
        """A backward begins: what do the parameters have as .grad, if these are the optimizer's?"""
        its = self.parameters if self.original else []
        self.before = [(p.grad, -1 if p.grad is None else p.grad._version) for p in its]

    def before_and_written(self, number: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the .grad of parameter `number`: what was there before this backward, and what a Function has added."""
        now = self.parameters[number].grad
        before, version = self.before[number] if self.before else (now if self.original else None, -1)
        if now is before:
            if self.before and now is not None and now._version != version:
                raise RuntimeError(
                    f"{self.layout.names[number]}: its .grad was written to in backward, in place, and held a gradient "
                    "already: return the gradient from the Function, or zero_grad() before this backward"
                )
            return now, None
        return before, now if before is None or now is None else now - before

    def set_gradient(self, average: torch.Tensor, full: torch.Tensor | None = None) -> None:
        """Let the shards' .grad be the average plus what they have, and call their hooks as autograd would.

        average: flat, perhaps with padding. full: stages 0 and 1 keep the full gradient as long as .grad, until
        zero_grad(). Nobody reads it; the memory ledger shows it. What was averaged in 16 bits becomes FP32 here, for
        the optimizer.
        """
        flat = average.float()
        tag(flat, "gradients")
        for shard, piece in zip(self.shards, pieces(flat, self.shards), strict=True):
            hooks, after = ([], []) if self.original else torch_private.gradient_hooks(shard)
            if hooks and type(shard) is Shard:  # a hook may take its norm
                piece.__class__ = Piece
            for hook in hooks:
                piece = piece if (changed := hook(piece)) is None else changed
            # .grad: of an earlier backward, or of what else the loss makes of this shard, such as a penalty
            piece = piece if shard.grad is None else piece.add_(shard.grad)
            piece.full = full  # type: ignore[attr-defined]
            if type(shard) is Shard:
                piece.__class__ = Piece
            shard.grad = piece
            for hook in after:  # such as an optimizer's step, which frees the gradient at once
                hook(shard)

    def gradient_norms(self, norm_type: float) -> torch.Tensor:
        """One norm for each N-th of the gradient, for N ranks, that this rank holds (DDP: N of them)."""
        with torch_private.as_plain_tensors():
            gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in self.shards]
            flat = pad(torch.cat([gradient.view(-1) for gradient in gradients]), self.master.numel())
            chunks = flat.split(self.size // self.everyone.size)
            return torch.stack([torch.linalg.vector_norm(chunk, norm_type) for chunk in chunks])
