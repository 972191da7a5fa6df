"""What units may be given and return, beside tensors and tuples of them; and whether a backward is for parameters."""

import gc
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from minizero import torch_private
from minizero.engines import use


class Use(use.Use):
    """One use of a unit that is given anything, and returns anything."""

    def __init__(self, engine: Any, unit: Any, given: Any) -> None:
        super().__init__(engine, unit, tensors_in(given))
        self.version = unit.version  # of the master behind the replica

    def watch(self, output: Any) -> None:
        outputs = list(tensors_in(output))
        # An in-place write to a view changes its grad_fn; backward then reaches the grad_fn of its base first.
        bases = [tensor._base for tensor in outputs if tensor._base is not None]
        # If the unit will be away, attributes count, too: they may hold tensors that reach the loss.
        away = self.engine.frees_replicas and self.unit.module is not self.engine.module
        if any(tensor.requires_grad for tensor in outputs):
            self.unit.uses.add(self)
        self.open_with([*outputs, *bases, *(kept_in(self.unit.module) if away else ())])


def asks_for_parameters(nodes: list[Any], parameters: set[int]) -> bool:
    """Is the backward that runs now for parameters, too? Not so in `torch.autograd.grad(loss, inputs)`.

    nodes: autograd's, from which it goes on. parameters: their ids. A plain backward may reach no parameter on this
    rank: it leaves out nothing that it can reach.
    """
    nodes, seen, all_run = list(nodes), set(), True
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        if not torch_private.will_write(node):
            all_run = False
        elif id(getattr(node, "variable", None)) in parameters:  # it writes the .grad of one
            return True
        else:
            nodes += nodes_after(node)
    return all_run


def nodes_after(node: Any) -> list[Any]:
    """The nodes of autograd that a backward runs next; none after a leaf, whose node is None here."""
    return [] if node is None else [after for after, _ in node.next_functions if after is not None]


def leaves_as_views(args: Any, kwargs: Any) -> Any:
    """The arguments of a forward, with a view for each leaf among them that requires a gradient; or None.

    Autograd completes leaves before all else: when a leaf has its gradient, the unit's weights may still have none.
    A view is an operation like any other. It is older than the unit's own, so its turn comes after theirs.
    """
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    if not (leaves and torch.is_grad_enabled()):
        return None  # leave them as they are
    views = {key: leaf.view_as(leaf) for key, leaf in leaves.items()}  # one each: attention asks whether q is k
    return tuple(views.get(id(a), a) for a in args), {name: views.get(id(a), a) for name, a in kwargs.items()}


def converted(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to each tensor in its nested tuples, lists and dicts.

    A container is made anew only if a tensor in it became another one: a module may write into what it is given.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    whole = id(value)  # its number: tree_flatten leaves a cycle behind, which must not hold tensors
    parts, kind = tree_flatten(value, is_leaf=lambda part: id(part) != whole)  # one level
    new = [part if part is value else converted(part, change) for part in parts]
    return value if all(a is b for a, b in zip(parts, new, strict=True)) else tree_unflatten(new, kind)


KEPT = (torch.Tensor, list, tuple, set, deque, Mapping, types.SimpleNamespace)
NOT_KEPT = vars(nn.Module()).keys() - {"_buffers"}  # what every module has: parameters, parts, hooks


def kept_in(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that are attributes of the module or its parts, or in containers that are."""
    attributes = [vars(part).items() for part in module.modules()]
    kept = [v for its in attributes for name, v in its if name not in NOT_KEPT and isinstance(v, KEPT)]
    return list(tensors_in(kept))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and objects, such as a distribution, but not in modules; each once."""
    left, seen = [value], {}
    while left:
        if id(part := left.pop()) in seen:  # an object may hold itself
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            yield part
        elif not callable(part):  # as modules, classes and functions are
            left += gc.get_referents(part)  # of a container what is in it, of an object its attributes
