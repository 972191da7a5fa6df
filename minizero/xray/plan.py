"""A plan: which techniques a step uses. Each is a field, so a stack of techniques is a plan, too.

Here stands what each of them does to a step. techniques.py says what it costs, and how to write it down.
"""

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from minizero.engines import STAGES
from minizero.engines.any_model.engine import AnyModel
from minizero.engines.any_model.units import repeated_blocks
from minizero.ranks.comm import Comm
from minizero.recompute import Checkpointed
from minizero.xray.hugging_face import quantize, with_caches


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train one step. The default is the plain step on one device.

    stage: of ZeRO, 0 for DDP; None without an engine. dtype: to compute in, with FP32 masters. sharding_factor,
    reshard_after_forward, offload: as in `Zero3`. recompute: of every repeated block. flash: see scores.py.
    chunked_loss: see head.py. momentum, eight_bit: SGD with momentum, or `EightBit`, is the optimizer. four_bit:
    frozen matrices are `Quantized`.
    """

    stage: int | None = None
    ranks: int = 1
    sharding_factor: int | None = None
    reshard_after_forward: bool = True
    offload: bool = False
    dtype: torch.dtype | None = None
    recompute: bool = False
    micro_batches: int = 1
    flash: bool = False
    chunked_loss: bool = False
    momentum: bool = False
    eight_bit: bool = False
    four_bit: bool = False

    def wrap(self, module: nn.Module, comm: Comm) -> nn.Module:
        """The module as this plan trains it."""
        if self.four_bit and not quantize(module, 4):
            raise ValueError("it trains all its matrices: only those that are frozen, as under LoRA, can be in 4 bits")
        if self.recompute:
            for config in with_caches(module):
                config.use_cache = False
            recompute_blocks(module)
        if self.stage is None and self.dtype is None:
            return module
        names = ("sharding_factor", "reshard_after_forward", "offload") if self.stage == 3 else ()
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        return STAGES[self.stage or 0](module, comm, dtype=self.dtype, **options)

    @property
    def needs_its_loop(self) -> bool:
        """Does it change the loop itself, so that the user's own cannot be run?"""
        engine = self.stage is not None or self.dtype is not None
        return engine or self.micro_batches > 1 or self.momentum or self.eight_bit

    def optimizer(self, given: Any, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of `model`. given: the user's, of the module inside, or a function of the parameters."""
        if self.momentum:
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if self.eight_bit:
            return EightBit(model.parameters(), {})
        if not isinstance(given, torch.optim.Optimizer):
            return given(model.parameters())
        if isinstance(model, AnyModel):  # whose parameters are others
            known = inspect.signature(type(given)).parameters
            return type(given)(model.parameters(), **{k: v for k, v in given.defaults.items() if k in known})
        return given


def recompute_blocks(module: nn.Module) -> None:
    """Put a `Checkpointed` around each repeated block. `ValueError` if there is none."""
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise ValueError("it has no repeated blocks: no ModuleList, and no Sequential of modules of one type")
    for path, block in blocks:
        module.set_submodule(path, Checkpointed(block))


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step all tensors at once, as it does on a GPU, unless its user has chosen."""
    for group in optimizer.param_groups:
        own = isinstance(optimizer, torch.optim.Adafactor) or group.get("fused")  # Adafactor does not, by default
        if group.get("foreach", ...) is None and not own:
            group["foreach"] = True


class EightBit(torch.optim.Optimizer):
    """The states of 8-bit Adam, without its steps: counted, not run (Dettmers et al., 2022; sizes of bitsandbytes).

    Two moments of a byte for each number, and a scale in FP32 for each 256. Tensors below 4,096 numbers stay in FP32.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let the states begin to exist."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None and not self.state[parameter]:
                n = parameter.numel()
                kinds = [(n, torch.uint8), (-(-n // 256), torch.float32)] if n >= 4096 else [(n, torch.float32)]
                moments = [[parameter.new_zeros(m, dtype=dtype) for m, dtype in kinds] for _ in range(2)]
                self.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), moments))
