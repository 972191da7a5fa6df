"""ZeRO-3 on a few layers, without an engine. `step` says when something happens; `unshard` and `reshard` say what.

    forward     unshard 0, compute 0, reshard 0     unshard 1, compute 1, reshard 1     …
    backward    …     unshard 1, compute 1, reshard 1     unshard 0, compute 0, reshard 0

Rajbhandari et al., 2019, "ZeRO", section 5.3; Zhao et al., 2023, "PyTorch FSDP".
"""

from collections.abc import Callable

import torch
from torch import nn

from minizero.engines.layout import Layout, pad
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm


class Unit:
    """Parameters that are gathered, reduced and freed together.

    comm: the ranks that share the unit. shard: this rank's chunk, FP32, which the optimizer updates. replica: all
    chunks in the computing dtype; between two uses its storage is empty. parameters: what a layer computes with, views
    of the replica. version: of the shard when the replica was last made from it. uses: how many are still to go
    backward. gradient: the sum of the local gradients of a micro-batch so far. average: what the optimizer will see.
    """

    def __init__(self, values: list[torch.Tensor], comm: Comm, dtype: torch.dtype = torch.float32) -> None:
        self.comm = comm
        self.layout = Layout([""] * len(values), [value.shape for value in values], comm.size)
        flat = pad(torch.cat([value.detach().float().reshape(-1) for value in values]), comm.size)
        self.shard = flat.chunk(comm.size)[comm.rank].clone()
        self.replica = torch.empty(len(flat), dtype=dtype)
        self.replica.untyped_storage().resize_(0)
        self.parameters = [nn.Parameter(torch.empty(0, dtype=dtype)) for _ in values]
        self.version, self.uses = -1, 0
        self.gradient: torch.Tensor | None = None
        self.average: torch.Tensor | None = None

    def point_parameters_at(self, flat: torch.Tensor) -> None:
        """Make the parameters views of `flat`."""
        for parameter, view in zip(self.parameters, self.layout.views(flat), strict=True):
            parameter.data = view

    def empty_parameters(self) -> None:
        """The replica is away: nobody may use a parameter."""
        for parameter in self.parameters:
            parameter.data = self.replica.new_empty(0)


def unshard(unit: Unit) -> None:
    """The unit is about to be used, in forward or in backward: its parameters must be whole, and up to date."""
    if unit.version != unit.shard._version or not unit.replica.untyped_storage().nbytes():
        unit.replica.untyped_storage().resize_(unit.replica.nbytes)
        mine = unit.replica.chunk(unit.comm.size)[unit.comm.rank]
        mine.copy_(unit.shard)  # rounded to the computing dtype
        all_gather(mine, unit.comm, out=unit.replica)
        unit.version = unit.shard._version
    unit.point_parameters_at(unit.replica)


def reshard(unit: Unit, gradient: torch.Tensor | None) -> None:
    """A use of the unit is over: in forward, where gradient is None, or in backward.

    gradient: of this use; flat, full and local, in the computing dtype. It is the only reference to it.
    """
    # The storage is emptied, not only the parameters: autograd still holds views of it.
    unit.replica.untyped_storage().resize_(0)
    unit.empty_parameters()
    if gradient is None:
        return
    unit.gradient = gradient if unit.gradient is None else unit.gradient.add_(gradient)
    if unit.uses:
        return
    full, unit.gradient = unit.gradient, None
    mean = reduce_scatter(full, unit.comm, "mean").float()
    unit.average = mean if unit.average is None else unit.average.add_(mean)


def step(layers: list[tuple[Unit, Callable]], x: torch.Tensor, loss_of: Callable) -> None:
    """One micro-batch: its gradient is added to each unit's average. layers: in forward's order; a unit may come twice.

    A layer is a function of its input and the parameters.
    """
    passed = []
    for place, (unit, layer) in enumerate(layers):
        unshard(unit)
        before = x.detach().requires_grad_()
        after = layer(before, *unit.parameters)
        unit.uses += 1
        if place < len(layers) - 1:  # the last one goes backward at once
            reshard(unit, None)
        passed.append((unit, before, after))
        x = after
    y = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(y), y)
    for unit, before, after in reversed(passed):
        unshard(unit)
        unit.uses -= 1
        *parts, gradient = torch.autograd.grad(after, [*unit.parameters, before], gradient)
        full = [pad(torch.cat([part.reshape(-1) for part in parts]), unit.comm.size)]
        del parts
        reshard(unit, full.pop())
