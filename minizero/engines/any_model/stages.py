"""The public stages. *What* is that of ddp.py, zero1.py, zero2.py, zero3.py; *when* is that of engine.py here.

Python looks a method up from left to right, and `super()` goes on to the right:

    Zero3 (here)           CoreZero3 (zero3.py)        AnyModel (engine.py, wrapped.py)    core.Engine (core.py)
    gather, release, …     gather, release, …          -                                   (empty)              what
    -                      -                           begin_use, …                        begin_use, …         when

A stage's own file and engine.py never define the same name, so neither hides the other. What is here adds to a method
on its right, and calls it: to a stage's own, and, so that prefetch.py knows where a pass is, to some of engine.py.
Some take its place: DDP's `gather` rounds masters in 16 bits, what saves and loads there is PyTorch's, and Zero3's
`average` knows hybrid sharding, prefetch and offload. Its `refresh` leaves all to `gather`.
"""

from typing import Any

import torch
from torch import nn

from minizero import torch_private
from minizero.engines.any_model.engine import AnyModel
from minizero.engines.any_model.guards.modules import about_units
from minizero.engines.any_model.hybrid import inside_and_across
from minizero.engines.any_model.offload import to_host
from minizero.engines.any_model.prefetch import Ahead, check_prefetch
from minizero.engines.any_model.unit import Unit
from minizero.engines.ddp import CoreDDP
from minizero.engines.use import Use
from minizero.engines.zero1 import CoreZero1
from minizero.engines.zero2 import CoreZero2
from minizero.engines.zero3 import CoreZero3
from minizero.ranks.collectives import all_reduce, reduce_scatter
from minizero.ranks.comm import Comm
from minizero.ranks.errors import CollectiveMismatch, CommTimeout


class DDP(CoreDDP, AnyModel):
    """Replicated data parallelism. Arguments, and the training loop: see `AnyModel`.

    In FP32 the optimizer's parameters are the module's own, so a hook of `register_hook` sees this rank's gradient, as
    under PyTorch's DDP.
    """

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        super().keep(unit, full)
        if unit.replica is full:
            unit.shards, unit.groups = unit.parameters, unit.group_of

    def gather(self, unit: Unit) -> None:
        if unit.replica_is_stale():
            unit.replica.copy_(unit.master)  # rounded to the computing dtype
            unit.replica_is_fresh_now()

    # Each rank holds everything, so these work as in PyTorch's DDP, also on `module` and its parts; each rank calls
    # them by itself. In 16 bits the FP32 masters are saved and loaded: the next forward copies them to the replica.

    state_dict, load_state_dict = nn.Module.state_dict, nn.Module.load_state_dict

    def masters_of(self, part: nn.Module) -> dict[str, torch.Tensor]:
        """In 16 bits: by name of each parameter that the part itself holds, its place in the masters."""
        units = [unit for unit in self.units if unit.dtype != torch.float32]
        places = [zip(unit.parameters, unit.layout.views(unit.master), strict=True) for unit in units]
        masters = {id(parameter): master for its in places for parameter, master in its}
        its = part.named_parameters(recurse=False, remove_duplicate=False)
        return {name: masters[id(parameter)] for name, parameter in its if id(parameter) in masters}

    def part_saves(self) -> None:
        self.refresh()  # after a step in 16 bits the parameters are empty

    def part_saved(self, part: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, master in self.masters_of(part).items():
            if not isinstance(state.get(prefix + name), nn.Parameter):  # who asks for the parameter itself gets it
                state[prefix + name] = master.detach().float()

    @torch.no_grad()
    def part_loads(self, part: nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]) -> None:
        if about.get("assign_to_params_buffers"):
            raise ValueError("DDP: assign=True would replace the parameters that the engine watches: leave it out")
        self.refresh()
        for name, master in self.masters_of(part).items():
            new = state.get(prefix + name)
            if new is not None and new.shape == master.shape:  # else PyTorch says so
                master.copy_(new)


class Zero1(CoreZero1, AnyModel):
    """Sharded optimizer states. Arguments, and the training loop: see `AnyModel`."""


class Zero2(CoreZero2, AnyModel):
    """Sharded optimizer states and gradients. Arguments, and the training loop: see `AnyModel`."""


class Zero3(CoreZero3, AnyModel):
    """Sharded optimizer states, gradients and parameters. More arguments, and the training loop: see `AnyModel`.

    sharding_factor: shard over groups of so many ranks, by default over all (hybrid.py). prefetch: how many blocks are
    gathered ahead (prefetch.py); 0 does one thing at a time. offload: keep shards, gradients and optimizer
    states in the CPU's memory (offload.py). reshard_after_forward: False keeps what forward gathered until backward; a
    third less is sent, for 4Ψ bytes more at the peak (2Ψ in 16 bits). To compile, `torch.compile` each block before
    wrapping.
    """

    frees_replicas = True
    forward = torch_private.not_compiled(AnyModel.forward)  # torch.compile would trace memory that comes and goes

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        sharding_factor: int | None = None,
        prefetch: int = 1,
        offload: bool = False,
        reshard_after_forward: bool = True,
        **options: Any,
    ) -> None:
        check_prefetch(prefetch)
        self.inside, self.across = inside_and_across(comm, sharding_factor)  # across: same chunk, other groups, or None
        self.offload, self.reshard_after_forward = offload, reshard_after_forward
        self.ahead = Ahead(self, self.inside, prefetch) if prefetch else None
        super().__init__(module, comm, **options)

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        super().keep(unit, full)
        if self.offload:
            unit.master = to_host(unit.master, unit.master.dtype)
            unit.cut_shards()

    @torch_private.outside_transforms()
    def gather(self, unit: Unit) -> None:
        try:
            if self.ahead:
                self.ahead.gather(unit)
            super().gather(unit)  # if nobody gathered it ahead
        except (CollectiveMismatch, CommTimeout) as error:
            raise about_units(error) from error
        unit.point_parameters_at(unit.replica)

    @torch_private.outside_transforms()
    def release(self, unit: Unit) -> None:
        if self.ahead:
            self.ahead.wait_for(unit)  # a gather ahead writes to the memory that is given back here
        super().release(unit)
        unit.empty_parameters()

    @torch_private.outside_transforms()
    def keep_writes(self, unit: Unit) -> None:
        super().keep_writes(unit)
        if unit.dtype == unit.master.dtype and not unit.replica_is_stale():  # else the shard has what is new
            # `.data` is not counted: a counted write makes replicas stale.
            unit.master.data.copy_(unit.chunk(unit.replica))

    def forward_is_over(self, use: Use) -> None:
        self.keep_writes(use.unit)
        inside_itself = bool(use.unit.running)
        if not inside_itself and (self.reshard_after_forward or not torch.is_grad_enabled()):
            super().forward_is_over(use)

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        if self.ahead:
            self.ahead.reduce(unit, gradient)
        else:
            super().reduce(unit, gradient)

    def average(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor:
        inside = self.ahead.reductions.comm if self.ahead else unit.comm
        mine = reduce_scatter(gradient, inside, "mean", label=unit.name)
        if self.across is not None:  # a mean of means over groups of one size is the mean over all
            mine = all_reduce(mine, self.across, "mean", out=mine, label=unit.name)
        return to_host(mine) if self.offload else mine

    # Where a pass is, told to prefetch.py.

    def refresh(self) -> None:
        if self.ahead:
            self.ahead.begin_pass("forward")

    def bring(self, unit: Unit, number: int, gradient: torch.Tensor | None) -> None:
        if self.ahead and gradient is not None:
            self.ahead.before_put(unit)
        super().bring(unit, number, gradient)
        if self.ahead and gradient is not None:
            self.ahead.after_put(unit, self.backward.owed[unit])

    def end_forward(self, output: Any) -> None:
        super().end_forward(output)
        if self.ahead:
            for unit in [*self.ahead.gathering]:  # which this forward did not use
                self.release(unit)
            if self.backward is None:  # else this is a second run, and the backward goes on
                self.ahead.runs = ""

    def finish(self) -> None:
        if self.ahead:
            self.ahead.start_following()
            self.ahead.finish()
            self.ahead.runs = ""
