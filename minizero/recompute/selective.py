"""Looking at every operator of a function that is run twice: keep some results, or compare them all.

Both are dispatch modes, which see each operator below autograd. `Keeper` keeps results of the first run and hands
them out in the second, so that only the rest is computed again. `Comparison` says which operator gave other values.

Selective recomputation: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero import torch_private
from minizero.recompute.guards.mismatch import ADVICE, RecomputeMismatch

Policy = Callable[[Any], bool]

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution")
ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")  # how their names begin


def keep_matmuls(operator: Any) -> bool:
    """Keeps matrix products, convolutions and attention, which take long. The cheap rest is computed again."""
    name = operator._schema.name.removeprefix("aten::")
    return name in MATMULS or name.startswith(ATTENTION)


class Observer(TorchDispatchMode):
    """Sees every operator of the first run. `again()` gives the mode that sees those of the second."""

    second_run: Callable[[], TorchDispatchMode] | None = None  # there is one when `first_run_is_over` was called

    def again(self) -> Any:
        # A function that goes backward inside itself runs again before the first run is over: unseen.
        return self.second_run() if self.second_run else torch_private.without_modes()


class Result(NamedTuple):
    """What an operator gave in the first run."""

    operator: str
    tensors: Any  # aliases of its tensors, nested as it gave them
    versions: list[int]


class Keeper(Observer):
    """Keeps the results of the operators that `policy` chooses, each a `torch._ops.OpOverload`.

    saved: grows by one for each tensor that autograd saves.
    """

    def __init__(self, policy: Policy, saved: list[Any]) -> None:
        super().__init__()
        self.policy = policy
        self.saved = saved
        self.results: list[Result | None] = []  # of every operator chosen, in order; None: not kept
        self.saved_before: list[int] = []  # how many tensors autograd had saved before each of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            # A result that is written to is not the operator's any more: it will be computed again. Versions would
            # not show every write: the parts that unsafe_chunk makes (recurrent cells use it) have their own.
            written = _storages((args[:1], kwargs))
            for number, kept in enumerate(self.results):
                if kept is not None and not written.isdisjoint(_storages(kept.tensors)):
                    self.results[number] = None
        elif _makes_tensors(func) and self.policy(func):
            # The result itself will lead to the graph, which leads here: an alias, or nothing would be freed.
            aliases = tree_map_only(torch.Tensor, _alias, result)
            # Random numbers must be drawn again, so that the generator moves on for those that follow.
            drawn = draws(func, args, kwargs or {})
            self.results.append(None if drawn else Result(func._schema.name, aliases, _versions(aliases)))
            self.saved_before.append(len(self.saved))
        return result

    def first_run_is_over(self, may_stop: bool) -> None:
        # If the second run stops at the last tensor that autograd saved, results that came after it are not needed.
        for number, saved_before in enumerate(self.saved_before):
            if may_stop and saved_before == len(self.saved):
                self.results[number] = None
        self.second_run = functools.partial(_HandOut, self.policy, self.results)


class _HandOut(TorchDispatchMode):
    """The second run: what was kept is handed out and not computed."""

    def __init__(self, policy: Policy, results: list[Result | None]) -> None:
        super().__init__()
        self.policy = policy
        self.results = results
        self.number = -1  # of the last operator that the policy chose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = None
        if _makes_tensors(func) and self.policy(func):
            self.number += 1
            kept = self.results[self.number] if self.number < len(self.results) else None
        # If it was written to since, it is computed again, and written to again.
        if kept is None or _versions(kept.tensors) != kept.versions:
            return func(*args, **(kwargs or {}))
        if kept.operator != func._schema.name:
            raise RecomputeMismatch(
                f"checkpoint: the second forward came to {func._schema.name} where the first ran {kept.operator}: "
                f"{ADVICE}"
            )
        # With retain_graph another backward will ask again.
        if not torch_private.keeps_graph():
            self.results[self.number] = None
        return tree_map_only(torch.Tensor, _alias, kept.tensors)


class Comparison(Observer):
    """Notes a digest of every operator's result in the first run, and compares with it in the second.

    The second run may leave operators out (a parameter that was gathered for the first run may still be there).
    """

    def __init__(self, noted: list[tuple[str, bytes]] | None = None) -> None:
        super().__init__()
        self.is_first = noted is None
        self.noted = [] if noted is None else noted  # of each operator of the first run: its name, and the digest
        self.number = 0  # in the second run: of the operator that the first ran next

    def first_run_is_over(self, may_stop: bool) -> None:
        self.second_run = functools.partial(Comparison, self.noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        # A view's numbers have been compared already; new memory holds any.
        if func.is_view or "empty" in name or name == "aten::resize_":
            return result
        now = name, _digest(result)
        if self.is_first:
            self.noted.append(now)
            return result
        # Look for it from where the first run stood, past the operators that this run leaves out.
        for number in range(self.number, len(self.noted)):
            if self.noted[number] == now:
                self.number = number + 1
                return result
        if name == "aten::_to_copy":  # autocast held a weight that had been cast before the first run
            return result
        where = f"checkpoint: operator {self.number} of the second forward, {name},"
        if self.number < len(self.noted) and self.noted[self.number][0] == name:
            raise RecomputeMismatch(
                f"{where} gave other values than in the first: what it reads has changed since, or was drawn from a "
                "generator other than torch's: pass it as an argument"
            )
        raise RecomputeMismatch(f"{where} was not run by the first: {ADVICE}")


@functools.cache
def _makes_tensors(func: Any) -> bool:
    """Does the operator return new tensors only, and write to no argument?"""
    schema = func._schema
    return not any(value.alias_info for value in (*schema.returns, *schema.arguments))


def _storages(value: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {torch_private.storage_id(tensor.untyped_storage()) for tensor in tensors if tensor.layout == torch.strided}


def _versions(result: Any) -> list[int]:
    return [tensor._version for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory. It shares the version, so a later write to either is noticed."""
    with torch_private.counting_no_version():
        return tensor.detach()


def _digest(result: Any) -> bytes:
    """A digest of the bits of all tensors and numbers in a result. Tensors of bytes are scratch, and left out."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor):
            digest.update(repr(leaf).encode())
        elif leaf.dtype != torch.uint8 and leaf.layout == torch.strided:
            copy = leaf.detach().to("cpu", copy=True)  # numpy() would make its storage one that cannot be resized
            digest.update(copy.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does this call of an operator draw random numbers? If it were not repeated, all later draws would differ."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    if func is torch.ops.aten.native_dropout.default and given["train"] is False:
        return False
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0
