"""The parameters of a module become views of one flat buffer.

Zhao et al., 2023, "PyTorch FSDP", section 3.2.
"""

from collections.abc import Sequence

import torch
from torch import nn


def flatten(parameters: Sequence[nn.Parameter], ranks: int) -> torch.Tensor:
    """One buffer with the parameters' values, in their order, and zeros behind until `ranks` divides its length.

    From now on each parameter is a view of the buffer, in its own shape. parameters: all of one dtype; a tied one comes
    twice.
    """
    distinct = list(dict.fromkeys(parameters))
    values = [parameter.detach().reshape(-1) for parameter in distinct]
    missing = -sum(len(value) for value in values) % ranks
    flat = torch.cat([*values, values[0].new_zeros(missing)])
    offset = 0
    for parameter in distinct:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return flat
