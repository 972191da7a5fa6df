"""Against what a module can do and an engine cannot: moves, casts, copies, state dicts of a part."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch

from minizero.engines import core
from minizero.engines.any_model.unit import Unit


def refusing(words: str) -> Any:
    """A method that only raises."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: {words}")

    return refuse


class Refuses(core.Engine):
    """Methods of `nn.Module` that would be silently wrong for an engine."""

    units: Sequence[Unit]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda` and `half` call. If device and dtype are those already, nothing happens."""
        kinds = {(len(shape), unit.dtype, self.comm.device) for unit in self.units for shape in unit.layout.shapes}
        kinds |= {(buffer.dim(), buffer.dtype, buffer.device) for buffer in self.module.buffers()}
        for dim, dtype, device in kinds:
            probe = torch.empty(dim * [2], dtype=dtype, device=device)
            if fn(probe) is not probe:
                raise RuntimeError(
                    f"{type(self).__name__}: move or cast the module before wrapping it; "
                    "afterwards it stays where and what it is"
                )
        return self

    # Not of `module`, by whose apply tools set flags. What writes parameters there writes replicas of one rank.
    apply = refusing(
        "initialise the module before wrapping it; afterwards load_full_state_dict(state) sets the parameters on all "
        "ranks"
    )
    share_memory = refusing("cannot be shared with other processes: each wraps its own module")
    state_dict = refusing("each rank holds a part: call gather_state_dict() on all ranks")
    load_state_dict = refusing("call load_full_state_dict(state) on all ranks")
    requires_grad_ = refusing("freeze or unfreeze before wrapping: shards hold what trains")
    __reduce_ex__ = refusing("cannot be pickled: save gather_state_dict()")
    __deepcopy__ = refusing("cannot be copied: copy the module before wrapping it")
    # Training loops for PyTorch's DDP set it.
    require_backward_grad_sync = property(
        None,
        refusing("require_backward_grad_sync has no effect: run all passes but the last in `with model.no_sync():`"),
    )
