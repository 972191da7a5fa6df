"""Looking at every operator of a function that is run twice: keep some results, or compare them all.

Both are dispatch modes, which see each operator below autograd. `Kept` hands out in the second run what it kept
in the first, so that only the rest is computed again; `Comparison` says which operator gave other values.

Selective recomputation: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minizero.recompute.inputs import map_tensors
from minizero.recompute.replay import ADVICE, RecomputeMismatch, draws

Policy = Callable[[Any], bool]

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution")
ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")  # of which many kinds


def keep_matmuls(operator: Any) -> bool:
    """Keep what takes long, matrix products, convolutions and attention; the cheap rest is computed again."""
    name = operator._schema.name.removeprefix("aten::")
    return name in MATMULS or name.startswith(ATTENTION)


class Watched(TorchDispatchMode):
    """Watches the first run; what `again()` gives, the second."""

    is_over = False

    def first_run_is_over(self) -> None:
        self.is_over = True

    def again(self) -> TorchDispatchMode:
        if not self.is_over:
            raise NotImplementedError(
                "checkpoint: the function calls backward inside itself, which neither verify nor a policy can follow: "
                "leave them out"
            )
        return self.second_run()

    def second_run(self) -> TorchDispatchMode:
        raise NotImplementedError


class Kept(Watched):
    """Keeps the results of the operators that `policy` says, each a `torch._ops.OpOverload`.

    saved: grows by one for each tensor that autograd saves.
    """

    def __init__(self, policy: Policy, saved: list[Any]) -> None:
        super().__init__()
        self.policy, self.saved = policy, saved
        self.results: list[Any] = []  # of every such operator: its name, tensors and their versions; None: not kept
        self.places: list[int] = []  # how many tensors autograd had saved before each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if written := _written(func, args, kwargs or {}):
            # Versions do not tell all: the parts that unsafe_chunk makes (recurrent cells use it) have their own.
            for number, kept in enumerate(self.results):
                if kept is not None and not written.isdisjoint(_storages(kept[1])):
                    self.results[number] = None
        elif _makes_tensors(func) and self.policy(func):
            # The result itself will lead to the graph, which leads here: an alias, or nothing would be freed.
            aliases = map_tensors(_alias, result)
            drawn = draws(func, args, kwargs or {})
            self.results.append(None if drawn else (func._schema.name, aliases, _versions(aliases)))
            self.places.append(len(self.saved))
        return result

    def first_run_is_over(self) -> None:
        # The second run stops at the last tensor that autograd saved: what came after it is not needed.
        for number, place in enumerate(self.places):
            if place == len(self.saved):
                self.results[number] = None
        self.is_over = True

    def second_run(self) -> TorchDispatchMode:
        return _Given(self.policy, self.results)


class _Given(TorchDispatchMode):
    """The second run: what was kept is not computed."""

    def __init__(self, policy: Policy, results: list[Any]) -> None:
        super().__init__()
        self.policy, self.results, self.number = policy, results, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = None
        if _makes_tensors(func) and self.policy(func):
            self.number += 1
            kept = self.results[self.number] if self.number < len(self.results) else None
        if kept is None or _has_changed(kept):
            return func(*args, **(kwargs or {}))
        name, aliases, _ = kept
        if name != func._schema.name:
            raise RecomputeMismatch(
                f"checkpoint: the second forward came to {func._schema.name} where the first ran {name}: {ADVICE}"
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.results[self.number] = None
        return map_tensors(_alias, aliases)


class Comparison(Watched):
    """Notes a digest of every operator's result in the first run, and compares with it in the second.

    The second run may leave operators out (a parameter that was gathered for the first run may still be there).
    """

    def __init__(self, seen: list[tuple[str, bytes]] | None = None) -> None:
        super().__init__()
        self.first, self.number = seen is None, 0
        self.seen = [] if seen is None else seen

    def second_run(self) -> TorchDispatchMode:
        return Comparison(self.seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if _is_view(func) or "empty" in name or name == "aten::resize_":  # compared already, or anything
            return result
        now = name, _digest(result)
        if self.first:
            self.seen.append(now)
            return result
        for number in range(self.number, len(self.seen)):
            if self.seen[number] == now:
                self.number = number + 1
                return result
        if name == "aten::_to_copy":  # autocast held a weight that had been cast before the first run
            return result
        where = f"checkpoint: operator {self.number} of the second forward, {name},"
        if self.number < len(self.seen) and self.seen[self.number][0] == name:
            raise RecomputeMismatch(
                f"{where} gave other values than in the first: what it reads has changed since, or was drawn from a "
                "generator other than torch's: pass it as an argument"
            )
        raise RecomputeMismatch(f"{where} was not run by the first: {ADVICE}")


@functools.cache
def _makes_tensors(func: Any) -> bool:
    """Are all results new tensors, and no argument is written to?"""
    schema = func._schema
    return not any(value.alias_info for value in (*schema.returns, *schema.arguments))


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The storages that this call writes to."""
    places = _places_written(func)
    if not places:
        return set()
    given = dict(enumerate(args)) | kwargs
    return _storages([given.get(place) for place in places])


@functools.cache
def _places_written(func: Any) -> list[Any]:
    """Numbers and names of the arguments that an operator writes to."""
    written = [(i, argument) for i, argument in enumerate(func._schema.arguments) if argument.alias_info]
    return [place for i, argument in written if argument.alias_info.is_write for place in (i, argument.name)]


def _storages(value: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}


@functools.cache
def _is_view(func: Any) -> bool:
    return any(output.alias_info and not output.alias_info.is_write for output in func._schema.returns)


def _has_changed(kept: Any) -> bool:
    """Was it written to in place since? Then it is computed again, and written to again."""
    return kept is not None and _versions(kept[1]) != kept[2]


def _versions(result: Any) -> list[int]:
    results = result if isinstance(result, tuple | list) else (result,)
    return [tensor._version for tensor in results if isinstance(tensor, torch.Tensor)]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own on the same memory, which shares its version: a later write to either is noticed."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _digest(result: Any) -> bytes:
    """Of the bits of all tensors and numbers in an operator's result. Bytes are an operator's scratch, and left out."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor):
            digest.update(repr(leaf).encode())
        elif leaf.dtype != torch.uint8 and leaf.layout == torch.strided:
            copy = leaf.detach().to("cpu", copy=True)  # numpy() would make its storage one that cannot be resized
            digest.update(copy.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
