"""The core: *when* the things of a training step happen. *What* happens then is a stage's own file.

A unit is a block of the model. What lies outside the blocks is one more unit, the root: it stays whole from the model's
forward to the end of its backward. A *use* of a unit is one forward of its module, and the backward of that (use.py).

       moment           it comes                                        what happens (in which stages)
    1  begin_forward    the model is called                             renew replicas (1, 2); gather the root (3)
    2  begin_use        a unit's module is called                       gather (3)
    3  end_use          that module returns                             release (3)
    4  end_forward      the model returns                               if no graph was made: release all (3)
    5  begin_backward   backward has the gradient of the model's output gather the root (3)
    6  open_use         it has the gradient of a unit's output          gather (3)
    7  arrived          autograd has written a parameter's .grad        if its unit has all gradients: reduce
    8  close_use        it has the gradient of a unit's input           release (3)
    9  end_backward     backward is over                                release all (3)

Row 8 needs an input that an operation made. For a leaf (the first block's input), or one in a list, row 9 releases.

All ranks reduce their units in one order, so that their collectives meet: the last block first, the root last. A unit
whose gradients come too early waits for its turn.

The path of one gradient, of a unit with n numbers, in stage 2. Autograd writes a parameter's .grad, and calls
`arrived`, which takes it away. `Backward.put` copies it to its place in the unit's flat buffer of 4n bytes. When the
buffer is full, and it is the unit's turn, the stage's `reduce` gets it. In zero2.py a ring reduce-scatter sends
4n (N-1)/N bytes to the right neighbour, through two more buffers of 4n/N. One of them becomes the result: this rank's
part of the average. `Unit.set_gradient` adds the old .grad of the unit's shard, if any, and makes it the new one. When
`reduce` returns, the buffer is freed. After backward the optimizer steps the shard, which is a part of the replica. The
next `before_forward` gathers the other parts. (n = 8, N = 4: a buffer of 32 bytes, 24 sent, 8 left.)

The core trains models in FP32, one thing at a time. Each parameter gets a gradient in each backward; each unit returns
a tensor or a tuple of these. Of other models it refuses by name what it sees. It does not see a unit's weights read
outside its forward; a part called alone, moved (`to`) or saved (`state_dict`); writes in place to a unit's output;
attributes that carry tensors out of a unit; units inside themselves; steps between forward and backward; fused
optimizers. Then it is wrong without a word. `any_model/` lifts or checks all that: `from minizero import Zero3`.
Li et al., 2020, "PyTorch Distributed", section 3.2; Zhao et al., 2023, "PyTorch FSDP", section 4.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minizero import torch_private
from minizero.engines.layout import Layout, divide
from minizero.engines.use import ELSE, Use, arrival, tensors_in
from minizero.memory import tag  # tells the memory ledger what a tensor is
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm


class Unit:
    """Parameters that are gathered, reduced and freed together.

                    replica: the parameters are views of it    master: the optimizer steps it
        DDP         (size,)                                    the replica itself
        Zero1, 2    (size,)                                    this rank's chunk: a view of the replica
        Zero3       (size,), its memory only during a use      this rank's chunk: memory of its own

    module: whose forward uses the unit; None for the root. shards: the optimizer's, views of `master`: here one.
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
        self.version = -1  # of `master` when the replica was last made from it: PyTorch's count of writes in place

    def from_rank_0(self, comm: Comm, values: Sequence[Tensor] | None = None) -> Tensor:
        """Rank 0's values, by default the parameters', end to end, padded: (size,). comm: all ranks, a hybrid's too."""
        full = torch.zeros(self.size, dtype=torch.float32, device=comm.device)
        for view, value in zip(self.layout.views(full), values or self.parameters, strict=True):
            view.copy_(value.detach())
        # The ranks compare labels. So if their parameters differ, but not the total size, they raise, and mix nothing.
        full = broadcast(full, comm, label=f"{self.name} of {self.layout}")
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
        """Make the replica anew? A step wrote a shard (`master` shares its count of writes), or it has no memory."""
        return self.master._version != self.version or not self.replica.untyped_storage().nbytes()

    def replica_is_fresh_now(self) -> None:
        """Remember what `master` the replica was made from."""
        self.version = self.master._version

    def set_gradient(self, average: Tensor, full: Tensor | None = None) -> None:
        """Add the average to the shard's .grad. full: the buffer it is in (stages 0, 1), for the memory ledger."""
        tag(average, "gradients")
        (shard,) = self.shards
        shard.grad = (average if shard.grad is None else average.add_(shard.grad)).view_as(shard)
        shard.grad.full = full  # type: ignore[attr-defined]


class Backward:
    """What counts only while a backward runs.

    left: the units still to be reduced, in order. owed: by unit, the numbers of its parameters that have no gradient.
    gradients: by unit, its flat buffer, (size,), once one has come. buckets: in DDP, those that wait for more (ddp.py).
    end: a weakref to what autograd calls after this backward. If it raises, autograd drops that: `end()` is None.
    """

    def __init__(self, in_order: Sequence[Unit], end: Callable[[], Any]) -> None:
        self.end = end
        self.left = list(in_order)
        self.owed = {unit: set(range(len(unit.parameters))) for unit in in_order}
        self.gradients: dict[Unit, Tensor] = {}
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


class Engine(nn.Module):
    """A module whose parameters live in the flat buffers of units. Base of CoreDDP, CoreZero1, CoreZero2, CoreZero3.

    blocks: modules of it, each to be a unit. If forward has another order than the module, gradients wait.
    """

    def __init__(self, module: nn.Module, comm: Comm, blocks: Iterable[nn.Module] | None) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.in_forward: list[Any] = []  # the uses whose forward runs now, the innermost last
        self.open_uses: Counter[Unit] = Counter()  # of each unit, how many uses backward is inside of
        self.backward: Any = None  # the `Backward` that is running
        self.units = self.make_units(blocks)
        self.roots: Sequence[Unit] = [unit for unit in self.units if unit.module is None]  # one; in any_model more
        self.in_order: Sequence[Unit] = self.units[::-1]  # reduced last block first, root last
        for unit in self.units:
            self.keep(unit, unit.from_rank_0(comm))
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
        if set(chosen) - set(modules.values()):
            raise ValueError("blocks: each must be a module of the wrapped module")
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
        if unit.module is not None:
            unit.module.register_forward_pre_hook(  # prepend: before the user's own hooks
                lambda _, args, kwargs: self.begin_use(unit, args, kwargs), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(lambda _, __, output: self.end_use(unit, output))
        for number, parameter in enumerate(unit.parameters):
            parameter.grad = None  # of a backward before the module was wrapped
            parameter.register_post_accumulate_grad_hook(arrival(self, unit, number))

    def begin_forward(self) -> None:
        if self.forget_what_raised():
            self.release_all()
        self.before_forward()
        self.gather_roots()

    def begin_use(self, unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.gather(unit)
        self.in_forward.append(Use(self, unit, [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]))

    def end_use(self, unit: Unit, output: Any) -> None:
        while (use := self.in_forward.pop()).unit is not unit:
            pass  # a forward inside this one that did not end: it raised, or a recompute stopped early
        self.forward_is_over(unit)
        use.end_forward(output)

    def forward_is_over(self, unit: Unit) -> None:
        if not self.open_uses[unit]:  # else backward runs this forward again (activation checkpointing)
            self.release(unit)

    def end_forward(self, output: Any) -> None:
        with_graph = [tensor for tensor in tensors_in(output, "the model") if tensor.grad_fn is not None]
        for tensor in with_graph:
            tensor.register_hook(lambda _: self.begin_backward())
        if not with_graph and self.backward is None:  # no backward can come, and none runs
            self.release_all()

    # When it does so: backward.

    def begin_backward(self) -> None:
        self.forget_what_raised()
        if self.backward is None:  # else another output of the model began it
            end = functools.partial(self.end_backward)  # an object that only autograd will hold
            self.backward = Backward(self.in_order, weakref.ref(end))
            torch_private.call_at_end_of_backward(end)  # only autograd knows when it is over
            self.gather_roots()  # an evaluation, or another backward, may have released them

    def forget_what_raised(self) -> bool:
        """If a backward raised, drop what it brought. Did one? (-1: none runs now. What it reduced stays in .grad.)"""
        raised = self.backward is not None and (self.backward.end() is None or torch_private.current_backward() == -1)
        if raised:
            self.backward = None
            self.open_uses.clear()
        return raised

    def open_use(self, use: Use) -> None:
        self.open_uses[use.unit] += 1
        self.gather(use.unit)

    def arrived(self, unit: Unit, number: int) -> None:
        """Autograd has written the .grad of the unit's parameter `number`."""
        gradient, unit.parameters[number].grad = unit.parameters[number].grad, None
        if self.forget_what_raised() or self.backward is None:
            raise RuntimeError(f"a gradient for {unit.layout.names[number]}, none for the model's output: {ELSE}")
        if gradient is not None:  # a custom Function may give none: then `end_backward` raises
            self.backward.put(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        self.reduce_what_is_complete()

    def reduce_what_is_complete(self) -> None:
        """Reduce the units that wait for nothing more, as far as the order allows."""
        while self.backward.left and not self.backward.owed[self.backward.left[0]]:
            self.reduce_next()

    def reduce_next(self) -> None:
        unit = self.backward.left.pop(0)
        self.reduce(unit, self.backward.gradients.pop(unit))  # only `reduce` holds the buffer from here on

    def close_use(self, use: Use) -> None:
        self.open_uses[use.unit] -= 1
        if not self.open_uses[use.unit]:
            self.release(use.unit)

    def end_backward(self) -> None:
        owed = [unit.layout.names[number] for unit in self.backward.left for number in self.backward.owed[unit]]
        self.backward = None
        self.release_all()
        if owed:
            raise RuntimeError(f"no gradient came of {', '.join(owed)}: {ELSE}")

    def gather_roots(self) -> None:
        for unit in self.roots:
            self.gather(unit)

    def release_all(self) -> None:
        self.open_uses.clear()
        self.in_forward.clear()  # what is left there never ended: an exception, or early stop in a recompute
        for unit in self.units:
            self.release(unit)
