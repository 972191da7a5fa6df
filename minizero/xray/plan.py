"""A plan: which techniques a step uses. Each is one field, so a stack of techniques is a plan, too."""

import dataclasses
from typing import Any

import torch
from torch import nn

from minizero.engines import STAGES
from minizero.engines.units import repeated_blocks
from minizero.ranks.comm import Comm
from minizero.recompute import Checkpointed


@dataclasses.dataclass(frozen=True)
class Plan:
    """stage: of ZeRO, 0 for DDP; None for a plain module on one device."""

    stage: int | None = None
    ranks: int = 1
    dtype: torch.dtype | None = None
    sharding_factor: int | None = None
    offload: bool = False
    recompute: bool = False
    micro_batches: int = 1

    def wrap(self, module: nn.Module, comm: Comm) -> nn.Module:
        """The module as this plan trains it."""
        if self.recompute:
            module = recompute_blocks(module)
        if self.stage is None and self.dtype is None:
            return module
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.sharding_factor is not None:
            options["sharding_factor"] = self.sharding_factor
        if self.offload:
            options["offload"] = True
        return STAGES[self.stage or 0](module, comm, **options)


def recompute_blocks(module: nn.Module) -> nn.Module:
    """Put a `Checkpointed` around each repeated block. `ValueError` if there is none."""
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise ValueError("no repeated blocks: no ModuleList or Sequential of modules of one type")
    for path, block in blocks:
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent)._modules[name] = Checkpointed(block)
    return module
