"""What the four stages share: *when* things happen. *What* happens then is each stage's own file:

    keep(unit, full)        at wrapping: what this rank keeps of a unit's parameters
    before_forward()        a forward of the whole model begins
    gather(unit)            a unit is about to be used, in forward or in backward
    release(unit)           a unit's forward, or its backward, is over
    reduce(unit, gradient)  a unit's gradient is complete on this rank

Units are reduced in one fixed order, last block first, so that all ranks reduce the same
unit at the same time even where only some of them took a branch.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minizero.checks import check_module
from minizero.collectives import all_gather, broadcast
from minizero.comm import Comm
from minizero.partition import GroupBy, Unit, make_units


class Engine(nn.Module, abc.ABC):
    """A module whose parameters live in the flat buffers of units. Base of DDP, Zero1, Zero2, Zero3.

    module: FP32 parameters, all on one device. dtype: float16 or bfloat16 computes on 16-bit copies
    and keeps FP32 masters. units: modules, by default the repeated blocks. group_by: a function of
    (name, parameter), whose values no shard mixes. Buffers keep their dtype.
    """

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
        self.state_names = list(module.state_dict())
        for name, buffer in module.named_buffers():
            buffer.data = broadcast(buffer.data.to(comm.device), comm, label=name)
        self.units = make_units(module, comm, dtype or torch.float32, units, group_by)
        for unit in self.units:
            self.keep(unit, unit.flatten())
            unit.replica_is_fresh_now()
            self._watch(unit)
        self.roots = [unit for unit in self.units if unit.module is None]
        self.names_of: dict[int, list[str]] = {}  # tied parameters have several
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names_of.setdefault(id(parameter), []).append(name)
        self.in_order = [unit for unit in reversed(self.units) if unit.trains]
        self.waiting_for: dict[Unit, set[int]] = {}  # parameters whose gradient this backward still owes
        self.reduced = 0  # how many of `in_order` this backward has reduced
        self.in_backward = False
        self.sync = True

    # The stage's part.

    @abc.abstractmethod
    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        """Set the unit's `flat` and `master`, and cut its shards. full: rank 0's values, FP32, (size,)."""

    @abc.abstractmethod
    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Average the full local gradient, (size,), over ranks, and give the shards their part."""

    def before_forward(self) -> None:  # noqa: B027
        """Bring replicas up to date that are kept between steps."""

    def gather(self, unit: Unit) -> None:  # noqa: B027
        """Make the unit's parameters whole. A stage that keeps replicas has nothing to do."""

    def release(self, unit: Unit) -> None:  # noqa: B027
        """Give the memory of the unit's parameters back. A stage that keeps replicas has nothing to do."""

    # Forward and backward: when.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        self.in_backward = False  # also where the last backward broke off
        self.before_forward()
        for unit in self.roots:
            self.gather(unit)
        output = self.module(*args, **kwargs)
        grown = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in grown:
            tensor.register_hook(self._begin_backward)
        if not grown:  # there will be no backward
            for unit in self.roots:
                self.release(unit)
        return output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _watch(self, unit: Unit) -> None:
        """Let autograd and the unit's module tell when the unit is used and when its gradient is complete."""
        for parameter in unit.parameters:
            parameter.wrapped_in = type(self).__name__  # type: ignore[attr-defined]
            if unit.trains:
                # The hook is given the parameter, not the gradient.
                parameter.register_post_accumulate_grad_hook(lambda p: self._arrived(unit, p))
        for shard in unit.shards:
            shard.shard_of = type(self).__name__  # type: ignore[attr-defined]
        if unit.module is not None:
            unit.module.register_forward_pre_hook(lambda _, *inputs: self._before_unit(unit, inputs), with_kwargs=True)
            unit.module.register_forward_hook(lambda _, args, output: self._after_unit(unit, output))

    def _before_unit(self, unit: Unit, inputs: Any) -> None:
        self.gather(unit)
        if not unit.trains:  # no gradient of its own will tell that its backward is over: its input's does
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.release(unit))

    def _after_unit(self, unit: Unit, output: Any) -> None:
        self.release(unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad:  # its gradient is the first thing the unit's backward needs
                tensor.register_hook(lambda _: self.gather(unit))

    def _begin_backward(self, _: torch.Tensor | None = None) -> None:
        if self.in_backward:
            return
        self.in_backward, self.reduced = True, 0
        self.waiting_for = {unit: {id(p) for p in unit.parameters} for unit in self.in_order}
        for unit in self.in_order:
            gradients = [shard.grad for shard in unit.shards]
            if all(gradient is None for gradient in gradients):  # zero_grad() drops what no_sync() gathered, too
                unit.gradient, unit.earlier = None, []
            if unit.gradient is None:
                unit.earlier = gradients
            for shard in unit.shards:
                shard.grad = None
        for unit in self.roots:  # an earlier backward of the same forward may have released them
            self.gather(unit)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        self._begin_backward()
        # Under no_sync many small gradients add up: in FP32.
        unit.deposit(parameter, unit.dtype if self.sync else torch.float32)
        waiting = self.waiting_for[unit]
        waiting.discard(id(parameter))
        if not waiting:
            self.release(unit)
        while self.sync and self.reduced < len(self.in_order) and not self.waiting_for[self.in_order[self.reduced]]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        unit = self.in_order[self.reduced]
        self.reduced += 1
        self.reduce(unit, unit.take_gradient())

    def _finish_backward(self) -> None:
        while self.sync and self.reduced < len(self.in_order):
            self._reduce_next()
        for unit in self.units:
            self.release(unit)
            if unit.gradient is not None:  # under no_sync .grad shows the local sum, a view of it
                unit.show_gradient()
        self.in_backward = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up full local gradients and send nothing; the next one outside reduces all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    # The contract: what a training loop calls.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters: this rank's shards, named after their units."""
        for unit in self.units:
            if unit.trains:
                yield from zip(unit.shard_names(prefix), unit.shards, strict=True)

    def parameter_groups(self) -> dict[Any, list[nn.Parameter]]:
        """The shards by value of `group_by`."""
        result: dict[Any, list[nn.Parameter]] = {}
        for unit in self.units:
            for group, shard in zip(unit.groups, unit.shards, strict=True):
                if unit.trains:
                    result.setdefault(group, []).append(shard)
        return result

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
        norms = torch.stack([unit.gradient_norms(norm_type) for unit in self.in_order])  # (units, chunks held)
        if norms.shape[1] < self.comm.size:
            norms = all_gather(norms.t().contiguous(), self.comm, label="clip_grad_norm_").t().contiguous()
        norm = torch.linalg.vector_norm(norms, norm_type)  # unit by unit, rank by rank: one order in every stage
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self.parameters():
            if shard.grad is not None:
                shard.grad.mul_(scale)
        return norm

    @torch.no_grad()
    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The full model on every rank, under its original names: FP32 parameters, rank 0's buffers. Collective."""
        found = {name: broadcast(buffer, self.comm, label=name) for name, buffer in self.module.named_buffers()}
        for unit in self.units:
            whole = unit.master
            if whole.numel() < unit.size:
                whole = all_gather(unit.master, self.comm, label=unit.name)
            for parameter, view in zip(unit.parameters, unit.views(whole), strict=True):
                found |= {name: view.clone() for name in self.names_of[id(parameter)]}
        return {name: found[name] for name in self.state_names}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `gather_state_dict`, or the plain module's `state_dict`, gave: rank 0's values. Collective.

        `ValueError` that lists the names that are missing or too many, or a shape that differs.
        """
        buffers = {name: b for name, b in self.module.named_buffers() if name in self.state_names}
        shapes = {name: b.shape for name, b in buffers.items()}
        for unit in self.units:
            shapes |= {n: s for p, s in zip(unit.parameters, unit.shapes, strict=True) for n in self.names_of[id(p)]}
        if wrong := sorted(shapes.keys() ^ state.keys()):
            raise ValueError(f"load_full_state_dict: names missing or unknown: {', '.join(wrong)}")
        if wrong := [f"{n} {tuple(state[n].shape)}, here {tuple(s)}" for n, s in shapes.items() if state[n].shape != s]:
            raise ValueError(f"load_full_state_dict: shapes differ: {'; '.join(wrong)}")
        for name, buffer in buffers.items():
            buffer.copy_(broadcast(state[name].to(buffer), self.comm, label=name))
        for unit in self.units:
            full = unit.flatten([state[name] for name in unit.names])
            unit.master.copy_(full if unit.master.numel() == unit.size else unit.chunk(full))

    # What a module can do and an engine cannot: refused, for it would be silently wrong.

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__}: move or cast the module before wrapping it; afterwards it stays where it is"
        )

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: each rank holds a part: call gather_state_dict() on all ranks")

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: call load_full_state_dict(state) on all ranks")

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: cannot be copied: copy the module before wrapping it")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
