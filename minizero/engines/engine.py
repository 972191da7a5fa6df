"""What the four stages share: *when* things happen. *What* happens then is each stage's own file.

    forward     before_forward   gather root   gather 0   forward_is_over 0   gather 1   forward_is_over 1   …
    backward    gather 1   bring, bring, …   reduce 1   release 1   …   reduce root   finish   release all
    step        `mark_as_old` (guards/optimizers.py): replicas of Zero1, Zero2, 16-bit DDP: old until before_forward

The root unit holds what lies outside every block, such as the embeddings. Its frozen parameters are a unit, too. Hooks
of PyTorch call the methods of this file. Forward: the model begins (`before_forward`, and `gather` of the root); a
unit's module begins (`gather`), and ends (`forward_is_over`).

Backward: a *use* of a unit is one forward of its module and its backward (uses.py). The gradient of its output opens it
(`gather`). That of its input closes it (`release`, if no other use is open). In between autograd writes the .grad of
each parameter, and a hook takes it (`arrived`). A unit is complete when all its parameters have a gradient. Complete
units are reduced in the order of `in_order`, so that all ranks have one order. Those that never get complete are
reduced at the end; unused parameters count as zero. A unit is released later than in zero3_by_hooks.py: when its input
has its gradient, and not when its last parameter has, since `w.detach()` needs w and brings none. The end of backward
releases the rest: the root, and units whose input needs no gradient. If there can be no backward, the end of the
forward releases all.

The path of one gradient, in seven steps:

    engine.py       arrived             autograd has written a parameter's .grad: this hook takes it away
                    Backward.bring      the unit waits for one parameter less
    gradient.py     LocalGradient.put   copied to its place in the unit's flat buffer
    engine.py       Backward.reduce_next    the unit waits for none: LocalGradient.take
    zero1.py, zero2.py  reduce          the collective, and set_gradient, at once
    zero3.py        Zero3.reduce, average   between them lane.reduce: at once (lane.py), or, by default, in a thread of
                                        its own beside the computation (prefetch.py)
    collectives.py  reduce_scatter      over comm.py: each rank has its chunk of the average
    unit.py         Unit.set_gradient   the shards' .grad, and their hooks (with prefetch later, in Ahead.finish)

That of one gather: `begin_forward` or `Backward.begin` (the root), `use_begins` or `open_use` here, Zero3.gather,
lane.gather, make_room and fill, point_parameters_at. With prefetch, make_room and fill begin a unit earlier
(Ahead.start_following).
"""

import abc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.guards.modules import (
    check_compiled,
    check_complete,
    check_gradient,
    check_module,
    check_unchanged,
    check_writes,
    names_and_parameters,
)
from minizero.engines.guards.no_sync import check_untouched
from minizero.engines.guards.norms import let_norms_compute_in_fp32, name_buffers
from minizero.engines.guards.optimizers import mark
from minizero.engines.guards.wrapped import Ours
from minizero.engines.lane import Now
from minizero.engines.layout import GroupBy
from minizero.engines.unit import Unit
from minizero.engines.units import make_units, start_buffers
from minizero.engines.uses import Use, converted, leaves_as_views, tensors_in
from minizero.engines.wrapped import Wrapped
from minizero.ranks.comm import Comm


class Engine(Wrapped, abc.ABC):
    """A module whose parameters live in the flat buffers of units. Base of DDP, Zero1, Zero2, Zero3.

    module: FP32 parameters, all on one device. dtype: float16 or bfloat16 computes on 16-bit copies and keeps FP32
    masters. Those of frozen parameters are kept in 16 bits, and saved as FP32. Norms with running
    statistics compute in FP32. Buffers keep their dtype. units: modules, by default the repeated blocks. group_by: a
    function of (name, parameter) that gives each parameter a group (say, with or without weight decay); a shard holds
    parameters of one group only.

    Complete the module before you wrap it: initialise, add, replace and freeze parameters first. A gradient set to None
    on a parameter of the module freezes nothing; the shards' gradients count.

    forward moves the tensors among its arguments (also in tuples, lists and dicts) to `comm.device`, as `fully_shard`
    does. With a 16-bit `dtype` it casts those of floating point. Other objects, and outputs, stay as they are. A list
    or dict is copied only if a tensor in it changes: else the caller finds there what the module writes into it.

    The training loop is PyTorch's: an optimizer over `parameters()`, which are the shards; backward; step; zero_grad.
    Hooks on the shards (`register_hook`, `register_post_accumulate_grad_hook`) are called with the average.
    """

    inside: Comm | None = None  # the ranks that a unit is sharded over; None stands for all of `comm`
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
        self.name = type(self).__name__
        check_module(self.name, module, comm.rank, dtype)
        self.module, self.comm, self.dtype = module, comm, dtype
        self.sync = True  # False under no_sync
        self.backward: Backward | None = None  # the one that is running
        self.passes: set[str] = set()  # what has run: "forward" (one that can be gone back through), "backward"
        self.running: list[tuple[Unit, Use]] = []  # forwards of units, the innermost last
        self.open_uses: Counter[Unit] = Counter()  # in backward
        self.began = -1  # autograd's number of the operation that the last forward began with
        self.lane = Now(self)  # says when stage 3 gathers and reduces (lane.py); by default Zero3 takes another
        self.as_wrapped = names_and_parameters(module)
        names = self.names_in(self.own_state()[0])
        start_buffers(module, comm)
        self.units = make_units(module, comm, self.inside or comm, dtype or torch.float32, units, group_by)
        self.roots = [unit for unit in self.units if unit.module is None]  # gathered until backward ends
        self.in_order = [unit for unit in reversed(self.units) if unit.trains]  # reduced last block first, root last
        if self.frees_replicas:
            check_compiled(self.name, module, self.units)
        for unit in self.units:
            unit.layout.names = [names[id(parameter)][0] for parameter in unit.parameters]  # those that it is saved by
            full = unit.flatten()
            self.keep(unit, full if unit.trains else full.to(unit.dtype))
            unit.replica_is_fresh_now()  # in stage 3 it is stale all the same: it has no memory
            mark(unit, self)
            self.watch_uses(unit)
        self.watch_passes()
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
        """The unit's gradient is complete here, (size,): average it over the ranks, and give the shards their part."""

    def before_forward(self) -> None:  # noqa: B027
        """A forward of the whole model begins: bring replicas up to date that are kept between steps."""

    def gather(self, unit: Unit) -> None:  # noqa: B027
        """The unit is about to be used, in forward or in backward: make its parameters whole."""

    def release(self, unit: Unit) -> None:  # noqa: B027
        """The unit is not used for now: free the memory of its parameters."""

    def keep_writes(self, unit: Unit) -> None:
        """Keep what forward wrote to the parameters: stage 3 copies it, other stages have it in the master already."""
        check_writes(self.name, unit)

    def forward_is_over(self, unit: Unit) -> None:  # noqa: B027
        """The unit's forward is over: stage 3 frees its parameters."""

    # A forward of the whole model.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = converted((args, kwargs), self._cast)
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self.release_all()
            name_buffers(self.name, self.module, self.dtype, error)
            raise

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, self.dtype if tensor.is_floating_point() else None)

    def watch_passes(self) -> None:
        """Register the hooks by which a forward begins, and those of the parameters, which bring their gradients."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is self.module:  # and no copy of it, which has its hooks, too
                self.begin_forward()
                return leaves_as_views(args, kwargs)

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if module is self.module:
                self.end_forward(output)

        self.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(Ours(after))
        for unit in self.in_order:
            for number, parameter in enumerate(unit.parameters):
                aside: list[torch.Tensor | None] = []  # filled by DDP in FP32 alone: see `put_aside`
                if unit.original:  # DDP in FP32: autograd would add to the .grad of before
                    unit.nodes.append(put_aside(parameter, aside))
                parameter.register_post_accumulate_grad_hook(arrival(self, unit, number, aside))

    @torch_private.never_compiled  # there is nothing to compute
    def begin_forward(self) -> None:
        """Clear up what an exception left behind, and gather what the whole forward needs."""
        check_complete(self.name, self.module, self.as_wrapped, self.units)
        if self.frees_replicas:
            check_compiled(self.name, self.module, self.units)
        if torch_private.current_backward() == -1:  # no backward runs here, so this is no recompute inside one
            if self.backward is not None:  # the last backward raised
                self.backward = None
                self.release_all()
                for unit in self.in_order:  # .grad stays as it was, but for units that were reduced already
                    unit.gradient = None  # what this backward had brought, and the sum of no_sync
            self.running.clear()  # what is left there ended by an exception
        self.began = torch_private.next_operation()  # of this forward, if it makes a graph
        self.lane.begin_forward()
        self.refresh()
        for unit in self.roots:
            self.gather(unit)

    def refresh(self) -> None:
        """Bring replicas up to date, and make parameters views of them again: a step empties them (`mark_as_old`)."""
        kept = [] if self.frees_replicas else self.units
        old = [unit for unit in kept if unit.replica_is_stale() or unit.is_empty]
        self.before_forward()
        for unit in old:
            unit.point_parameters_at(unit.replica)

    def end_forward(self, output: Any) -> None:
        """Keep what forward wrote to parameters, and let the gradient of a tensor in `output` begin the backward."""
        for unit in self.units:
            if not unit.is_empty:
                self.keep_writes(unit)
        grown = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        versions = {unit: unit.version for unit in self.roots}  # of masters; `open_use` checks other units'

        def begin(_: torch.Tensor) -> None:
            self.running_backward(versions)

        for tensor in grown:
            self.passes.add("forward")
            tensor.register_hook(begin)
        if not grown and self.began == torch_private.next_operation():  # no operation made a graph: no backward
            self.release_all()

    def release_all(self) -> None:
        """No unit is in use any more."""
        self.open_uses.clear()
        for unit in self.units:
            self.release(unit)

    # A use of one unit.

    def watch_uses(self, unit: Unit) -> None:
        """Register the hooks of the unit's uses: on its module, and on parts of that which hold its parameters."""

        def use_begins(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is not unit.module:  # a copy
                return None
            self.gather(unit)
            changed, version = leaves_as_views(args, kwargs), unit.version  # of the master behind the replica
            use = Use(changed or (args, kwargs), lambda: self.open_use(unit, version), lambda: self.close_use(unit))
            self.running.append((unit, use))
            return changed

        def part_is_over(_: nn.Module, __: Any, output: Any) -> None:
            for running, use in self.running:  # the output may leave the unit by an attribute
                if running is unit:
                    use.opens_with(output)

        def use_ends(module: nn.Module, _: Any, output: Any) -> None:
            if module is not unit.module:
                return
            while (ended := self.running.pop())[0] is not unit:  # what lies above it ended by an exception
                pass
            if all(running is not unit for running, _ in self.running):  # else it was called inside itself
                self.forward_is_over(unit)
            ended[1].watch(output, unit.module if self.frees_replicas else None)

        if unit.module is not None:
            unit.module.register_forward_pre_hook(use_begins, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(Ours(use_ends))
            its = {id(parameter) for parameter in unit.parameters}
            for part in unit.module.modules() if self.frees_replicas else ():
                if part is not unit.module and any(id(p) in its for p in part.parameters(recurse=False)):
                    part.register_forward_hook(Ours(part_is_over))

    def open_use(self, unit: Unit, version: int) -> None:
        """Backward reaches what a use of the unit made."""
        check_unchanged(self.name, unit, version, double_backward=not self.frees_replicas)
        self.open_uses[unit] += 1
        self.gather(unit)

    def close_use(self, unit: Unit) -> None:
        """Backward has left a use of the unit."""
        self.open_uses[unit] -= 1
        if not self.open_uses[unit]:  # no other use of the same unit is open
            self.release(unit)

    # Backward.

    @property
    def in_backward(self) -> bool:
        """Is a backward running? Also True from a backward that raised until the next forward notices."""
        return self.backward is not None

    def running_backward(self, versions: dict[Unit, int] = {}) -> "Backward":  # noqa: B006
        """The backward that is running, or a new one. versions: of the units' masters, when the model was used."""
        if self.backward is None:
            for unit, version in versions.items():
                check_unchanged(self.name, unit, version, double_backward=not self.frees_replicas)
            self.backward = Backward(self)
            self.passes.add("backward")
            self.backward.begin()
        return self.backward


def put_aside(parameter: nn.Parameter, aside: list[torch.Tensor | None]) -> Any:
    """Keep the parameter's .grad of before in `aside` while autograd writes a new one.

    Returns autograd's node that writes it. Somebody must hold the node: autograd itself would make a new one.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    weak = weakref.ref(parameter)  # the node is out of the garbage collector's sight, as in `arrival`

    def writes(_: Any) -> None:
        parameter = weak()
        if parameter is not None:
            aside[:] = [parameter.grad]
            parameter.grad = None

    node.register_prehook(writes)
    return node


def arrival(engine: Engine, unit: Unit, number: int, aside: list[torch.Tensor | None]) -> Any:
    """The hook of a parameter. It is given the parameter, not the gradient."""
    # Autograd holds this hook out of the garbage collector's sight, so a strong reference would leak the engine.
    weak_engine, weak_unit = weakref.ref(engine), weakref.ref(unit)

    def arrived(parameter: torch.Tensor) -> None:
        engine, unit = weak_engine(), weak_unit()
        if engine is None or unit is None:
            return
        gradient = parameter.grad
        parameter.grad = aside.pop() if aside else None  # what `put_aside` kept
        backward = engine.running_backward()
        backward.bring(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        backward.reduce_those_complete()

    arrived.ours = True  # type: ignore[attr-defined]
    return arrived


class Backward:
    """One backward pass of a model: it begins with the gradient of an output, or of a parameter.

    A `torch.autograd.grad` inside the model opens uses, but begins none: nothing is reduced then.

    left: the units that are still to be reduced. The order is fixed, last block first, so that all ranks reduce the
    same unit at the same time even if only some of them took a branch. owed: by unit, the numbers of the parameters
    whose gradient has not come.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left = list(engine.in_order)
        self.owed = {unit: set(range(len(unit.parameters))) for unit in self.left}

    def begin(self) -> None:
        for unit in self.engine.in_order:
            check_untouched(unit)
            unit.begin_gradient()
        for unit in self.engine.roots:  # an earlier backward of the same forward may have released them
            self.engine.gather(unit)
        # Only autograd knows when the whole backward is over; then it calls this.
        torch_private.call_at_end_of_backward(self.end)

    def bring(self, unit: Unit, number: int, gradient: torch.Tensor | None) -> None:
        """The gradient of the unit's parameter `number` has come."""
        # No use is open, yet a gradient came: backward entered by a tensor that has no hook of a Use (uses.py).
        away = self.engine.reshard_after_forward and unit.module is not None and not self.engine.open_uses[unit]
        again = self.engine.sync and unit not in self.left
        check_gradient(self.engine.name, unit, gradient, again=again, gathered=not away)
        self.owed[unit].discard(number)
        if gradient is not None:  # a custom Function may give None, which is zero
            assert unit.gradient is not None
            self.engine.lane.before_put(unit)
            # Under no_sync many small gradients add up: in FP32.
            unit.gradient.put(number, gradient, unit.dtype if self.engine.sync else torch.float32)
            self.engine.lane.after_put(unit, self.owed[unit])

    def reduce_those_complete(self) -> None:
        """Reduce the units that owe nothing more, as far as the order allows."""
        while self.engine.sync and self.left and not self.owed[self.left[0]]:
            self.reduce_next()

    def reduce_next(self) -> None:
        unit = self.left.pop(0)
        assert unit.gradient is not None
        self.engine.reduce(unit, unit.gradient.take(unit.dtype, self.engine.comm.device))

    def end(self) -> None:
        while self.engine.sync and self.left:  # what was not used has a gradient of zero
            self.reduce_next()
        self.engine.lane.finish()
        self.engine.release_all()
        for unit in self.engine.in_order:
            unit.show_gradient()  # what no_sync holds
        self.engine.backward = None
