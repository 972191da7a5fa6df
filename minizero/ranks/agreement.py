"""All ranks say what they are about to do, and either all say the same, or all raise.

Ranks that disagree would hang, abort, or take each other's bytes for something else. So each
collective begins with words such as "all_gather #17 of 4,096 elements (4096,) of torch.float32,
label=blocks.3". Threads compare the words before data move. Processes turn the words into a tag
on each message: messages with different tags never meet. (Here `comm` is a `Comm`: comm.py stands above this file.)
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Observer = Callable[[str, str, float], None]  # gets a collective's operation, its label, and when it began


@contextlib.contextmanager
def agreement(comm: Any, operation: str, tensor: torch.Tensor | None = None, **details: object) -> Iterator[None]:
    """The collective inside this block is one that all ranks are in; `CollectiveMismatch` on each of them if not."""
    transport, began = comm.transport, time.perf_counter()
    transport.sequence += 1
    name = f"{operation} #{transport.sequence}"
    what = "" if tensor is None else f" of {tensor.numel():,} elements {tuple(tensor.shape)} of {tensor.dtype}"
    extras = "".join(f", {key}={value}" for key, value in details.items() if value != "")
    try:
        transport.begin(name, f"{name}{what}{extras}")
        yield
        transport.settle()  # if no message has settled it, as in a barrier
    finally:
        transport.collective = None
        for observe in comm.observers:
            observe(operation, str(details.get("label", "")), began)


def words_of_all(comm: Any, operation: str, words: str) -> list[str]:
    """Every rank's words, in rank order. A collective of the name `operation`."""
    with agreement(comm, operation):
        comm.transport.settle()  # first they agree: otherwise another collective's words could come
        return comm.transport.exchange(words)
