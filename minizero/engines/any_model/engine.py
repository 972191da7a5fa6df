"""*When*, for any model and any loop: each moment of core.py, and what is added to it.

    begin_forward      new: the model is called. Checks; stages 1 and 2 gather all units, used or not
    begin_use          anew: inputs of any kind (uses.py)
    end_forward        new: the model has returned. Keeps what forward wrote to parameters
    open_use           adds: refuses parameters written to since forward; looks which uses are over that no input closes
    begin_gradients    new: this backward is for parameters. Under no_sync the sum goes on, or begins (gradient.py)
    arrived            anew: `bring` refuses what cannot be right; DDP's .grad of before is kept
    close_use          adds: the unit waits no longer for what this backward does not reach, such as an idle expert
    end_backward       adds: what got no gradient counts as zero, and is reduced; buffers become rank 0's (buffers.py)

`end_use` is the core's. Under no_sync `reduce_what_is_complete` does nothing. `reduce_next` takes a unit's
`LocalGradient`. Several units may have one module: its frozen parameters are a unit of their own. A backward may run
inside of a unit's forward, for gradients of inputs: `around` has these units, which `is_open` and `release_all` leave
whole. Between steps: `mark_as_old` (steps.py) empties the parameters of Zero1, Zero2 and 16-bit DDP after a step, until
begin_forward.

A gradient goes its way as in core.py. Its buffer is a `LocalGradient` (gradient.py), since it may outlive a backward.
`Zero3.reduce` may run beside the computation (prefetch.py). `Unit.set_gradient` (unit.py) also calls the shards' hooks.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.any_model.buffers import Buffers
from minizero.engines.any_model.guards.modules import (
    check_compiled,
    check_complete,
    check_gradient,
    check_module,
    check_unchanged,
    check_writes,
    name_buffers,
    names_and_parameters,
    say_what_autocast_keeps,
    say_what_is_held,
)
from minizero.engines.any_model.guards.no_sync import check_untouched, say_what_is_dropped
from minizero.engines.any_model.guards.ranks import check_ranks, digest
from minizero.engines.any_model.guards.shards import watch
from minizero.engines.any_model.norms import let_norms_compute_in_fp32
from minizero.engines.any_model.steps import Ours, mark
from minizero.engines.any_model.unit import GroupBy, Unit
from minizero.engines.any_model.units import make_units
from minizero.engines.any_model.uses import (
    Use,
    asks_for_parameters,
    converted,
    leaves_as_views,
    nodes_after,
    tensors_in,
)
from minizero.engines.any_model.wrapped import Wrapped
from minizero.engines.use import arrival
from minizero.ranks.comm import Comm


class AnyModel(Wrapped):
    """A module whose parameters live in the flat buffers of units. Base of DDP, Zero1, Zero2, Zero3.

    module: FP32 parameters, all on one device. dtype: float16 or bfloat16 computes on 16-bit copies and keeps FP32
    masters. Those of frozen parameters are kept in 16 bits, and saved as FP32. Norms with running
    statistics compute in FP32. Buffers keep their dtype. units: modules, by default the repeated blocks. group_by: a
    function of (name, parameter) that gives each parameter a group (say, with or without weight decay); a shard holds
    parameters of one group only. broadcast_buffers: False leaves each rank the buffers that its forward wrote.

    Complete the module before you wrap it: initialise, add, replace and freeze parameters first. A gradient set to None
    on a parameter of the module freezes nothing; the shards' gradients count.

    forward moves the tensors among its arguments (also in tuples, lists and dicts) to `comm.device`, as `fully_shard`
    does. With a 16-bit `dtype` it casts those of floating point. Other objects, and outputs, stay as they are. A list
    or dict is copied only if a tensor in it changes: else the caller finds there what the module writes into it.

    The training loop is PyTorch's: an optimizer over `parameters()`, which are the shards; backward; step; zero_grad.
    A parameter that no rank has used gets a gradient of zeros, and not None: weight decay reaches it.
    Hooks on the shards (`register_hook`, `register_post_accumulate_grad_hook`) are called with the average.
    """

    inside: Any = None  # a Comm, of the ranks that a unit is sharded over; None becomes all
    ahead: Any = None  # what gathers ahead, in stage 3 (prefetch.py)
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
        broadcast_buffers: bool = True,
    ) -> None:
        self.name, self.inside = type(self).__name__, self.inside or comm
        check_module(self.name, module, comm, dtype)
        self.dtype, self.group_by = dtype, group_by
        self.sync = True  # False under no_sync
        self.passes: set[str] = set()  # what has run: "forward" (one that can be gone back through), "backward"
        self.done: dict[str, Any] = {}  # since the last backward, by this rank: all must have (guards/ranks.py)
        self.told = not self.reshard_after_forward or comm.rank > 0 or comm.size == 1  # `say_what_autocast_keeps`
        super().__init__(module, comm, units)
        call_around(module, lambda *_: self.begin_forward(), self.end_forward)  # before its root's use, and after
        if not broadcast_buffers:
            self.its_buffers.kinds.clear()  # they are rank 0's now; none will be so again
        self.in_order = [unit for unit in reversed(self.units) if unit.trains]
        self.its_parameters = {id(parameter) for unit in self.in_order for parameter in unit.parameters}
        let_norms_compute_in_fp32(module, dtype)
        self.watch_state_dicts()

    def make_units(self, blocks: Sequence[nn.Module] | None) -> Sequence[Unit]:
        self.as_wrapped = names_and_parameters(self.module)
        names = self.names_in(self.own_state()[0])
        self.its_buffers = Buffers(self.module, self.comm)
        units = make_units(self, blocks)
        if self.frees_replicas:
            check_compiled(self.name, self.module, units)
        for unit in units:
            unit.layout.names = [names[id(parameter)][0] for parameter in unit.parameters]  # those that it is saved by
        if self.reshard_after_forward and self.comm.rank == 0 and units[0].comm.size > 1:
            say_what_is_held(self.name, self.module, units)
        return units

    # What a stage does, beside its part in core.py.

    def keep_writes(self, unit: Unit) -> None:
        """Keep what forward wrote to the parameters: stage 3 copies it, other stages have it in the master already."""
        check_writes(self.name, unit)

    def finish(self) -> None:
        """Backward is over: what runs beside the computation, if anything, ends."""

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = converted((args, kwargs), self._cast)
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if not self.backward:  # else it goes on: a recompute was stopped early
                self.release_all()
            name_buffers(self.name, self.module, self.dtype, error)
            raise

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, self.dtype if tensor.is_floating_point() else None)

    @torch_private.never_compiled  # there is nothing to compute
    def begin_forward(self) -> None:
        check_complete(self.name, self.module, self.as_wrapped, self.units)
        if self.frees_replicas:
            check_compiled(self.name, self.module, self.units)
        if self.backward is None and not any(unit.running for unit in self.units if unit.module is self.module):
            for unit in self.units:
                unit.running.clear()  # of a part that was called by itself, and raised
        if self.last_backward and not self.backward:
            self.release_all()
            self.drop_what_raised()
        for unit in self.units:
            watch(unit, watched=True)  # after a step that raised
        self.told = self.told or say_what_autocast_keeps(self.name, self.dtype, self.comm.device.type)
        with torch_private.outside_transforms():
            self.refresh()
        if "backward" not in self.passes and not self.frees_replicas:
            self.done["parameters"] = digest(self.units)

    def refresh(self) -> None:
        """Bring replicas up to date, and make parameters views of them again: a step empties them (`mark_as_old`)."""
        for unit in self.units:
            if unit.replica_is_stale() or unit.is_empty:
                self.gather(unit)
                unit.point_parameters_at(unit.replica)

    def end_forward(self, output: Any) -> None:
        for unit in self.units:
            if not unit.is_empty:
                self.keep_writes(unit)

        def begins(nodes: list[Any]) -> None:
            if asks_for_parameters(nodes, self.its_parameters):
                self.begin_gradients()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self.passes.add("forward")
                nodes = nodes_after(tensor.grad_fn)  # not its own, which would hold the hook, and that the node
                tensor.register_hook(lambda _, nodes=nodes: begins(nodes))

    # A use of one unit.

    def watch_unit(self, unit: Unit) -> None:
        """Hooks on the unit's module, on parts of that which hold its parameters, and on these."""
        mark(unit, self)

        together = [each for each in self.units if each.module is unit.module]  # opened in one order on all ranks

        def part_is_over(_: nn.Module, __: Any, output: Any) -> None:
            made = list(tensors_in(output))  # it may leave the unit by an attribute
            for each in together:
                for use in each.running:
                    use.open_with(made)

        call_around(unit.module, lambda *given: self.begin_use(unit, *given), lambda out: self.end_use(unit, out))
        its = {id(parameter) for each in together for parameter in each.parameters}
        comes_and_goes = self.frees_replicas and unit.module is not self.module and unit is together[0]
        for part in unit.module.modules() if comes_and_goes else ():
            if part is not unit.module and any(id(p) in its for p in part.parameters(recurse=False)):
                part.register_forward_hook(Ours(part_is_over))
        for number, parameter in enumerate(unit.parameters if unit.trains else ()):
            if unit.original:
                unit.nodes.append(put_aside(unit, number))
            parameter.register_post_accumulate_grad_hook(arrival(self, unit, number))

    def begin_use(self, unit: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():  # a compiled engine of stage 1 or 2: begin_forward has gathered all
            self.gather(unit)
        changed = leaves_as_views(args, kwargs)
        unit.running.append(Use(self, unit, changed or (args, kwargs)))
        return changed

    def open_use(self, use: Any) -> None:
        check_unchanged(self.name, use.unit, use.version, double_backward=not self.frees_replicas)
        self.begin_backward()
        here = torch_private.operation_going_backwards()
        for unit, count in [*self.backward.open_uses.items()]:
            # All that is newer is done, also if no operation made its input, which would close it.
            if count and count == sum(each.began > here and each.closed != each.opened for each in unit.uses):
                self.drop_idle(unit)
        super().open_use(use)

    # Backward.

    def begin_backward(self) -> None:
        if not self.backward:
            self.drop_what_raised()
            super().begin_backward()
            self.backward.sends = None  # does it reduce? As `sync` was when it began; None: it brings nothing
            self.backward.around = [unit for unit in self.units if unit.running]  # inside of whose forward it runs

    def begin_gradients(self) -> None:
        """The backward that runs is for parameters, too. (Else it is `torch.autograd.grad` of inputs.)"""
        self.begin_backward()
        if self.backward.sends is None:
            self.backward.sends = self.sync
            self.passes.add("backward")
            for unit in self.in_order:
                check_untouched(unit)
                unit.gradient.begin()
                unit.note_gradients()

    def drop_what_raised(self) -> None:
        """What a backward had brought that raised, and the sum of no_sync."""
        if self.last_backward and not self.backward:
            self.last_backward = None
            say_what_is_dropped(self.name, self.in_order)
            for unit in self.in_order:
                unit.gradient.drop()

    def arrived(self, unit: Unit, number: int) -> None:
        parameter = unit.parameters[number]
        gradient, parameter.grad = parameter.grad, unit.aside.pop(number, None)
        self.begin_gradients()
        self.bring(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        self.reduce_what_is_complete()

    def bring(self, unit: Any, number: int, gradient: torch.Tensor | None) -> None:
        """The gradient of the unit's parameter `number` goes to its place."""
        # No use is open, yet a gradient came: backward entered by a tensor that has no hook of a Use (uses.py).
        away = self.reshard_after_forward and unit.module is not self.module and not self.is_open(unit)
        backward = self.backward
        again = backward.sends and unit not in backward.left
        check_gradient(self.name, unit, gradient, again=again, gathered=not away)
        backward.owed[unit].discard(number)
        if gradient is not None:  # a custom Function may give None, which is zero
            # Under no_sync many small gradients add up: in FP32.
            unit.gradient.put(number, gradient, unit.dtype if backward.sends else torch.float32)

    def bring_nothing_more(self, unit: Any, numbers: list[int]) -> None:
        """Autograd has no gradient for these parameters. It is zero, or what a Function has written to .grad itself.

        Not seen: what a Function writes there when autograd has brought the parameter's gradient already.
        """
        with torch_private.as_plain_tensors():  # the unit may be away
            for number in numbers:
                unit.parameters[number].grad, gradient = unit.before_and_written(number)
                if gradient is not None:
                    self.begin_gradients()
                    unit.gradient.put(number, gradient, unit.dtype if self.backward.sends else torch.float32)
        self.backward.owed[unit].difference_update(numbers)

    def close_use(self, use: Any) -> None:
        super().close_use(use)
        if not self.backward.open_uses[use.unit]:
            self.drop_idle(use.unit)

    def drop_idle(self, unit: Any) -> None:
        """Its uses are over. What this backward does not reach, such as an idle expert, has a gradient of zero."""
        owed = self.backward.owed.get(unit)
        # Of a use of this step that no backward has come to nobody knows whether this one will: it is waited for.
        coming = any(each.opened == -1 and each.version == unit.master._version for each in unit.uses)
        if owed and not coming:
            with torch_private.as_plain_tensors(), torch_private.outside_transforms():  # the unit may be away
                nodes = {n: torch.autograd.graph.get_gradient_edge(unit.parameters[n]).node for n in owed}
            self.bring_nothing_more(unit, [n for n, node in nodes.items() if not torch_private.will_write(node)])
            self.reduce_what_is_complete()  # other ranks may have reduced the unit by now

    def is_open(self, unit: Any) -> bool:
        return self.backward is not None and (unit in self.backward.around or super().is_open(unit))

    def release_all(self) -> None:
        around = self.backward.around if self.backward else ()
        for unit in self.units:
            if unit not in around:
                unit.running.clear()
                self.release(unit)

    def reduce_what_is_complete(self) -> None:
        if self.backward.sends:
            super().reduce_what_is_complete()

    def reduce_next(self) -> None:
        unit = self.backward.left.pop(0)
        self.reduce(unit, unit.gradient.take())

    def end_backward(self) -> None:
        sends = self.backward.sends
        for unit in self.in_order if sends is not None else ():
            self.bring_nothing_more(unit, [*self.backward.owed[unit]])
        while sends and self.backward.left:
            self.reduce_next()
        self.finish()
        if sends:
            check_ranks(self.name, self.comm, self.done)
            self.its_buffers.become_rank_0s()
        self.backward.left.clear()
        super().end_backward()
        for unit in self.in_order if sends is not None else ():
            unit.gradient.show()  # what no_sync holds
            unit.before.clear()


def call_around(module: nn.Module, begin: Callable[..., Any], end: Callable[[Any], None]) -> None:
    """Call `begin` and `end` around each forward of the module, but not of its copies, which have its hooks, too."""

    def begins(which: nn.Module, args: Any, kwargs: Any) -> Any:
        return begin(args, kwargs) if which is module else None

    def ends(which: nn.Module, _: Any, output: Any) -> None:
        if which is module:
            end(output)

    module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
    module.register_forward_hook(Ours(ends))


def put_aside(unit: Unit, number: int) -> Any:
    """DDP in FP32: autograd would add to the parameter's .grad of before: keep that in `unit.aside` meanwhile.

    What a custom Function wrote to .grad in this backward stays, and autograd adds to that.

    Returns autograd's node that writes .grad. Somebody must hold the node: autograd itself would make a new one.
    """
    node = torch.autograd.graph.get_gradient_edge(unit.parameters[number]).node
    weak = weakref.ref(unit)  # as in `arrival`

    def writes(_: Any) -> None:
        if (unit := weak()) is not None:
            unit.aside[number], unit.parameters[number].grad = unit.before_and_written(number)

    node.register_prehook(writes)
    return node
