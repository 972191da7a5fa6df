"""Where an emulation rounds nothing: what rounding itself is made of has to come out exact.

`emulate` sees every operator of its thread, those that convert, count and compare numbers for this package
among them. Functions that work on bits say so, and are left alone.
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
    """Whether this thread is inside of such a place."""
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
    """A decorator: the function's operators are left alone, wherever it is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # no emulation sees what is compiled
            return function(*args, **kwargs)
        with exact():
            return function(*args, **kwargs)

    return cast(Function, call)
