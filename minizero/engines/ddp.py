"""DDP, stage 0: every rank holds everything; gradients are averaged in backward.

    per rank (FP32, Adam)   parameters 4Ψ   gradients 4Ψ   optimizer 8Ψ   = 16Ψ bytes, for Ψ parameters
    sent per step           2Ψ (N-1)/N elements: all-reduce of the gradients

Each rank computes on its own part of the batch, and since all start from the same parameters
and apply the same averaged gradient, they stay the same without ever being sent.
Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minizero.engines.engine import Engine
from minizero.engines.unit import Unit
from minizero.memory import tag
from minizero.ranks.collectives import all_reduce

# A message costs its latency however short it is, so the gradients of several units travel together.
BUCKET_BYTES = 25 * 2**20  # PyTorch's choice too


class DDP(Engine):
    """Replicated data parallelism. Arguments, and the training loop: see `Engine`.

    In FP32 the optimizer's parameters are the module's own, so a hook of `register_hook` sees this rank's gradient, as
    under PyTorch's DDP.
    """

    def keep(self, unit: Unit, full: torch.Tensor) -> None:
        unit.replica = full.to(unit.dtype)
        unit.point_parameters_at(unit.replica)
        unit.master = full  # in FP32 the replica itself, so it is never old
        if unit.replica is full:
            unit.shards, unit.groups = unit.parameters, unit.group_of  # the optimizer sees the original parameters
        else:
            unit.cut_shards()

    def before_forward(self) -> None:
        for unit in self.units:
            if unit.replica_is_stale():
                unit.replica.copy_(unit.master)  # rounded to the computing dtype
                unit.replica_is_fresh_now()

    def reduce(self, unit: Unit, gradient: torch.Tensor) -> None:
        if unit is self.in_order[0]:  # the first of a backward
            self.buckets: dict[torch.dtype, list[tuple[Unit, torch.Tensor]]] = {}
        bucket = self.buckets.setdefault(unit.dtype, [])
        bucket.append((unit, gradient))
        if sum(g.nbytes for _, g in bucket) < BUCKET_BYTES and unit is not self.in_order[-1]:
            return
        for dtype in list(self.buckets) if unit is self.in_order[-1] else [unit.dtype]:
            bucket = self.buckets.pop(dtype)
            # A ring sums chunk r from rank r+1 on. Row r is chunk r of every unit, so each number is summed in the same
            # order as in the other stages.
            by_rank = [g.view(self.comm.size, -1) for _, g in bucket]
            rows = torch.cat(by_rank, dim=1)
            tag(rows, "gradients")
            all_reduce(rows, self.comm, out=rows, label=unit.name)
            for view, columns in zip(by_rank, rows.split([view.shape[1] for view in by_rank], dim=1)):
                torch.div(columns, self.comm.size, out=view)
            for each, averaged in bucket:
                each.set_gradient(averaged, full=averaged)

    # Each rank holds everything, so these work as in PyTorch's DDP, also on `module` and its parts; each rank calls
    # them by itself. In 16 bits the FP32 masters are saved and loaded: the next forward copies them to the replica.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.state_dict(self, *args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.load_state_dict(self, *args, **kwargs)

    def masters_of(self, part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """In 16 bits: the name of each parameter that the part itself holds, and its place in the masters."""
        masters = {
            id(parameter): master
            for unit in self.units
            if unit.dtype != torch.float32
            for parameter, master in zip(unit.parameters, unit.layout.views(unit.master), strict=True)
        }
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in masters:
                yield name, masters[id(parameter)]

    def part_saves(self) -> None:
        self.refresh()  # after a step in 16 bits the parameters are empty

    def part_saved(self, part: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, master in self.masters_of(part):
            if not isinstance(state.get(prefix + name), nn.Parameter):  # who asks for the parameter itself gets it
                state[prefix + name] = master.detach().float()

    @torch.no_grad()
    def part_loads(self, part: nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]) -> None:
        if about.get("assign_to_params_buffers"):
            raise ValueError("DDP: assign=True would replace the parameters that the engine watches: leave it out")
        self.refresh()
        for name, master in self.masters_of(part):
            new = state.get(prefix + name)
            if new is not None and new.shape == master.shape:  # else PyTorch says so
                master.copy_(new)
