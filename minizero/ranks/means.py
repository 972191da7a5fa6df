"""A mean of 16-bit numbers: a part of the division comes before the sum, the rest after it, as in FSDP.

The mean of four times 20,000 fits in FP16; their sum does not. If all of the division came first, small gradients would
become 0. So about 1/√N comes first, a power of two. The numbers are then those of a sum that is divided, except for
what is lost below 2^-14 in FP16: up to √N of its smallest numbers.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def part_before(op: str, tensor: Tensor, ranks: int) -> float:
    """What each summand is multiplied by: a power of two in means of 16-bit numbers, else 1."""
    return 2.0 ** -math.ceil(math.log2(ranks) / 2) if op == "mean" and tensor.dtype.itemsize == 2 else 1.0


def adding_parts(part: float) -> Callable:
    """A `combine` for one ring that adds up part · x, and makes no scaled copy of the whole tensor."""
    arrived = itertools.count()

    def combine(incoming: Tensor, mine: Tensor, out: Tensor) -> Tensor:
        if next(arrived) == 0:  # another rank's chunk as it was; later ones are sums of parts
            incoming.mul_(part)
        return torch.add(incoming, mine, alpha=part, out=out)

    return combine
