"""Where an emulation rounds nothing: the operators that rounding itself is made of must be exact.

`emulate` sees every operator of its thread, also those by which this package converts, counts and compares numbers.
A function that works on bits is marked with `@exactly`, and left alone.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_thread = threading.local()  # .exact


def is_exact() -> bool:
    """Whether this thread is inside an `exact` block."""
    return getattr(_thread, "exact", False)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """While the block runs, no `emulate` of this thread rounds anything."""
    before = is_exact()
    _thread.exact = True
    try:
        yield
    finally:
        _thread.exact = before


def exactly(function: Function) -> Function:
    """A decorator: wherever the function is called, no `emulate` rounds what its operators compute."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # no emulation sees compiled code
            return function(*args, **kwargs)
        with exact():
            return function(*args, **kwargs)

    return cast(Function, call)
