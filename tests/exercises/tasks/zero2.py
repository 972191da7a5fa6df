"""A backward of ZeRO-2 on flat gradients, without an engine.

Rajbhandari et al., 2019, "ZeRO", section 5.2 (P_os+g).
"""

from collections.abc import Iterator

import torch

from minizero.engines.layout import pad
from minizero.ranks.collectives import reduce_scatter
from minizero.ranks.comm import Comm


def backward(arrivals: Iterator[tuple[str, torch.Tensor]], shards: dict[str, torch.Tensor], comm: Comm) -> None:
    """Let `shards` have, by unit, this rank's chunk of the averaged gradient: 1/N of it, padded, in FP32.

    arrivals: the units' names and gradients in the order of backward, the same on all ranks. A gradient is flat, full
    and local. The iterator computes one when it is asked for it, and not before. shards: what earlier micro-batches of
    the same step have left there; of the first one, nothing.
    """
    for name, gradient in arrivals:
        full = pad(gradient, comm.size)  # a copy, if N does not divide it
        del gradient
        mine = reduce_scatter(full, comm, "mean", label=name).float()
        del full  # before the next one is computed
        shards[name] = shards[name].add_(mine) if name in shards else mine
