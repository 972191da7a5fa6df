"""How a ring combines a chunk that comes in with this rank's own.

A mean is a sum, divided in the end. In 16 bits a part of the division comes before the sum, as in FSDP: the mean of
four times 20,000 fits in FP16, their sum does not. If all of it came first, small gradients would become 0. So about
1/√N comes first, a power of two. The numbers are then those of a sum that is divided, except for what is lost below
2^-14 in FP16: up to √N of its smallest numbers.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

COMBINE: dict[str, Callable] = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


def combining(op: str, tensor: Tensor, ranks: int) -> tuple[Callable, float]:
    """How a ring combines two chunks, and what is left to divide its result by, if it is a mean."""
    if op != "mean" or tensor.dtype.itemsize != 2:
        return COMBINE[op], ranks
    part = 2.0 ** -math.ceil(math.log2(ranks) / 2)
    return adding_parts(part), part * ranks


def adding_parts(part: float) -> Callable:
    """A `combine` for one ring that adds up part · x, and makes no scaled copy of the whole tensor."""
    arrived = itertools.count()

    def combine(incoming: Tensor, mine: Tensor, out: Tensor) -> Tensor:
        if next(arrived) == 0:  # another rank's chunk as it was; later ones are sums of parts
            incoming.mul_(part)
        return torch.add(incoming, mine, alpha=part, out=out)

    return combine
