"""What the four stages share: *when* things happen. *What* happens then is each stage's own file.

    forward     before_forward   gather root   gather 0   forward_is_over 0   gather 1   forward_is_over 1   …
    backward    gather 1   deposit, deposit, …   reduce 1   release 1   …   reduce root   finish   release all

The root unit holds what lies outside every block, such as the embeddings. Hooks of PyTorch, in passes.py for the whole
model and in uses.py for one unit, call the methods of this file. Forward: the model begins (`before_forward`, and
`gather` of the root); a unit's module begins (`gather`), and ends (`forward_is_over`).

Backward: a *use* of a unit (one forward of its module, and the way back) opens when the gradient of its output comes
(`gather`). It closes when that of its input comes (`release`, if no other use is open). In between autograd writes the
.grad of each parameter, and a hook takes it (`deposit`). A unit is complete when no parameter owes one. Complete units
are reduced, `reduce(unit, unit.gradient.take())`, in the order of `in_order`; at the end those with unused parameters,
and what waits for them. So all ranks reduce in one order. Then what is left is released: the root, and units whose
input needed no gradient. A forward whose output needs no gradient releases all at its own end.

Prefetch, stage 3's default, keeps these moments. Its collectives run in other threads, on a GPU in other streams. In
forward the all-gather of the next unit begins at the `gather` of this one; in backward when two thirds of this unit's
gradient have come, and most of its activations are gone. The next `gather` only waits. A pass learns from the last of
its kind which unit is next. `reduce` only begins: another unit's first `deposit`, or `finish`, waits for its end.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minizero.engines.norms import let_norms_compute_in_fp32
from minizero.engines.passes import Backward, end_forward, release_all, watch_passes
from minizero.engines.refused import check_compiled, check_module, mark
from minizero.engines.shards import GroupBy
from minizero.engines.unit import Unit
from minizero.engines.units import make_units, start_buffers
from minizero.engines.uses import Uses, watch_uses
from minizero.engines.wrapped import Wrapped
from minizero.ranks.comm import Comm


class Engine(Wrapped, abc.ABC):
    """A module whose parameters live in the flat buffers of units. Base of DDP, Zero1, Zero2, Zero3.

    module: FP32 parameters, all on one device. dtype: float16 or bfloat16 computes on 16-bit copies
    and keeps FP32 masters. Of frozen parameters it keeps only the 16-bit numbers; these are what is saved, as FP32.
    Norms with running statistics compute in FP32. units: modules, by default the repeated blocks. group_by: a
    function of (name, parameter) that gives each parameter a group (say, with or without weight decay); a shard holds
    parameters of one group only. Buffers keep their dtype.

    forward moves the tensors among its arguments (also in tuples, lists and dicts) to `comm.device`, as `fully_shard`
    does. With a 16-bit `dtype` it casts those of floating point. Other objects, and outputs, stay as they are.

    The training loop is PyTorch's: an optimizer over `parameters()`, which are the shards; backward; step; zero_grad.
    """

    inside: Comm | None = None  # the ranks that a unit is sharded over; None stands for all of `comm`
    ahead: Any = None  # an `Ahead` (prefetch.py), if the stage gathers and reduces in other threads
    frees_replicas = False  # does a unit's replica come and go?
    reshard_after_forward = False  # is it away between the unit's forward and its backward?

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        dtype: torch.dtype | None = None,
        units: Sequence[nn.Module] | None = None,
        group_by: GroupBy | None = None,
    ) -> None:
        super().__init__()
        check_module(type(self).__name__, module, dtype)
        self.module, self.comm, self.dtype = module, comm, dtype
        self.sync = True  # False under no_sync
        self.backward: Backward | None = None  # the one that is running
        self.uses = Uses()  # forwards of units that run, and the uses that are open
        self.watchers: list[tuple[Callable[[], None], Callable[..., None]]] = []  # told before and after each `do`
        self.note_names()
        start_buffers(module, comm)
        self.units = make_units(module, comm, self.inside or comm, dtype or torch.float32, units, group_by)
        self.roots = [unit for unit in self.units if unit.module is None]  # gathered until backward ends
        self.in_order = [unit for unit in reversed(self.units) if unit.trains]  # reduced last block first, root last
        check_compiled(self, module.modules())
        for unit in self.units:
            full = unit.flatten()
            self.keep(unit, full if unit.trains else full.to(unit.dtype))
            unit.replica_is_fresh_now()  # in stage 3 it is stale all the same: `keep` has emptied it
            mark(unit, type(self).__name__, self.names_of)
            watch_uses(self, unit)
        watch_passes(self)
        let_norms_compute_in_fp32(module, dtype)
        self.watch_state_dicts()

    # The stage's part. One that keeps replicas leaves most of it empty.

    @abc.abstractmethod
    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        """Set the unit's `replica` and `master`, and cut its shards. full: rank 0's values, (size,), FP32.

        Those of a frozen unit have its dtype already.
        """

    @abc.abstractmethod
    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        """The unit's gradient, full and local, (size,), is complete: average it, and give the shards their part."""

    def before_forward(self) -> None:  # noqa: B027
        """A forward of the whole model begins: bring replicas up to date that are kept between steps."""

    def gather(self, unit: Unit) -> None:  # noqa: B027
        """The unit is about to be used, in forward or in backward: make its parameters whole."""

    def release(self, unit: Unit) -> None:  # noqa: B027
        """The unit is not used for now: free the memory of its parameters."""

    def forward_is_over(self, unit: Unit) -> None:  # noqa: B027
        """The unit's forward is over: stage 3 frees its parameters. Called on the stage, not on the `mover`."""

    def finish(self) -> None:  # noqa: B027
        """All units are reduced: what is still under way beside this thread must end."""

    def deposit(self, unit: Unit, number: int, gradient: torch.Tensor) -> None:
        """Parameter `number` of the unit has its gradient. Under no_sync many small ones add up: in FP32."""
        assert unit.gradient is not None
        unit.gradient.put(number, gradient, unit.dtype if self.sync else torch.float32)

    # How the hooks call a stage.

    @property
    def mover(self) -> Any:
        """Whose methods the hooks call: the stage's own, or with prefetch those of its `Ahead` (prefetch.py).

        In them an `Ahead` calls Zero3's `make_room`, `fill`, `average`, `release` and `deposit`.
        """
        return self.ahead or self

    def do(self, what: Callable[..., None], *args: Any) -> None:
        """Call `what`, of the mover or the stage, and tell those who watch. They do not hear of calls inside it."""
        for before, _ in self.watchers:
            before()
        try:
            what(*args)
        finally:
            for _, after in self.watchers:
                after(what.__name__, *args)

    @property
    def in_backward(self) -> bool:
        """Is a backward running? Also True from a backward that raised until the next forward notices."""
        return self.backward is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            release_all(self)
            raise
        end_forward(self, output)
        return output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, self.dtype if tensor.is_floating_point() else None)
