"""Other functions under PyTorch's names, for a time, and for one thread: what a GPU would answer, on a machine without.

A name is the whole process's. So what is lent asks which thread calls: in others it does what was there before.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def lent(*names: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """While it is entered, each `owner.name` is another function, called as `function(before, *args, **kwargs)`.

    before: what was there. Other threads call that.
    """
    thread = threading.get_ident()

    def calling(before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            here = threading.get_ident() == thread
            return function(before, *args, **kwargs) if here else before(*args, **kwargs)

        return functools.wraps(before)(call) if callable(before) else call

    with contextlib.ExitStack() as stack:
        for owner, name, function in names:
            lending = calling(getattr(owner, name, None), function)
            stack.enter_context(mock.patch.object(owner, name, lending, create=True))
        yield
