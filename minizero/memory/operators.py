"""Operators: how to watch them; and what their outputs can be: new tensors, views of inputs, or inputs written to.

Its schema tells: `add(Tensor self, …) -> Tensor` makes a new tensor, `view(Tensor(a) self, …) -> Tensor(a)` an alias,
`add_(Tensor(a!) self, …) -> Tensor(a!)` writes to what it was given. Most operators make no new tensor.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watcher(TorchDispatchMode):
    """A dispatch mode as PyTorch's, without the layer that keeps its compiler away from each call of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would cost a microsecond a call, and two seconds to import

    def run_in_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that is made of others, and watch those."""
        TorchDispatchMode.__enter__(self)
        try:
            return func.decompose(*args, **kwargs or {})
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)


def dense_parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those that it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):  # a DTensor, say
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, torch.Tensor)]
    if not isinstance(tensor, torch.Tensor):
        return []
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


RESIZERS = ("aten::resize_", "aten::resize_as_", "aten::set_")
ONE_NEW = ("new",)  # what most of the others are, recognised by identity
# Made of other operators: autograd takes it apart, but in inference mode, or from another mode, it comes whole, and
# its own schema does not tell whether `to`, `reshape` or `contiguous` copies.
IN_PARTS = ("in parts",)

outputs_of: dict[int, tuple[str, ...]] = {}  # by the operator's id(): its hash would be computed in Python
_known: list[Any] = []  # kept alive, so that no operator can get the id of one that is gone


def learn(func: Any) -> tuple[str, ...]:
    """For each output "new", "written" (perhaps resized) or "" (a view); () where none is of interest; or IN_PARTS."""
    schema = func._schema
    may_resize = any(argument.is_out for argument in schema.arguments) or schema.name in RESIZERS

    def kind(output: Any) -> str:
        if "Tensor" not in str(output.type):  # a number; the profiler's own objects
            return ""
        if output.alias_info is None:
            return "new"
        return "written" if may_resize else ""

    kinds = tuple(kind(output) for output in schema.returns)
    # torch.tensor's, declared as a view, of a tensor that nobody has seen; deepcopy's and torch.load's, of a storage.
    if schema.name == "aten::lift_fresh" or schema.overload_name == "source_Storage_storage_offset":
        kinds = ("new",)
    # What asks for a fake tensor's device (prim::device) is no operator of the dispatcher, and makes nothing.
    if func.namespace != "prim" and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        kinds = IN_PARTS
    elif not any(kinds):
        kinds = ()
    elif kinds == ONE_NEW and str(schema.returns[0].type) == "Tensor":
        kinds = ONE_NEW
    _known.append(func)
    outputs_of[id(func)] = kinds
    return kinds
