"""Operators: how to watch them, and what their outputs are.

An operator's schema says which outputs are new tensors:

    add(Tensor self, …) -> Tensor              a new tensor
    view(Tensor(a) self, …) -> Tensor(a)       an alias: it shares the input's storage
    add_(Tensor(a!) self, …) -> Tensor(a!)     the input itself, written to
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minizero import torch_private


class Watcher(TorchDispatchMode):
    """A dispatch mode: PyTorch calls its `__torch_dispatch__` in place of every operator of this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True is PyTorch's default. It wraps each call, to keep PyTorch's compiler out. That costs a microsecond a
        # call, and two seconds for the import of the compiler.
        return False

    def run_in_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that is made of others, and watch the others."""
        TorchDispatchMode.__enter__(self)
        try:
            return func.decompose(*args, **kwargs or {})
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)


def dense_parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors that hold a tensor's bytes: the tensor itself, or the tensors that it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as a DTensor is
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, torch.Tensor)]
    if not isinstance(tensor, torch.Tensor):
        return []
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    if tensor.layout != torch.strided:
        raise NotImplementedError(
            f"Ledger: nobody can see the bytes of a tensor of layout {tensor.layout}: compute without it (without "
            "to_mkldnn(), for example), or outside of the block"
        )
    return [tensor]


RESIZERS = ("aten::resize_", "aten::resize_as_", "aten::set_")
ONE_NEW = ("new",)  # the most frequent answer of `learn`; compared by identity, which is fastest
# The answer for an operator that is made of others. Usually autograd decomposes it first, and it never gets here. In
# inference mode, or under another mode, it comes whole; and the schemas of `to`, `reshape` and `contiguous` do not say
# whether they copy. So the recorder runs the parts, and looks at those.
IN_PARTS = ("in parts",)

outputs_of: dict[int, tuple[str, ...]] = {}  # what `learn` found, by the operator's id(): its hash is slow Python
_known: list[Any] = []  # keeps the operators alive, so that none gets the id of one that is gone


def learn(func: Any) -> tuple[str, ...]:
    """What an operator's outputs are, read off its schema once, and kept in `outputs_of`.

    For each output: "new", "written" (an input, perhaps resized), or "" (a view, or no tensor).
    () if all are "". IN_PARTS if the operator is made of others.
    """
    schema = func._schema
    may_resize = any(argument.is_out for argument in schema.arguments) or schema.name in RESIZERS

    def kind(output: Any) -> str:
        if "Tensor" not in str(output.type):  # a number; the profiler's own objects
            return ""
        if output.alias_info is None:
            return "new"
        return "written" if may_resize else ""

    kinds = tuple(kind(output) for output in schema.returns)
    # Two are declared as views, but of something that no operator has returned: `lift_fresh`, by which torch.tensor
    # makes a tensor from Python numbers, and `set_` to a storage, by which deepcopy and torch.load do.
    if schema.name == "aten::lift_fresh" or schema.overload_name == "source_Storage_storage_offset":
        kinds = ("new",)
    # prim::device, which asks for a fake tensor's device, is no operator of the dispatcher. It makes nothing.
    if func.namespace != "prim" and torch_private.consists_of_others(func):
        kinds = IN_PARTS
    elif not any(kinds):
        kinds = ()
    elif kinds == ONE_NEW and str(schema.returns[0].type) == "Tensor":
        kinds = ONE_NEW
    _known.append(func)
    outputs_of[id(func)] = kinds
    return kinds
