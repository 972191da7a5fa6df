"""How the options of stage 3 come in: each is a class of its own, put in front of `Zero3` where it is asked for.

    Zero3(module, comm, prefetch=1, offload=True)        a Zero3 whose methods are looked up in this order:
                                                         Prefetch, Offload, Zero3, Engine

So `zero3.py` reads as if there were no options, and each of them says only what it does otherwise.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minizero.engines.engine import Engine
from minizero.ranks.comm import Comm


class Mixed(Engine):
    """An engine that may be given `sharding_factor`, `prefetch` and `offload`.

    A class derived from `Zero3` that overrides what an option overrides too comes after it: give it prefetch=0.
    """

    def __new__(
        cls,
        module: nn.Module,
        comm: Comm,
        *,
        sharding_factor: int | None = None,
        prefetch: int = 1,
        offload: bool = False,
        **_: Any,
    ) -> "Mixed":
        from minizero.engines.hybrid import Hybrid  # these build on Zero3, which builds on this class
        from minizero.engines.offload import Offload
        from minizero.engines.prefetch import Prefetch

        wanted: dict[type, bool] = {
            Prefetch: prefetch != 0,
            Offload: offload,
            Hybrid: sharding_factor is not None and (sharding_factor, type(sharding_factor)) != (comm.size, int),
        }
        bases = (*(option for option, want in wanted.items() if want and not issubclass(cls, option)), cls)
        return super().__new__(type(cls.__name__, bases, {}) if len(bases) > 1 else cls)

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        sharding_factor: int | None = None,
        prefetch: int = 0,
        offload: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(module, comm, **options)  # what came as far as here is off: no option has taken it

    @torch._disable_dynamo  # what `torch.compile` around the engine would trace comes and goes
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.check_compiled(self.module if unit.module is None else unit.module for unit in self.units)
        return super().forward(*args, **kwargs)

    def check_compiled(self, modules: Iterable[nn.Module]) -> None:
        """`ValueError` if a unit would be gathered and released inside what one of `modules` compiled."""
        units = {unit.module for unit in self.units}
        for module in modules:
            inside: set[Any] = set()
            if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile(): its hooks are in it, too
                inside = set(module.modules()) | ({None} if module is self.module else set())
            elif hasattr(module, "_orig_mod"):  # torch.compile(module): its hooks are around it
                inside = set(module.modules()) - {module}
            if inside & units:
                raise ValueError(
                    f"{type(self).__name__}: a compiled {type(module).__name__} contains units, whose parameters come "
                    "and go: wrap the plain module, with blocks[i] = torch.compile(blocks[i]) for each block"
                )
