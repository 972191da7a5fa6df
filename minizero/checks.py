"""What an engine refuses, and says so: modules it cannot wrap, optimizers it cannot serve.

The check before each optimizer step also marks the shards as written, so that replicas are refreshed.
"""

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# They need whole tensors, for a norm or a shape. An optimizer cannot be asked: these, and what derives from them.
NOT_ELEMENTWISE = {"LBFGS", "Adafactor", "Muon", "LARS", "LAMB", "Lamb", "Shampoo", "SOAP"}


def check_module(stage: str, module: nn.Module, dtype: torch.dtype | None) -> None:
    """`ValueError` where `module` cannot be wrapped: it must have FP32 parameters that train, on one device."""
    parameters = dict(module.named_parameters())
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{stage}: dtype must be torch.float32, float16 or bfloat16, not {dtype}")
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError(f"{stage}: the module has no parameters that train")
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"{stage}: {name} is a SyncBatchNorm, whose collectives would meet the engine's: use BatchNorm, "
                "or a norm that does not look at the batch, such as GroupNorm"
            )
    if len(devices := sorted({str(p.device) for p in parameters.values()})) > 1:
        raise ValueError(f"{stage}: parameters on mixed devices ({', '.join(devices)}): move the module to one")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"{stage}: parameters must be float32, {name} is {parameter.dtype}: "
                "call module.float(); dtype= makes the engine compute in 16 bits"
            )
        if hasattr(parameter, "wrapped_in"):
            raise ValueError(f"{stage}: {name} is wrapped in {parameter.wrapped_in} already: wrap a fresh module")
        if parameter.numel() == 0:
            raise ValueError(f"{stage}: {name} has no elements: take it out of the module")


def check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called before every optimizer step in this process: does the optimizer hold what it should?"""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        stage = getattr(parameter, "shard_of", None)
        if stage is None and hasattr(parameter, "wrapped_in"):
            raise RuntimeError(
                f"this optimizer was built before the model was wrapped in {parameter.wrapped_in}: "
                "build it afterwards, from the wrapped model's parameters()"
            )
        if stage not in (None, "DDP") and NOT_ELEMENTWISE & {kind.__name__ for kind in type(optimizer).__mro__}:
            raise RuntimeError(
                f"{type(optimizer).__name__} needs whole tensors, {stage} gives it flat shards: "
                "use DDP, or an elementwise optimizer such as AdamW"
            )
        if stage is not None:  # a fused kernel writes without telling; this tells that the replica is old
            torch.autograd.graph.increment_version(parameter)


register_optimizer_step_pre_hook(check_optimizer)
