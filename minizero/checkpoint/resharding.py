"""Resharding: one set of ranks saves its shards, and another set, which cuts elsewhere, reads them.

    saved by 2 ranks    |      rank 0       |      rank 1       |
    read by 3 ranks     |   rank 0   |   rank 1   |   rank 2    |      rank 1 reads from both files

A key says what a tensor is, never in which shard it lay. It names the parameter, the kind of value, and the elements of
the flattened parameter:

    "blocks.0.up.weight/parameter/0:512"   "blocks.0.up.weight/exp_avg/0:512"   "blocks.0.up.weight/step/tensor"

A rank that loads looks at the keys of all files. It reads the ranges that it will hold: no rank ever has the full
model. PyTorch's `torch.distributed.checkpoint` reshards in this way, too.
"""

import io
import pickle
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from minizero.engines.any_model.guards.optimizers import SHARDS_OF
from minizero.engines.any_model.unit import Unit
from minizero.engines.any_model.wrapped import Wrapped
from minizero.ranks.collectives import all_reduce

# Stored parts of a flat tensor: the first element, one past the last, and an object that reads slices of the part.
Ranges = list[tuple[int, int, Any]]
# What the files hold, by name and kind ("parameter", "exp_avg", …): ranges; and numbers.
Stored = tuple[dict[str, dict[str, Ranges]], dict[str, dict[str, Any]]]


def pieces(unit: Unit, low: int = 0, high: int | None = None) -> Iterator[tuple[str, int, nn.Parameter, slice]]:
    """The pieces of parameters that this rank holds of a unit; of its elements low … high only.

    Each piece: the parameter's name, the piece's first element in the parameter, the shard, and the slice of the shard.
    """
    high = unit.layout.numel if high is None else high  # the padding belongs to no parameter
    start = 0 if unit.unsharded else unit.comm.rank * unit.master.numel()
    for shard in unit.shards:
        end = start + shard.numel()
        # Look only at the parameters from where the shard begins to where it ends: DDP may have thousands of both.
        some = slice(bisect_right(unit.layout.offsets, start) - 1, bisect_left(unit.layout.offsets, end))
        for name, shape, offset in zip(unit.layout.names[some], unit.layout.shapes[some], unit.layout.offsets[some]):
            first, last = max(start, offset, low), min(end, offset + shape.numel(), high)
            if first < last:
                yield name, first - offset, shard, slice(first - start, last - start)
        start = end


def part_to_write(unit: Unit, model: Wrapped) -> tuple[int, int]:
    """The first of the unit's elements that this rank writes, and one past the last: replicas of a chunk divide it."""
    chunks, size = 1 if unit.unsharded else unit.comm.size, unit.master.numel()
    replica, chunk = divmod(model.comm.rank, chunks)  # a group is of neighbours (hybrid.py)
    replicas = model.comm.size // chunks
    return chunk * size + size * replica // replicas, chunk * size + size * (replica + 1) // replicas


def tensors_to_write(model: Wrapped, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of this rank's file, by key. `ValueError` for what `load` could not give back to the optimizer."""
    check_optimizer(optimizer)
    tensors: dict[str, torch.Tensor] = {}
    if model.comm.rank == 0:
        tensors |= {f"{name}/buffer/whole": buffer.clone() for name, buffer in buffers(model).items()}
        tensors |= {f"{name}/other/whole": in_bytes(name, value) for name, value in model.own_state()[2].items()}
    state = optimizer.state
    # A kind of state is a number if for some parameter it has not the parameter's shape. One parameter alone cannot
    # tell: if it has no dimensions, its moments have the shape of a number.
    numbers = {k for p in state for k, v in state[p].items() if getattr(v, "shape", None) != p.shape}
    for unit in model.units:
        for name, first, shard, where in pieces(unit, *part_to_write(unit, model)):
            elements = f"{first}:{first + where.stop - where.start}"
            tensors[f"{name}/parameter/{elements}"] = shard.detach().view(-1)[where].float()
            for kind, value in state.get(shard, {}).items():
                if kind not in numbers:
                    tensors[f"{name}/{kind}/{elements}"] = value.view(-1)[where]
                elif isinstance(value, torch.Tensor) and value.numel() == 1:
                    tensors[f"{name}/{kind}/tensor"] = value.clone()  # copied: several names may share it
                elif isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else None
                    tensors[f"{name}/{kind}/number"] = torch.tensor(value, dtype=dtype)
                elif value is not None:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps for {name} a {kind} that is neither a number nor as long as "
                        "the parameter: use an elementwise optimizer, such as AdamW"
                    )
    return tensors


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`ValueError` for hyperparameters and states that no file could give back."""
    wrong = [k for group in optimizer.param_groups for k, v in group.items() if k != "params" and not plain(v)]
    for owner, states in optimizer.state.items():
        kinds = states if isinstance(owner, torch.Tensor) else [owner]
        wrong += [k for k in kinds if k is owner or not isinstance(k, str) or k == "parameter" or "/" in k]
    if wrong:
        raise ValueError(
            f"{type(optimizer).__name__} has {', '.join(map(repr, wrong))}: a checkpoint keeps of its groups numbers, "
            "strings, lists and dicts; of its state what a parameter has, but not as 'parameter' or with a '/'"
        )


def plain(value: Any) -> bool:
    """Does JSON give the value back? It makes lists of tuples, and a number of a tensor or a NumPy scalar."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inside) for key, inside in value.items())
    if hasattr(value, "item") and value.shape in ((), (1,)):
        value = value.item()
    return all(map(plain, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | str | None)


def look_up(files: list[Path]) -> Stored:
    """What the files hold of each name and kind. Ranges are not read yet; numbers and buffers are."""
    ranges: dict[str, dict[str, Ranges]] = defaultdict(lambda: defaultdict(list))
    numbers: dict[str, dict[str, Any]] = defaultdict(dict)
    for path in files:
        file = safe_open(path, framework="pt")  # reads the keys
        for key in file.keys():  # noqa: SIM118
            name, kind, elements = key.rsplit("/", 2)
            if elements in ("tensor", "whole"):
                numbers[name][kind] = file.get_tensor(key).clone()  # a view would keep the file open
            elif elements == "number":
                numbers[name][kind] = file.get_tensor(key).item()
            else:
                low, high = map(int, elements.split(":"))
                ranges[name][kind].append((low, high, file.get_slice(key)))
    return ranges, numbers


def overlaps(ranges: Ranges, first: int, length: int) -> Iterator[tuple[slice, slice, Any]]:
    """What is stored of the elements from `first` to `first + length`: the slice of these, the slice of it, and it."""
    for low, high, stored in ranges:
        begin, end = max(low, first), min(high, first + length)
        if begin < end:
            yield slice(begin - first, end - first), slice(begin - low, end - low), stored


def check_shards(stored: Stored, model: Wrapped) -> None:
    """`ValueError` unless everything that this rank holds is stored, and all of one shard was stepped equally often.

    An optimizer keeps one number of steps for a shard. It cannot hold two.
    """
    ranges, numbers = stored
    first_in: dict[nn.Parameter, str] = {}
    for name, first, shard, where in (piece for unit in model.units for piece in pieces(unit)):
        length = where.stop - where.start
        for kind in ("parameter", *ranges[name]):
            found = sum(part.stop - part.start for part, _, _ in overlaps(ranges[name][kind], first, length))
            if found != length:
                raise ValueError(f"{name}: {length - found} elements of its {kind} are in no file")
        other = first_in.setdefault(shard, name)
        if ranges[name].keys() != ranges[other].keys() or numbers[name] != numbers[other]:
            raise ValueError(
                f"{name} has not been stepped as often as {other}, and is in one shard with it: "
                "use group_by to keep them apart"
            )


def fill(stored: Stored, model: Wrapped, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Read what this rank holds: parameters, buffers, and optimizer states. The optimizer may have no states yet."""
    ranges, numbers = stored
    order = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[nn.Parameter, dict[str, Any]] = {}

    def begin(shard: nn.Parameter, name: str) -> None:
        if shard in order and shard not in states:
            empty = {kind: torch.zeros_like(shard) for kind in ranges[name] if kind != "parameter"}
            states[shard] = empty | numbers[name]

    for name, first, shard, where in (piece for unit in model.units for piece in pieces(unit)):
        begin(shard, name)
        targets = {"parameter": shard.detach()} | states.get(shard, {})
        for kind, found in ranges[name].items():
            out = targets[kind].view(-1)[where]
            for part, slice_stored, file in overlaps(found, first, len(out)):
                out[part].copy_(file[slice_stored])
    # A shard that holds only padding, or nothing, needs states too: all ranks step and refresh every shard.
    for unit in model.units:
        for shard, group in zip(unit.shards, unit.groups):
            begin(shard, unit.layout.names[unit.group_of.index(group)])
        torch.autograd.graph.increment_version(unit.master)
    for name, buffer in buffers(model).items():
        buffer.copy_(numbers[name]["buffer"])
    model.load_others({name: from_bytes(numbers[name]["other"]) for name in model.own_state()[2]})
    by_number = {order[p]: state for p, state in states.items() if state}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


# The index: what is the same on all ranks.


def names_of(model: Wrapped, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Names and shapes of parameters and buffers, the optimizer's groups, and each parameter's group. Collective.

    `TypeError` if the model is not wrapped. `ValueError` if the optimizer has other tensors than the model's.
    """
    if not isinstance(model, Wrapped):
        raise TypeError(f"checkpoint: the model must be wrapped, in DDP or Zero3 say; it is a {type(model).__name__}")
    group_of_shard = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if group_of_shard.keys() - {shard for unit in model.units for shard in unit.shards}:
        raise ValueError("checkpoint: the optimizer must be built from this wrapped model's parameters()")
    shapes = {
        name: str(tuple(shape)) for unit in model.units for name, shape in zip(unit.layout.names, unit.layout.shapes)
    }
    here = dict.fromkeys(shapes, -1)
    for name, _, shard, _ in (piece for unit in model.units for piece in pieces(unit)):
        here[name] = group_of_shard.get(shard, -1)
    # A rank knows the groups of the parameters that it holds, and says -1 for others. The maximum over ranks knows all.
    numbers = all_reduce(torch.tensor(list(here.values()), device=model.comm.device), model.comm, "max")
    return {
        "parameters": shapes,
        "buffers": {name: str(tuple(buffer.shape)) for name, buffer in buffers(model).items()}
        | dict.fromkeys(model.own_state()[2], "of its own"),
        "optimizer": type(optimizer).__name__,
        "group_of": {name: group for name, group in zip(here, numbers.tolist()) if group >= 0},
        "groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names", SHARDS_OF)}
            for group in optimizer.param_groups
        ],
    }


def decided(model: Wrapped, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> dict[str, str]:
    """What each rank decides by itself, and all must decide alike: the groups' hyperparameters, and counts of steps."""
    said = {f"the hyperparameter {key} of group {i}": v for i, group in enumerate(groups) for key, v in group.items()}
    for name, _, shard, _ in (piece for unit in model.units for piece in pieces(unit)):
        for kind, value in optimizer.state.get(shard, {}).items():
            if isinstance(value, int | float) or isinstance(value, torch.Tensor) and value.shape == () != shard.shape:
                said[f"the optimizer's {kind} of {name}"] = value
    return {what: str(v.item() if getattr(v, "shape", None) in ((), (1,)) else v) for what, v in said.items()}


def buffers(model: Wrapped) -> dict[str, torch.Tensor]:
    """The model's persistent buffers, by their first names."""
    first: dict[int, str] = {}
    return {name: b for name, b in model.own_state()[1].items() if first.setdefault(id(b), name) == name}


def in_bytes(name: str, value: Any) -> torch.Tensor:
    """What a module saves besides parameters and buffers. `ValueError` if reading it would run code."""
    torch.save(value, file := io.BytesIO())
    try:
        from_bytes(written := torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} is a {type(value).__name__}: let it be of tensors, numbers, strings, dicts"
        ) from error
    return written


def from_bytes(written: torch.Tensor) -> Any:
    """What `in_bytes` was given."""
    return torch.load(io.BytesIO(written.numpy().tobytes()), map_location="cpu", weights_only=True)


def check_names(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """`ValueError` unless the checkpoint has this model's names and shapes, and an optimizer of the same class."""
    for what in ("parameters", "buffers", "group_of"):
        of = "the optimizer's parameters" if what == "group_of" else what
        if missing := sorted(here[what].keys() - saved[what].keys()):
            raise ValueError(f"{of} that the checkpoint has not: {', '.join(missing)}: is it another model's?")
        if unknown := sorted(saved[what].keys() - here[what].keys()):
            raise ValueError(
                f"{of} of the checkpoint that are not here: {', '.join(unknown)}: is it another model's, or does a "
                "forward make them? Then run one first"
            )
        for name, shape in here[what].items():
            if what != "group_of" and shape != saved[what][name]:
                raise ValueError(f"{name} has shape {saved[what][name]} in the checkpoint, {shape} here")
    if saved["optimizer"] != here["optimizer"]:
        raise ValueError(f"the checkpoint is of {saved['optimizer']}, not {here['optimizer']}: use the same optimizer")


def hyperparameters(saved: dict[str, Any], here: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[dict]:
    """The optimizer's groups, with the hyperparameters that their parameters were saved with.

    `ValueError` if a group's parameters were saved with different ones.
    """
    groups = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(groups):
        origins = sorted({saved["group_of"][name] for name, i in here["group_of"].items() if i == number})
        if any(saved["groups"][origin] != saved["groups"][origins[0]] for origin in origins):
            raise ValueError(
                f"parameter group {number} here holds parameters of groups {origins} of the checkpoint, whose "
                "hyperparameters differ: keep them apart"
            )
        for key, value in saved["groups"][origins[0]].items() if origins else ():
            if key in group and not alike(value, group[key]):
                raise ValueError(f"the hyperparameter {key} is {value!r} in the checkpoint, and {group[key]!r} here")
            if isinstance(group.get(key), torch.Tensor):
                group[key] = torch.full_like(group[key], value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value  # JSON makes lists of tuples
    return groups


def alike(saved: Any, here: Any) -> bool:
    """Can `saved` stand where `here` does: both numbers, or both words, or lists of such? None stands for anything."""
    if saved is None or here is None:
        return True
    if isinstance(here, tuple | list):
        return isinstance(saved, list) and len(saved) == len(here) and all(map(alike, saved, here))
    return isinstance(saved, str if isinstance(here, str) else int | float)
