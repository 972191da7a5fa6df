"""The core: *when* the things of a training step happen. *What* happens then is a stage's own file.

A unit is a block of the model. What lies outside the blocks is one more unit, the root, whose module is the model.
A *use* of a unit is one forward of its module, and the backward of that. In forward it begins and ends, in backward it
opens and closes (use.py).

       moment         it comes                                           what happens (in which stages)
    1  begin_use      a unit's module is called                          gather (3; in 1 and 2 after a step)
    2  end_use        that module returns                                release; the root waits for its backward (3)
    3  open_use       backward comes to what made a unit's output        gather (3)
    4  arrived        autograd has written a parameter's .grad           if its unit has all gradients: reduce
    5  close_use      backward comes to what made a unit's input         release (3)
    6  end_backward   backward is over                                   release all (3)

What made a tensor is its `grad_fn`, an operation of forward. Row 5 does not come if the input has no `grad_fn`, as that
of the model, or if it is in a list: then row 6 releases. In forward the root's use is around all others. Its backward
begins as soon as forward is over, so it stays whole between.

All ranks reduce their units in one order, so that their collectives meet: the last block first, the root last. A unit
whose gradients come too early waits for its turn.

The path of one gradient, of a unit with n elements, in stage 2. Autograd writes a parameter's .grad, and calls
`arrived`, which takes it away. `Backward.put` copies it to its place in the unit's flat buffer of 4n bytes. When the
buffer is full, and it is the unit's turn, the stage's `reduce` gets it. In zero2.py a ring reduce-scatter sends
4n (N-1)/N bytes to the right neighbour. What comes from the left goes into two more buffers of 4n/N. One of these
becomes the result, this rank's part of the average. `Unit.set_gradient` adds to it the .grad that the shard has, if
any, and makes the sum its .grad. When `reduce` returns, the buffer is freed. After backward the optimizer steps the
shard, a part of the replica. The unit's next use gathers the rest. (n = 8, N = 4: 32 bytes, 24 sent, 8 left.)

The core trains in FP32; communication and computation take turns. Its limits, two lists:

    refused, with the reason                           not seen: wrong without a word
    a parameter that is frozen or not FP32             the module is moved (`to`) or saved (`state_dict`)
    a buffer                                           a unit's output is written to in place
    a unit returns no tensor and no tuple of these     a unit calls itself
    in a backward a parameter has no gradient or two   a step comes between forward and backward
    a loss of parameters alone, such as `w.norm()`     a fused kernel steps, and PyTorch does not count its writes
                                                       a loop takes a shard for a parameter, and clips by its norm
                                                       the module's parameters are read outside of a forward

Next come the stages' files, ddp.py to zero3.py. They name 16 bits, since `any_model/` is built on them. It lifts or
checks the limits above: `from minizero import Zero3`.
Li et al., 2020, "PyTorch Distributed", section 3.2; Zhao et al., 2023, "PyTorch FSDP", section 4.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minizero import torch_private
from minizero.engines.layout import Layout, divide
from minizero.engines.use import ELSE, Use, arrival, as_tuple
from minizero.memory import tag  # tells the memory ledger what a tensor is
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm


class Unit:
    """Parameters that are gathered, reduced and freed together.

                    replica: the parameters are views of it    master: the optimizer steps it
        DDP         (size,)                                    the replica itself
        Zero1, 2    (size,)                                    this rank's chunk: a view of the replica
        Zero3       (size,), its memory only during a use      this rank's chunk: memory of its own

    module: whose forward uses the unit. comm: the ranks that share it, here all. shards: what the optimizer steps, here
    one, with the memory of `master`. running: its uses whose forward runs now.

    version: how many writes PyTorch had counted for `master` (`_version`) when the replica was made; -1 if it is away.
    The shard is a parameter made of `master`, and shares its count. A step makes the count larger: the replica is old.
    (A gather does not count: zero1.py says why.)
    """

    dtype = torch.float32  # of the replica
    replica: Tensor
    master: Tensor
    shards: list[nn.Parameter]

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], comm: Comm) -> None:
        self.name, self.module, self.comm = name, module, comm
        self.parameters = list(parameters.values())
        for parameter in self.parameters:
            parameter.grad = None  # of a backward before the module was wrapped
        self.layout = Layout(list(parameters), [p.shape for p in self.parameters], comm.size)
        self.size = self.layout.size  # elements of a flat buffer
        self.version = -1
        self.running: list[Any] = []

    def from_rank_0(self, comm: Comm, values: Sequence[Tensor] | None = None) -> Tensor:
        """Rank 0's values, by default the parameters', end to end, padded: (size,). comm: all ranks."""
        full = torch.zeros(self.size, dtype=torch.float32, device=comm.device)
        for view, value in zip(self.layout.views(full), values or self.parameters, strict=True):
            view.copy_(value.detach())
        # The ranks compare labels: they raise if their parameters have other shapes.
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
        """Must the replica be made anew? It is away, or a step has written to the shard, which is `master`."""
        return self.master._version != self.version

    def replica_is_fresh_now(self) -> None:
        """The replica has been made from what the masters are now."""
        self.version = self.master._version

    def set_gradient(self, average: Tensor, full: Tensor | None = None) -> None:
        """Add the average to the shard's .grad. full: the buffer that it lies in. (any_model needs it, in 16 bits.)"""
        tag(average, "gradients")
        (shard,) = self.shards
        shard.grad = average if shard.grad is None else average.add_(shard.grad)


class Backward:
    """What counts only while a backward runs.

    left: the units still to be reduced, in order. owed: by unit, the numbers of its parameters that have no gradient
    yet. gradients: by unit, its flat buffer, (size,), once one has come. open_uses: by unit, how many uses backward is
    inside of. buckets: in DDP, the gradients that wait for more (ddp.py). at_end: see `runs`.
    """

    def __init__(self, in_order: Sequence[Unit], at_end: weakref.ref) -> None:
        self.at_end = at_end
        self.left = list(in_order)
        self.owed = {unit: set(range(len(unit.parameters))) for unit in in_order}
        self.gradients: dict[Unit, Tensor] = {}
        self.open_uses: Counter[Unit] = Counter()
        self.buckets: dict[torch.dtype, list[tuple[Unit, Tensor]]] = {}

    def put(self, unit: Unit, number: int, gradient: Tensor) -> None:
        """Copy the gradient of parameter `number` to its place."""
        if number not in self.owed[unit]:
            raise RuntimeError(f"a second gradient for {unit.layout.names[number]} in one backward: {ELSE}")
        if unit not in self.gradients:
            self.gradients[unit] = torch.zeros(unit.size, dtype=unit.dtype, device=gradient.device)
            tag(self.gradients[unit], "gradients")
        unit.layout.views(self.gradients[unit])[number].copy_(gradient)
        self.owed[unit].discard(number)

    def runs(self) -> bool:
        """Has it neither raised, nor come to its end?

        Nobody tells us that a backward has raised. But autograd then drops what it was to call at the end. We hold that
        by a weak reference, `at_end`: if it is dead, this backward has raised, or is over.
        """
        return self.at_end() is not None


class Engine(nn.Module):
    """A module whose parameters live in the flat buffers of units. Base of CoreDDP, CoreZero1, CoreZero2, CoreZero3.

    blocks: modules of it, each to be a unit. If forward has another order than `named_modules`, gradients wait.
    """

    def __init__(self, module: nn.Module, comm: Comm, blocks: Iterable[nn.Module] | None) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.last_backward: Any = None  # a `Backward`, until it is over
        self.units = self.make_units(blocks)
        self.in_order: Sequence[Unit] = self.units[::-1]  # reduced last block first, root last
        for unit in self.units:
            self.keep(unit, unit.from_rank_0(comm))
            unit.replica_is_fresh_now()
            self.release(unit)
            self.watch_unit(unit)

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
        return [Unit(name or "root", modules.get(name, self.module), its, self.comm) for name, its in units if its]

    # What a stage does.

    def keep(self, unit: Unit, full: Tensor) -> None:
        """Set the unit's `replica` and `master`, and cut its shards. full: rank 0's values, (size,)."""

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """The unit's gradient is complete here, (size,): average it over the ranks, and give the shards their part."""

    def gather(self, unit: Unit) -> None:
        """The unit is about to be used, in forward or in backward: make its parameters whole, if they are not."""

    def release(self, unit: Unit) -> None:
        """The unit is not used for now: free the memory of its parameters."""

    # When it does so: forward.

    def watch_unit(self, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(  # prepend: before the user's own hooks
            lambda _, args, kwargs: self.begin_use(unit, args, kwargs), prepend=True, with_kwargs=True
        )
        unit.module.register_forward_hook(lambda _, __, output: self.end_use(unit, output))
        for number, parameter in enumerate(unit.parameters):
            parameter.register_post_accumulate_grad_hook(arrival(self, unit, number))

    def begin_use(self, unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.gather(unit)
        unit.running.append(Use(self, unit, [part for value in (*args, *kwargs.values()) for part in as_tuple(value)]))

    def end_use(self, unit: Unit, output: Any) -> None:
        use = unit.running.pop()
        use.watch(output)
        self.forward_is_over(use)

    def forward_is_over(self, use: Use) -> None:
        root_waits = use.unit.module is self.module and torch.is_grad_enabled()  # for its backward
        runs_again = self.is_open(use.unit)  # in backward, by activation checkpointing: backward needs it next
        if not root_waits and not runs_again:
            self.release(use.unit)

    # When it does so: backward. A `Use` calls open_use and close_use, a parameter's hook calls `arrived`.

    @property
    def backward(self) -> Any:
        """The `Backward` that runs, or None.

        After one that raised: its buffers stay until the next one. Shards may have got averages from it: call
        zero_grad(). Units that it left whole are released after their next use.
        """
        return self.last_backward if self.last_backward and self.last_backward.runs() else None

    def is_open(self, unit: Unit) -> bool:
        """Is backward inside of a use of the unit?"""
        backward = self.backward
        return backward is not None and backward.open_uses[unit] > 0

    def begin_backward(self) -> None:
        if self.backward is None:
            end = self.end_backward  # a new bound method; soon only autograd holds it: `Backward.runs`
            self.last_backward = Backward(self.in_order, weakref.ref(end))
            torch_private.call_at_end_of_backward(end)

    def open_use(self, use: Use) -> None:
        self.begin_backward()
        self.backward.open_uses[use.unit] += 1
        self.gather(use.unit)

    def arrived(self, unit: Unit, number: int) -> None:
        """Autograd has written the .grad of the unit's parameter `number`."""
        gradient, unit.parameters[number].grad = unit.parameters[number].grad, None
        if not self.is_open(unit):
            raise RuntimeError(f"a gradient for {unit.layout.names[number]}, none for what its unit returned: {ELSE}")
        if gradient is not None:  # a custom Function may give none: then `end_backward` raises
            self.backward.put(unit, number, gradient)
        del gradient  # copied; its memory must be free before the ring needs some
        self.reduce_what_is_complete()

    def reduce_what_is_complete(self) -> None:
        """Reduce the units that wait for nothing more, as far as the order allows."""
        backward = self.backward
        while backward.left and not backward.owed[backward.left[0]]:
            self.reduce_next()

    def reduce_next(self) -> None:
        unit = self.backward.left.pop(0)
        self.reduce(unit, self.backward.gradients.pop(unit))  # only `reduce` holds the buffer from here on

    def close_use(self, use: Use) -> None:
        self.backward.open_uses[use.unit] -= 1
        if not self.is_open(use.unit):
            self.release(use.unit)

    def end_backward(self) -> None:
        owed = [unit.layout.names[number] for unit in self.backward.left for number in self.backward.owed[unit]]
        self.release_all()
        self.last_backward = None
        if owed:
            raise RuntimeError(f"no gradient came of {', '.join(owed)}: {ELSE}")

    def release_all(self) -> None:
        for unit in self.units:
            unit.running.clear()  # of forwards that did not end: one has raised, or checkpointing has stopped it
            self.release(unit)
