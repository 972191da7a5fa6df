"""Which parameters form a unit: by default the repeated blocks of a model, and the root unit for all that is left."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minizero.engines.any_model.norms import keeps_statistics
from minizero.engines.any_model.unit import Unit
from minizero.engines.layout import divide


def make_units(engine: Any, given: Iterable[nn.Module] | None) -> list[Unit]:
    """The root unit first, then the others in the order given. given: modules, by default the repeated blocks.

    Parameters that are frozen, and those of norms that compute in FP32 while the rest does not, form units of their
    own.
    """
    module, dtype = engine.module, engine.dtype or torch.float32
    given = [block for _, block in repeated_blocks(module)] if given is None else list(given)
    paths = {part: path for path, part in module.named_modules()}  # a block under several names has the first
    if not paths.keys() >= set(given):
        raise ValueError("units: each must be a submodule of the wrapped module")
    chosen = {paths[part]: part for part in given}
    held: dict[bool, set[int]] = {True: set(), False: set()}  # by norms, by other parts
    for part in module.modules():
        held[keeps_statistics(part)].update(id(parameter) for parameter in part.parameters(recurse=False))
    contents: dict[tuple[str, bool, torch.dtype], dict[str, nn.Parameter]] = {}
    for path, named in divide(module, chosen).items():
        for name, parameter in named.items():
            its = torch.float32 if id(parameter) in held[True] - held[False] else dtype
            contents.setdefault((path, parameter.requires_grad, its), {})[name] = parameter
    units = []
    for (path, trains, its), named in contents.items():
        name = (path or "root") + ("" if its == dtype else " (norms)") + ("" if trains else " (frozen)")
        comm = engine.ahead.gathers.comm if engine.ahead else engine.inside  # of the thread that gathers
        units.append(Unit(name, chosen.get(path, module), named, engine.comm, comm, its, engine.group_by))
    return units


def repeated_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of each ModuleList that hold parameters, and those of each Sequential of one type: (path, child).

    A child without a forward, such as a ModuleList, is never called itself: its own children may be.
    """
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    one_type = isinstance(module, nn.Sequential) and len({type(child) for _, child in children}) == 1
    for child_path, child in children:
        listed = isinstance(module, nn.ModuleList) and any(True for _ in child.parameters())
        if (one_type or listed) and type(child).forward is not nn.Module.forward:
            yield child_path, child
        else:
            yield from repeated_blocks(child, child_path)
