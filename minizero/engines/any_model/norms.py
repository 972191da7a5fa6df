"""Norms that keep running statistics, as batch norms do, compute in FP32 while the rest computes in 16 bits.

PyTorch's MixedPrecision does so too. A running mean takes up a tenth of a new value, which 16 bits would round off.
"""

from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.any_model.uses import converted


def keeps_statistics(module: nn.Module) -> bool:
    """Does it keep running statistics, as batch norms do? They are FP32 buffers, and need FP32 inputs and weights."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    its_own = isinstance(module, torch_private.BatchNorm) or not [*module.children()]  # not its parts'
    return its_own and any(name.startswith("running_") for name in names)


def let_norms_compute_in_fp32(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast what each such norm in `module` is given to FP32, and what it returns back to `dtype`."""

    def cast(value: Any, to: torch.dtype | None) -> Any:
        return converted(value, lambda x: x.to(to) if x.is_floating_point() else x)

    for part in module.modules() if dtype in (torch.float16, torch.bfloat16) else ():
        if keeps_statistics(part):
            # First and last of its hooks: a unit that is this norm itself has FP32 inputs and outputs.
            part.register_forward_pre_hook(lambda _, *call: cast(call, torch.float32), prepend=True, with_kwargs=True)
            part.register_forward_hook(lambda _, __, output: cast(output, dtype))
