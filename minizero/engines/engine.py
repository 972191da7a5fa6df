"""What the four stages share: *when* things happen. *What* happens then is each stage's own file:

    keep(unit, full)        at wrapping: what this rank keeps of a unit's parameters
    before_forward()        a forward of the whole model begins
    gather(unit)            a unit is about to be used, in forward or in backward
    release(unit)           a unit's forward, or its backward, is over
    deposit(unit, …)        one of a unit's parameters has its gradient
    reduce(unit, gradient)  a unit's gradient is complete on this rank
    finish()                all of them are reduced: what is still under way must end

Units are reduced in one fixed order, last block first, so that all ranks reduce the same
unit at the same time even where only some of them took a branch.
"""

import abc
import contextlib
import dataclasses
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minizero.engines.partition import GroupBy, Unit, keeps_statistics, make_units
from minizero.engines.refused import check_module
from minizero.engines.wrapped import Wrapped
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm, not_alone


class Engine(Wrapped, abc.ABC):
    """A module whose parameters live in the flat buffers of units. Base of DDP, Zero1, Zero2, Zero3.

    module: FP32 parameters, all on one device. dtype: float16 or bfloat16 computes on 16-bit copies
    and keeps FP32 masters; of frozen parameters only the 16-bit numbers, which are also what is saved
    and gathered, as FP32. Norms with running statistics compute in FP32. units: modules, by default the
    repeated blocks. group_by: a function of (name, parameter), whose values no shard mixes. Buffers keep
    their dtype.

    forward moves every tensor in its arguments, and in tuples, lists and dicts among them, to `comm.device`, as
    `fully_shard` does, and with a 16-bit `dtype` casts those of floating point. It leaves other objects, such as
    dataclasses, as they are, and what the module returns.
    """

    inside: Comm | None = None  # the ranks that a unit is sharded over, where that is not all of `comm`

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
        self.in_backward, self.backwards = False, 0  # and how many are over
        self.sync = True
        self.reduced = 0  # how many of `in_order` this backward has reduced
        self.waiting_for: dict[Unit, set[int]] = {}  # parameters whose gradient this backward still owes
        self.state_names = list(module.state_dict())
        self.names_of: dict[int, list[str]] = {}  # tied parameters have several
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names_of.setdefault(id(parameter), []).append(name)
        for name, buffer in module.named_buffers():
            buffer.data = broadcast(buffer.data.to(comm.device), comm, label=name)
        self.units = make_units(module, comm, self.inside or comm, dtype or torch.float32, units, group_by)
        self.roots = [unit for unit in self.units if unit.module is None]
        self.in_order = [unit for unit in reversed(self.units) if unit.trains]
        for unit in self.units:
            full = unit.flatten()
            self.keep(unit, full if unit.trains else full.to(unit.dtype))
            unit.replica_is_fresh_now()
            self._watch(unit)
        module.register_forward_pre_hook(lambda _, *call: self._before_model(*call), prepend=True, with_kwargs=True)
        for part in module.modules():
            if keeps_statistics(part) and dtype not in (None, torch.float32):
                compute_in_fp32(part, dtype)
        self.watch_state_dicts()

    # The stage's part.

    @abc.abstractmethod
    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        """Set the unit's `flat` and `master`, and cut its shards. full: rank 0's values, (size,), FP32.

        Those of a frozen unit have its dtype already.
        """

    @abc.abstractmethod
    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Average the full local gradient, (size,), over ranks, and give the shards their part."""

    def before_forward(self) -> None:  # noqa: B027
        """Bring replicas up to date that are kept between steps."""

    def gather(self, unit: Unit) -> None:  # noqa: B027
        """Make the unit's parameters whole. A stage that keeps replicas has nothing to do."""

    def release(self, unit: Unit) -> None:  # noqa: B027
        """Give the memory of the unit's parameters back. A stage that keeps replicas has nothing to do."""

    def finish(self) -> None:  # noqa: B027
        """A backward ends, and its gradients must be there. A stage that does one thing at a time has nothing to do."""

    def deposit(self, unit: Unit, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Put a parameter's gradient into its place in the unit's. Under no_sync many small ones add up: in FP32."""
        unit.deposit(parameter, gradient, unit.dtype if self.sync else torch.float32)

    def forward_is_over(self, unit: Unit) -> None:
        """The unit's forward is over; its backward will gather it again."""
        self.release(unit)

    # Forward and backward: when.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._release_all()
            raise
        grown = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        versions = {unit: unit.version for unit in self.roots}
        for tensor in grown:
            tensor.register_hook(lambda _: self._begin_backward(versions))
        if not grown:  # there will be no backward
            self._release_all()
        return output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, self.dtype if tensor.is_floating_point() else None)

    def _before_model(self, args: Any, kwargs: Any) -> Any:
        not_alone("the model")
        for unit in self.units:
            if any(parameter.requires_grad != unit.trains for parameter in unit.parameters):
                raise RuntimeError(
                    f"{type(self).__name__}: requires_grad changed in {unit.name}: freeze before wrapping"
                )
        if self.in_backward and torch._C._current_graph_task_id() == -1:  # the last backward broke off
            self.in_backward, self.backwards = False, self.backwards + 1
            self._release_all()
            for unit in self.in_order:
                unit.restore_gradient()
        self.before_forward()
        for unit in self.roots:
            self.gather(unit)
        return without_leaves(args, kwargs)

    def _release_all(self) -> None:
        for unit in self.units:
            unit.users = 0
            self.release(unit)

    def _watch(self, unit: Unit) -> None:
        """Let autograd and the unit's module tell when the unit is used and when its gradient is complete."""
        # The garbage collector does not look into this hook: one that held engine or unit would keep them for ever.
        weak_engine, weak_unit = weakref.ref(self), weakref.ref(unit)

        def arrived(parameter: torch.Tensor) -> None:
            if (engine := weak_engine()) is not None and (its := weak_unit()) is not None:
                engine._arrived(its, parameter)  # type: ignore[arg-type]

        for parameter in unit.parameters:
            parameter.wrapped_in = type(self).__name__  # type: ignore[attr-defined]
            if unit.trains:
                # The hook is given the parameter, not the gradient.
                parameter.register_post_accumulate_grad_hook(arrived)
        for shard in unit.shards:
            shard.shard_of = type(self).__name__  # type: ignore[attr-defined]
            shard.cut_at = shard.data_ptr()  # type: ignore[attr-defined]
        if unit.module is not None:
            unit.module.register_forward_pre_hook(
                lambda _, *call: self._before_unit(unit, *call), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(lambda _, *call: self._after_unit(unit, *call), with_kwargs=True)

    def _before_unit(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        self.gather(unit)
        changed = without_leaves(args, kwargs)
        unit.began = torch._C._autograd._get_sequence_nr()
        unit.inputs = {id(x): x._version for x in tensors_in(changed or [args, kwargs]) if x.grad_fn is not None}
        return changed

    def _after_unit(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        """Forward is over. The gradient of the output opens this use's backward, the first of an input's closes it.

        Autograd goes back through the newest operation first. What made an input is older than all that the unit did,
        so when it has its turn, the unit has had all of its own.
        """
        self.forward_is_over(unit)
        # The hooks must not hold the tensors that hold them, or nothing is freed: numbers only.
        version, opened, closed = unit.version, -1, -1  # in which backward: a graph can be gone through twice

        def open_backward(_: Any) -> None:
            nonlocal opened
            if opened != self.backwards:  # one of several outputs is the first
                opened = self.backwards
                self._check_backward(unit, version)
                unit.users += 1
                self.gather(unit)

        def close_backward(_: torch.Tensor) -> None:
            nonlocal closed
            if opened == self.backwards != closed:
                closed = self.backwards
                unit.users -= 1
                if unit.users == 0:  # another use of the same unit may be open
                    self.release(unit)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # It runs after the hooks of the tensor, which close the unit that used it: that one is released first.
                tensor.grad_fn.register_prehook(open_backward)
                # Who writes into a view gives it another grad_fn, before which comes the one of what it is a view of.
                if made_by(unit, tensor._base):
                    tensor._base.grad_fn.register_prehook(open_backward)  # type: ignore[union-attr]
            elif tensor.requires_grad:
                tensor.register_hook(open_backward)
        # Say, an auxiliary loss that the model adds to its own. A stage that keeps replicas need not look.
        for tensor in kept_in(unit.module) if type(self).release is not Engine.release else ():
            if made_by(unit, tensor):
                tensor.grad_fn.register_prehook(open_backward)  # type: ignore[union-attr]
        for tensor in tensors_in([args, kwargs]):  # without any, this use ends with the backward
            # What the unit wrote in place, or put into a list that it was given, is its own work, no input.
            if tensor.grad_fn is not None and unit.inputs.get(id(tensor)) == tensor._version:
                tensor.register_hook(close_backward)

    def _check_backward(self, unit: Unit, version: int) -> None:
        if unit.master._version != version:
            raise RuntimeError(f"{type(self).__name__}: {unit.name} was changed between its forward and its backward")
        if torch.is_grad_enabled() and type(self).release is not Engine.release:
            raise RuntimeError(
                f"{type(self).__name__}: double backward (create_graph=True) is not supported: use DDP, Zero1 or "
                "Zero2, and torch.autograd.grad(…, inputs, create_graph=True)"
            )

    def _begin_backward(self, versions: dict[Unit, int]) -> None:
        if self.in_backward:
            return
        for unit, version in versions.items():
            self._check_backward(unit, version)
        self.in_backward, self.reduced = True, 0
        self.waiting_for = {unit: {id(p) for p in unit.parameters} for unit in self.in_order}
        for unit in self.in_order:
            unit.begin_gradient()
        for unit in self.roots:  # an earlier backward of the same forward may have released them
            self.gather(unit)
        # Autograd calls this when the whole backward is over; only its own engine knows when.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self).__name__}: backward(create_graph=True): .grad is an average over ranks, which no graph "
                "contains: use torch.autograd.grad(…, inputs, create_graph=True), then backward()"
            )
        self._begin_backward({})
        if self.sync and unit in self.in_order[: self.reduced]:
            raise RuntimeError(
                f"{type(self).__name__}: a second gradient for {unit.name} after it was reduced: "
                "use checkpoint with use_reentrant=False, or no_sync()"
            )
        self.deposit(unit, parameter, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        self.waiting_for[unit].discard(id(parameter))
        while self.sync and self.reduced < len(self.in_order) and not self.waiting_for[self.in_order[self.reduced]]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        unit = self.in_order[self.reduced]
        self.reduced += 1
        self.reduce(unit, unit.take_gradient())

    def _finish_backward(self) -> None:
        while self.sync and self.reduced < len(self.in_order):
            self._reduce_next()
        self.finish()
        self._release_all()
        for unit in self.in_order:
            if unit.gradient is not None:  # under no_sync .grad shows the local sum, a view of it
                unit.show_gradient()
        self.in_backward, self.backwards = False, self.backwards + 1

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up full local gradients and send nothing; the next one outside reduces all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before


def compute_in_fp32(norm: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a norm is given to FP32, and what it returns back to `dtype`, as PyTorch's MixedPrecision does."""

    def cast(value: Any, to: torch.dtype) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(to) if x.is_floating_point() else x, value)

    # First and last of its hooks: a unit that is this norm itself has FP32 inputs and outputs.
    norm.register_forward_pre_hook(lambda _, *call: cast(call, torch.float32), prepend=True, with_kwargs=True)
    norm.register_forward_hook(lambda _, __, output: cast(output, dtype))


def without_leaves(args: Any, kwargs: Any) -> Any:
    """The arguments of a forward, with a view for each leaf among them that requires a gradient.

    Autograd completes leaves before all else: when a leaf has its gradient, the unit's weights may still have none.
    A view is an operation like any other. It is older than the unit's own, so its turn comes after theirs.
    """
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    if not (leaves and torch.is_grad_enabled()):
        return None  # leave them as they are
    views = {key: leaf.view_as(leaf) for key, leaf in leaves.items()}  # one each: attention asks whether q is k
    return tuple(views.get(id(a), a) for a in args), {name: views.get(id(a), a) for name, a in kwargs.items()}


def made_by(unit: Unit, tensor: torch.Tensor | None) -> bool:
    """Did an operation of the unit's last forward make it? Each thread numbers its operations."""
    return tensor is not None and tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= unit.began


def kept_in(module: nn.Module | None) -> list[torch.Tensor]:
    """The tensors that are attributes of the module or its parts, or in lists and tuples that are."""
    parts = [] if module is None else module.modules()
    kept = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor | list | tuple)]
    return list(tensors_in(kept))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses and simple namespaces."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, types.SimpleNamespace):
        yield from tensors_in(list(vars(value).values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
