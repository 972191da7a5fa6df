"""Training as in ZeRO-2, without an engine: each parameter is a unit of its own."""

from collections.abc import Iterable

import torch
from torch import nn

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm


def train_zero2(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], rate: float, comm: Comm
) -> list[float]:
    """Train with SGD. Each rank keeps its chunk of the momentum and of the averaged gradients. Return its losses.

    batches: this rank's part of each batch, as large as the others'. model(x, y): the mean loss. The parameters are
    whole on all ranks, before each step and after the last one.
    """
    shards = {
        parameter: nn.Parameter(pad(parameter.detach().reshape(-1), comm.size).chunk(comm.size)[comm.rank].clone())
        for parameter in model.parameters()
    }
    optimizer = torch.optim.SGD(shards.values(), lr=rate, momentum=0.9)

    def reduce(parameter: nn.Parameter) -> None:
        """Of the parameter's gradient, keep this rank's chunk of the average."""
        assert parameter.grad is not None
        full = pad(parameter.grad.reshape(-1), comm.size)
        shards[parameter].grad = reduce_scatter(full, comm, "mean")
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(reduce) for parameter in shards]
    losses = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        for parameter, shard in shards.items():
            whole = all_gather(shard.detach(), comm)[: parameter.numel()]
            parameter.data.copy_(whole.view(parameter.shape))
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return losses
