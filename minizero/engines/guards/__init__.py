"""What the engines refuse, and says so, since it would otherwise be silently wrong; and cures for others' code.

    released.py     a parameter that is read while it is empty or old
    modules.py      a module that cannot be wrapped, or that changed after wrapping; backwards that cannot be right
    optimizers.py   an optimizer that steps the wrong tensors, needs whole ones, or steps too early; hooks on parts
    wrapped.py      what a module can do and an engine cannot
    norms.py        batch norms in 16 bits

A reader of the mechanism can leave them out. Each check raises; none changes what is computed.
"""

from typing import Protocol

import torch
from torch import nn


class UnitLike(Protocol):
    """What the guards look at of a `Unit` (unit.py), which imports them."""

    name: str
    module: nn.Module | None
    parameters: list[nn.Parameter]
    shards: list[nn.Parameter]
    master: torch.Tensor
    trains: bool

    @property
    def original(self) -> bool: ...
    def point_parameters_at(self, flat: torch.Tensor | None) -> None: ...
    def own_gradient_comes(self) -> None: ...
