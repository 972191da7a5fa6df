"""The whole idea of the memory ledger on a page: read this first.

A tensor's bytes lie in its storage, and all views of the tensor share it. PyTorch calls a dispatch mode in place of
each operator. If the operator returns a storage that none of its arguments has, the storage is born there. Python says
when it dies. `current` goes up at each birth and down at each death. `peak` is the most that it has been.

    with LedgerOnAPage() as ledger:
        model(x, y).backward()
    ledger.peak

In a training step of a GPT, the full `Ledger` counts the same bytes, and 4 more for each parameter tensor: AdamW's
counter of steps. `torch.tensor(0.0)` makes it from a Python number, and no operator returns that memory as new.
What else this page does not count, or does not know, is why there are more files:

    recorder.py    storages that change their size
    operators.py   tensors made of Python numbers, or of other tensors; operators made of other operators
    tape.py        who holds what, at which moment: a category is often known only later
    hooks.py       what is older, such as the model; what is a parameter, a gradient, a state
    position.py    which phase runs, and which module
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LedgerOnAPage(TorchDispatchMode):
    """`current` and `peak`, in bytes, of the storages that are born inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = storages([*args, *kwargs.values()])
        result = operator(*args, **kwargs)
        for storage in storages([result]) - given:  # a view has the storage of an argument, and adds nothing
            self.count(storage.nbytes())
            weakref.finalize(storage, self.count, -storage.nbytes())  # is called when the storage dies
        return result

    def count(self, n_bytes: int) -> None:
        self.current += n_bytes
        self.peak = max(self.peak, self.current)


def storages(values: list[Any]) -> set[torch.UntypedStorage]:
    """The storages of the tensors in `values`, and in lists inside it."""
    return {tensor.untyped_storage() for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)}
