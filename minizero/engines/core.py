"""The core: *when* the things of a training step happen. *What* happens then is a stage's own file.

       moment           it comes                                        what happens (in stages)
    1  begin_forward    the model is called                             before_forward (1, 2); gather the root (3)
    2  begin_use        a unit's module is called                       gather (3)
    3  end_use          that module returns                             release (3)
    4  end_forward      the model returns                               if no graph was made: release all (3)
    5  begin_backward   backward has the gradient of the model's output gather the root (3)
    6  open_use         it has the gradient of a unit's output          gather (3)
    7  arrived          autograd has written a parameter's .grad        if its unit and those before have all: reduce
    8  close_use        it has the gradient of a unit's input           release (3)
    9  end_backward     backward is over                                release all (3)

A unit is a block of the model. What lies outside the blocks is one more unit, the root: it stays whole from the model's
forward to the end of its backward. A *use* of a unit is one forward of its module, and the backward of that. All ranks
reduce their units in one order, last block first, root last, so that their collectives meet.

The path of one gradient, of a unit with n numbers. Autograd writes a parameter's .grad, and calls `arrived`, which
takes it away. `Backward.put` copies it to its place in the unit's flat buffer of 4n bytes. If no parameter of the unit
waits for a gradient any more, and all units before it in the order are reduced, the stage's `reduce` gets the buffer.
In zero2.py a ring reduce-scatter sends 4n (N-1)/N bytes to the right neighbour, through two more buffers of 4n/N. One
of them becomes the result: this rank's part of the average. `Unit.set_gradient` adds it to the .grad of the unit's
shard. When `reduce` returns, the buffer is freed. After backward the optimizer steps the shard, which is a part of the
replica. The next `before_forward` gathers the other parts. (n = 8, N = 4: a buffer of 32 bytes, 24 sent, 8 left.)

What the hooks rely on: autograd numbers its operations, and goes back through the newest first. The hooks of a tensor
are called before those of the operation that made it. A use is known by the number of its first operation.

The core trains models in FP32 whose parameters all get a gradient in each backward, and whose units return a tensor or
a tuple of tensors. Communication and computation never overlap. It refuses by name what it can see of other models. It
does not see writes in place to a unit's output, attributes that carry tensors out of a unit, units inside themselves,
steps between forward and backward, and fused optimizers: then it trains wrongly without a word. `any_model/` lifts or
checks all that, under the same names of moments: `from minizero import DDP, Zero1, Zero2, Zero3`.
Li et al., 2020, "PyTorch Distributed", section 3.2; Zhao et al., 2023, "PyTorch FSDP", section 4.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minizero import torch_private
from minizero.engines.layout import Layout, divide
from minizero.memory import tag
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm

ELSE = "the core does not serve this: take DDP, Zero1, Zero2 or Zero3 of `minizero`"


class Unit:
    """Parameters that are gathered, reduced and freed together.

                    replica: the parameters are views of it    master: the optimizer steps it
        DDP         (size,)                                    the replica itself
        Zero1, 2    (size,)                                    this rank's chunk: a view of the replica
        Zero3       (size,), its memory only during a use      this rank's chunk: memory of its own

    module: whose forward uses the unit; None for the root. shards: the optimizer's parameters, views of `master`.
    """

    dtype = torch.float32  # of the replica
    replica: Tensor
    master: Tensor
    shards: list[nn.Parameter]

    def __init__(self, name: str, module: nn.Module | None, parameters: dict[str, nn.Parameter], comm: Comm) -> None:
        self.name, self.module, self.comm = name, module, comm
        self.parameters = list(parameters.values())
        self.layout = Layout(list(parameters), [p.shape for p in self.parameters], comm.size)
        self.size = self.layout.size  # elements of a flat buffer
        self.version = -1  # of `master` when the replica was last made from it

    def flatten(self) -> Tensor:
        """Rank 0's parameters, end to end, with padding: (size,)."""
        full = torch.zeros(self.size, device=self.comm.device)
        for view, parameter in zip(self.layout.views(full), self.parameters, strict=True):
            view.copy_(parameter.detach())
        # The ranks compare labels: two with different parameters of the same total size raise, and mix nothing.
        full = broadcast(full, self.comm, label=f"{self.name} of {self.layout}")
        tag(full, "parameters")
        return full

    def chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of a flat buffer, as a view."""
        return flat.chunk(self.comm.size)[self.comm.rank]

    def point_parameters_at(self, flat: Tensor) -> None:
        """Make the module's parameters views of `flat`."""
        for parameter, view in zip(self.parameters, self.layout.views(flat), strict=True):
            parameter.data = view

    def cut_shards(self) -> None:
        """Make the optimizer's parameter from `master`."""
        tag(self.master, "parameters")
        self.shards = [nn.Parameter(self.master)]

    def replica_is_stale(self) -> bool:
        """Must the replica be made from `master` (again)? `master` was written since, or the replica's memory is gone.

        `_version` is PyTorch's count of in-place writes. A shard shares it, so optimizer.step() raises it.
        """
        return self.master._version != self.version or not self.replica.untyped_storage().nbytes()

    def replica_is_fresh_now(self) -> None:
        """Remember what `master` the replica was made from."""
        self.version = self.master._version

    def set_gradient(self, average: Tensor, full: Tensor | None = None) -> None:
        """Add the average to the shard's .grad. full: what stages 0 and 1 keep beside it, for the memory ledger."""
        tag(average, "gradients")
        (shard,) = self.shards
        shard.grad = (average if shard.grad is None else average.add_(shard.grad)).view_as(shard)
        shard.grad.full = full  # type: ignore[attr-defined]


class Backward:
    """What counts only while a backward runs.

    left: the units still to be reduced, in order. owed: of each unit, the indices of its parameters that wait for a
    gradient. gradients: by unit, its flat buffer, (size,), once one has come. uses: those that backward is inside of.
    buckets: gradients of DDP that wait for others, by dtype.
    """

    def __init__(self, in_order: Sequence[Unit]) -> None:
        self.left = list(in_order)
        self.owed = {unit: set(range(len(unit.parameters))) for unit in in_order}
        self.gradients: dict[Unit, Tensor] = {}
        self.uses: set[tuple[Unit, int]] = set()
        self.buckets: dict[torch.dtype, list[tuple[Unit, Tensor]]] = {}

    def put(self, unit: Unit, number: int, gradient: Tensor) -> None:
        """Copy the gradient of parameter `number` to its place."""
        if number not in self.owed[unit]:
            raise RuntimeError(f"a second gradient for {unit.layout.names[number]} in one backward: {ELSE}")
        if unit not in self.gradients:
            self.gradients[unit] = torch.zeros(unit.size, device=gradient.device)
            tag(self.gradients[unit], "gradients")
        unit.layout.views(self.gradients[unit])[number].copy_(gradient)
        self.owed[unit].discard(number)

    def take(self) -> tuple[Unit, Tensor]:
        """The next unit in order, and its buffer: only the caller holds that from now on."""
        unit = self.left.pop(0)
        return unit, self.gradients.pop(unit)


class Engine(nn.Module):
    """A module whose parameters live in the flat buffers of units. Base of CoreDDP, CoreZero1, CoreZero2, CoreZero3.

    blocks: modules of it, each to be a unit, in the order in which the module has them. If forward's order is another,
    gradients wait. parameters(): the shards.
    """

    def __init__(self, module: nn.Module, comm: Comm, blocks: Iterable[nn.Module] | None) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.backward: Any = None  # the `Backward` that is running
        self.units = self.make_units(blocks)
        self.roots: Sequence[Unit] = [unit for unit in self.units if unit.module is None]  # one; in any_model more
        self.in_order: Sequence[Unit] = self.units[::-1]  # reduced last block first, root last
        for unit in self.units:
            self.keep(unit, unit.flatten())
            unit.replica_is_fresh_now()  # in stage 3 it is stale all the same: it has no memory
            self.watch_unit(unit)
        self.watch_model()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer steps."""
        return ((unit.name, shard) for unit in self.units for shard in unit.shards)

    def make_units(self, blocks: Iterable[nn.Module] | None) -> Sequence[Unit]:
        """The root first, then the blocks. `ValueError` that names what the core does not serve."""
        chosen = list(blocks or ())
        modules = {name: part for name, part in self.module.named_modules() if part in chosen}
        for name, p in self.module.named_parameters():
            if not p.requires_grad or p.dtype != torch.float32:
                raise ValueError(f"{name} is frozen, or not FP32 (module.float() makes it so): {ELSE}")
        for name, _ in self.module.named_buffers():
            raise ValueError(f"the buffer {name} may differ between ranks: {ELSE}")
        units = divide(self.module, modules).items()
        return [Unit(name or "root", modules.get(name), its, self.comm) for name, its in units if its]

    # What a stage does.

    def keep(self, unit: Unit, full: Tensor) -> None:
        """Set the unit's `replica` and `master`, and cut its shards. full: rank 0's values, (size,)."""

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """The unit's gradient is complete here, (size,): average it over the ranks, and give the shards their part."""

    def before_forward(self) -> None:
        """A forward of the whole model begins: bring replicas up to date that are kept between steps."""

    def gather(self, unit: Unit) -> None:
        """The unit is about to be used, in forward or in backward: make its parameters whole."""

    def release(self, unit: Unit) -> None:
        """The unit is not used for now: free the memory of its parameters."""

    # When it does so: forward.

    def watch_model(self) -> None:
        self.module.register_forward_pre_hook(lambda *_: self.begin_forward(), prepend=True)
        self.module.register_forward_hook(lambda _, __, output: self.end_forward(output))

    def watch_unit(self, unit: Unit) -> None:
        use = -1  # autograd's number of the first operation of the use whose forward runs

        def begins(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            nonlocal use
            use = self.begin_use(unit, (*args, *kwargs.values()))

        if unit.module is not None:
            unit.module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(lambda _, __, output: self.end_use(unit, use, output))
        # Autograd hides its hooks from the garbage collector, so they hold engine and unit weakly.
        arrived, weak_unit = weakref.WeakMethod(self.arrived), weakref.ref(unit)
        for number, parameter in enumerate(unit.parameters):
            parameter.grad = None  # of a backward before the module was wrapped
            parameter.register_post_accumulate_grad_hook(lambda _, n=number: arrived()(weak_unit(), n))  # type: ignore

    def begin_forward(self) -> None:
        if self.backward is not None and torch_private.current_backward() == -1:  # the last backward raised
            self.backward = None
            self.release_all()
        self.before_forward()
        for unit in self.roots:
            self.gather(unit)

    def begin_use(self, unit: Unit, inputs: tuple) -> int:
        self.gather(unit)
        use = torch_private.next_operation()
        for tensor in (tensor for value in inputs for tensor in made(value)):
            tensor.register_hook(lambda _: self.close_use(unit, use))
        return use

    def end_use(self, unit: Unit, use: int, output: Any) -> None:
        if self.backward is None or unit not in [
            other for other, _ in self.backward.uses
        ]:  # else a recompute inside it
            self.release(unit)
        for tensor in made(output, since=use, name=unit.name):
            # A prehook comes after the hooks of the tensor itself: the unit that used it in forward is released first.
            tensor.grad_fn.register_prehook(lambda _: self.open_use(unit, use))  # type: ignore[union-attr]

    def end_forward(self, output: Any) -> None:
        for tensor in (grown := made(output, name="the model")):
            tensor.register_hook(lambda _: self.begin_backward())
        if not grown:  # no backward can come
            self.release_all()

    # When it does so: backward.

    def begin_backward(self) -> None:
        if self.backward is None:  # else another output of the model began it
            self.backward = Backward(self.in_order)
            for unit in self.roots:  # an evaluation, or another backward, may have released them
                self.gather(unit)
            torch_private.call_at_end_of_backward(self.end_backward)  # only autograd knows when it is over

    def open_use(self, unit: Unit, use: int) -> None:
        self.backward.uses.add((unit, use))
        self.gather(unit)

    def arrived(self, unit: Unit, number: int) -> None:
        """Autograd has written the .grad of the unit's parameter `number`."""
        gradient, unit.parameters[number].grad = unit.parameters[number].grad, None
        if gradient is not None:  # a custom Function may give none: then `end_backward` raises
            self.backward.put(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        self.reduce_complete()

    def reduce_complete(self) -> None:
        """Reduce the units that wait for nothing more, as far as the order allows."""
        while self.backward.left and not self.backward.owed[self.backward.left[0]]:
            self.reduce(*self.backward.take())

    def close_use(self, unit: Unit, use: int) -> None:
        # Each input is older than all operations of the use. So if one has its gradient, these are done.
        if (unit, use) in self.backward.uses:
            self.backward.uses.remove((unit, use))
            self.release(unit)

    def end_backward(self) -> None:
        owed = [unit.layout.names[number] for unit in self.backward.left for number in self.backward.owed[unit]]
        self.backward = None
        self.release_all()
        if owed:
            raise RuntimeError(f"no gradient came of {', '.join(owed)}: {ELSE}")

    def release_all(self) -> None:
        for unit in self.units:
            self.release(unit)


def made(value: Any, since: int = 0, name: str = "") -> list[Tensor]:
    """Of a tensor or a tuple: those that an operation with the number `since`, or a later one, made.

    name: of the module that returned it; `TypeError` if it is something else.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if name and not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"{name} returned neither a tensor nor a tuple of tensors: {ELSE}")
    return [part for part in parts if isinstance(part, Tensor) and torch_private.operation_of(part) >= since]
