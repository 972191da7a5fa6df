"""A plan: which techniques a step uses. Each is one field, so a stack of techniques is a plan, too."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minizero.engines import STAGES
from minizero.engines.units import repeated_blocks
from minizero.ranks.comm import Comm
from minizero.recompute import Checkpointed
from minizero.xray.head import LossInChunks
from minizero.xray.scores import WithoutScores


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train one step. The default is the plain step on one device.

    stage: of ZeRO, 0 for DDP; None without an engine. dtype: to compute in, with FP32 masters. The rest as in `Zero3`.
    recompute: of every repeated block. no_scores: see scores.py. loss_in_chunks: see head.py. momentum: SGD with
    momentum in place of the optimizer. foreach: the optimizer steps all tensors at once, as PyTorch's do on a GPU.
    """

    stage: int | None = None
    ranks: int = 1
    dtype: torch.dtype | None = None
    sharding_factor: int | None = None
    offload: bool = False
    recompute: bool = False
    micro_batches: int = 1
    no_scores: bool = False
    loss_in_chunks: bool = False
    momentum: bool = False
    foreach: bool = False

    def __str__(self) -> str:
        stage = f"ZeRO-{self.stage}" if self.stage else "DDP"
        parts = [] if self.stage is None else [f"{stage} on {self.ranks} ranks"]
        parts += [f"in groups of {self.sharding_factor}"] if self.sharding_factor else []
        words = {
            "offload": self.offload,
            "BF16 with FP32 masters": self.dtype is not None,
            "recompute of each block": self.recompute,
            f"{self.micro_batches} micro-batches": self.micro_batches > 1,
            "attention without scores": self.no_scores,
            "loss in chunks": self.loss_in_chunks,
            "SGD with momentum": self.momentum,
        }
        return ", ".join(parts + [name for name, chosen in words.items() if chosen]) or "as it is"

    @property
    def learns(self) -> bool:
        """Does its first step learn something beside making the optimizer's states?"""
        return self.stage == 3 or self.no_scores or self.loss_in_chunks

    def wrap(self, module: nn.Module, comm: Comm) -> nn.Module:
        """The module as this plan trains it."""
        if self.recompute:
            recompute_blocks(module)
        if self.stage is None and self.dtype is None:
            return module
        of_stage_3: dict[str, Any] = {"sharding_factor": self.sharding_factor, "offload": self.offload}
        return STAGES[self.stage or 0](module, comm, dtype=self.dtype, **of_stage_3 if self.stage == 3 else {})

    def optimizer(self, given: Any, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of `model`. given: the user's, a function of the parameters."""
        if self.momentum:
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=self.foreach or None)
        optimizer = given(model.parameters())
        for group in optimizer.param_groups:
            if self.foreach and group.get("foreach", ...) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    @contextlib.contextmanager
    def around_the_steps(self, model: nn.Module) -> Iterator[None]:
        """What holds while the steps run."""
        with contextlib.ExitStack() as stack:
            if self.loss_in_chunks:
                stack.enter_context(LossInChunks())
            if self.no_scores:
                stack.enter_context(WithoutScores())
            yield


def recompute_blocks(module: nn.Module) -> None:
    """Put a `Checkpointed` around each repeated block. `ValueError` if there is none."""
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise ValueError("it has no repeated blocks: no ModuleList or Sequential of modules of one type")
    for path, block in blocks:
        module.set_submodule(path, Checkpointed(block))
