"""Where an emulation rounds nothing: the operators that rounding itself is made of must be exact.

`emulate` sees every operator of its thread, also those by which this package converts, counts and compares numbers.
What works on bits stands in a block, `with exact():`, or is a function marked with `@exact()`, and is left alone.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

_thread = threading.local()  # .exact


def is_exact() -> bool:
    """Whether this thread is inside an `exact` block."""
    return getattr(_thread, "exact", False)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """While the block runs, or the function that it decorates, no `emulate` of this thread rounds anything."""
    if torch.compiler.is_compiling():  # no emulation sees compiled code
        yield
        return
    before = is_exact()
    _thread.exact = True
    try:
        yield
    finally:
        _thread.exact = before
