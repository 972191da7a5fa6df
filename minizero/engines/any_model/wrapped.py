"""What a training loop may call on a wrapped model, whatever its stage (guards/wrapped.py: what it may not).

Nothing here is special to a stage: it works on the units' masters and shards, wherever they are.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from minizero.engines.any_model.guards.no_sync import check_averaged
from minizero.engines.any_model.guards.wrapped import Refuses
from minizero.engines.any_model.steps import Ours
from minizero.engines.any_model.unit import Unit
from minizero.ranks.collectives import all_gather, broadcast
from minizero.ranks.comm import Comm


class Wrapped(Refuses):
    """The contract of DDP, Zero1, Zero2 and Zero3."""

    inside: Comm  # the ranks that a unit is sharded over
    in_order: Sequence[Unit]  # those that train
    sync: bool  # False under no_sync
    loads_others = False  # does the module load what is neither a parameter nor a buffer?

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
        """The module's own state dict as it is now, with its very tensors; of it the buffers; and what hooks and
        `get_extra_state` give.
        """
        state, buffers = self.module.state_dict(keep_vars=True), {id(buffer) for buffer in self.module.buffers()}
        tensors = buffers | {id(parameter) for parameter in self.module.parameters()}
        others = {name: value for name, value in state.items() if id(value) not in tensors}
        return state, {name: value for name, value in state.items() if id(value) in buffers}, others

    def names_in(self, state: dict[str, Any]) -> dict[int, list[str]]:
        """The names of each value in `state`: a tied one has several. One that `state` lacks keeps its own."""
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            names.setdefault(id(value), []).append(name)
        return {id(parameter): [name] for name, parameter in self.module.named_parameters()} | names

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters: this rank's shards, named after their units.

        Write them by an optimizer or under no_grad: nobody notices a write through `.data`. Clip them by
        `clip_grad_norm_`: that of torch.nn.utils would see this rank's part only, and is refused.
        """
        for unit in self.units:
            if unit.trains:
                names = [prefix + name for name in unit.shard_names()]
                yield from zip(names, unit.shards, strict=True)

    def parameter_groups(self) -> dict[Any, list[nn.Parameter]]:
        """The shards by value of `group_by`. Every rank has each; one that it holds nothing of is empty."""
        result: dict[Any, list[nn.Parameter]] = {}
        for unit in self.units:
            if unit.trains:
                for group, shard in zip(unit.groups, unit.shards, strict=True):
                    result.setdefault(group, []).append(shard)
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up full local gradients and send nothing; the next one outside reduces all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        The arguments are those of `torch.nn.utils.clip_grad_norm_`; `foreach` changes nothing here. `RuntimeError` on
        all ranks if `error_if_nonfinite` and the norm is NaN or infinite: then no gradient is scaled.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: norm_type must be positive, not {norm_type}")
        for unit in self.in_order:
            check_averaged(type(self).__name__, unit, unit.shards)
        norms = torch.stack([unit.gradient_norms(norm_type) for unit in self.in_order])  # (units, chunks held)
        norms = norms.to(self.comm.device)  # under offload they are not there
        if not self.in_order[0].unsharded:
            norms = norms.t().contiguous()
            norms = all_gather(norms, self.inside, label="clip_grad_norm_").t().contiguous()
        norm = torch.linalg.vector_norm(norms, norm_type)  # unit by unit, rank by rank: one order in every stage
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"clip_grad_norm_: the norm over all ranks is non-finite ({norm}), nothing was scaled")
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self.parameters():
            if shard.grad is not None:
                shard.grad.mul_(scale.to(shard.device))
        return norm

    @torch.no_grad()
    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The full model on every rank, as the module's own `state_dict` has it. Collective.

        Parameters are FP32, other tensors rank 0's. What is no tensor, such as an extra state, is this rank's.
        """
        state, *_ = self.own_state()
        names = self.names_in(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state[name] = broadcast(value.to(self.comm.device), self.comm, label=name)
        for unit in self.units:
            mine = unit.master.to(self.comm.device)
            whole = mine if unit.unsharded else all_gather(mine, self.inside, label=unit.name)
            for parameter, view in zip(unit.parameters, unit.layout.views(whole), strict=True):
                state |= {n: view.to(torch.float32, copy=True) for n in names[id(parameter)] if n in state}
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `gather_state_dict`, or the plain module's `state_dict`, gave: rank 0's values. Collective.

        One name of a tied parameter suffices. `ValueError` that lists the names that are missing or too many, the
        shapes that differ, or the names of a tied parameter that have different values.
        """
        own, buffers, others = self.own_state()
        names_of = self.names_in(own)
        shapes = {name: b.shape for name, b in buffers.items()}
        for unit in self.units:
            for parameter, shape in zip(unit.parameters, unit.layout.shapes, strict=True):
                shapes |= dict.fromkeys(names_of[id(parameter)], shape)
        state = dict(state)
        for names in names_of.values():
            given = next((name for name in names if name in state), None)
            if given is not None:
                state = dict.fromkeys(names, state[given]) | state
        if wrong := sorted(({*shapes, *others}) ^ state.keys()):
            raise ValueError(f"load_full_state_dict: names missing or unknown: {', '.join(wrong)}")
        if wrong := [f"{n} {tuple(state[n].shape)}, here {tuple(s)}" for n, s in shapes.items() if state[n].shape != s]:
            raise ValueError(f"load_full_state_dict: shapes differ: {'; '.join(wrong)}")
        for first, *more in (names for names in names_of.values() if names[0] in shapes):
            one, again = state[first], [state[n] for n in more if state[n] is not state[first]]
            if not all(torch.allclose(one, x.to(one), rtol=0.0, atol=0.0, equal_nan=True) for x in again):
                raise ValueError(f"load_full_state_dict: {first}, {', '.join(more)} are one tensor: give one value")
        for name, buffer in buffers.items():
            buffer.copy_(broadcast(state[name].to(buffer), self.comm, label=name))
        for unit in self.units:
            full = unit.from_rank_0(self.comm, [state[names_of[id(parameter)][0]] for parameter in unit.parameters])
            unit.master.copy_(full if unit.unsharded else unit.chunk(full))
            if not unit.original:
                unit.empty_parameters()  # old until the next forward
        self.load_others({name: state[name] for name in others})

    def load_others(self, others: dict[str, Any]) -> None:
        """Let the module itself load what is neither a parameter nor a buffer."""
        self.loads_others = True
        try:
            if others:
                self.module.load_state_dict(others, strict=False)
        finally:
            self.loads_others = False

    def watch_state_dicts(self) -> None:
        """Register the hooks that are called when the `state_dict` of the module, or of a part, is made or loaded."""
        own = list(self.module.modules())  # a copy of the module has the same hooks
        for part in own:
            part.register_state_dict_pre_hook(  # with keep_vars it has the parameters themselves, not their values
                lambda part, _, keep_vars: self.part_saves() if part in own and not keep_vars else None
            )
            part.register_state_dict_post_hook(Ours(lambda *call: self.part_saved(*call[:3])))
            part.register_load_state_dict_pre_hook(
                lambda part, *call: self.part_loads(part, *call[:3]) if part in own and not self.loads_others else None
            )

    def part_saves(self) -> None:
        """The state dict of a part of the module is about to be made. DDP can; elsewhere it is refused."""
        self.state_dict()

    def part_saved(self, part: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A part of the module has put its replica into `state`: DDP in 16 bits puts its masters in their place."""

    def part_loads(self, part: nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]) -> None:
        """A part of the module is about to load its parameters from `state`."""
        self.load_state_dict()
