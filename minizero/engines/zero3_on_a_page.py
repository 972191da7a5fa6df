"""The whole idea of ZeRO stage 3 on a page: read this first.

A model is a list of layers, each with parameters. Each rank keeps 1/N of each layer's parameters: its shard. All
ranks gather a layer's parameters before it computes, and drop them when it has computed. Backward goes from the last
layer to the first in the same way. *Reduce*: the gradients are averaged over the ranks, and each rank keeps only the
part that belongs to its shard.

    forward     gather 0, compute 0, drop 0     gather 1, compute 1, drop 1     …
    backward    …     gather 1, backward 1, drop 1, reduce 1     gather 0, backward 0, drop 0, reduce 0

Of the activations only each layer's input is kept, so a layer computes twice (so no dropout: it would differ).
Inputs are floating point: an embedding cannot come first.
`zero3_by_hooks.py` comes next. It needs no list of layers and no loop of its own, and each layer computes once.
Rajbhandari et al., 2019, "ZeRO", section 5.3.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm


def shard(layer: nn.Module, comm: Comm) -> torch.Tensor:
    """This rank's 1/N of the layer's parameters; the layer itself forgets them."""
    flat = pad(parameters_to_vector(layer.parameters()).detach(), comm.size)  # a copy
    drop(layer)
    return flat.chunk(comm.size)[comm.rank].clone()


def drop(layer: nn.Module) -> None:
    """Free the memory of the layer's parameters."""
    for parameter in layer.parameters():
        parameter.untyped_storage().resize_(0)  # the memory goes, the shape stays


def step(layers: list, shards: list, x: torch.Tensor, loss_of: Callable, comm: Comm, learning_rate: float) -> float:
    """One step of SGD on this rank's part x of the batch; returns its loss. It updates `shards` in place."""
    inputs = []
    for layer, mine in zip(layers, shards):
        vector_to_parameters(all_gather(mine, comm), layer.parameters())  # they become views
        inputs.append(x)
        with torch.no_grad():
            x = layer(x)
        drop(layer)
    loss = loss_of(x.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, x)
    for layer, mine, kept in reversed(list(zip(layers, shards, inputs))):
        vector_to_parameters(all_gather(mine, comm), layer.parameters())
        x = kept.detach().requires_grad_()
        # Backward of this layer alone: the gradients of its parameters, and of its input, for the layer before.
        *gradients, gradient = torch.autograd.grad(layer(x), [*layer.parameters(), x], gradient)
        drop(layer)
        full = pad(parameters_to_vector(gradients), comm.size)
        mine -= learning_rate * reduce_scatter(full, comm, "mean")  # its part of the mean
    return loss.item()
