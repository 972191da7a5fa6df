"""Put an answer in place of the package's function, in every module of ours that has the function by name."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

from tests.exercises.course import Exercise
from tests.exercises.definition import definition

OURS = {"minizero", "flash", "precision", "tests"}


def holder_of(exercise: Exercise) -> Any:
    """The module or the class that has the target."""
    holder: Any = importlib.import_module(definition(exercise).module)
    for name in exercise.target.split(".")[:-1]:
        holder = getattr(holder, name)
    return holder


Places = list[tuple[dict[str, Any], str]]


def found_in(exercise: Exercise) -> Places:
    """Where modules of ours have the package's function: names in their dicts, and in dicts that these hold."""
    original = vars(holder_of(exercise))[exercise.function]
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] in OURS]
    scopes = [scope for each in ours for scope in (vars(each), *(v for v in vars(each).values() if type(v) is dict))]
    return [(scope, name) for scope in scopes for name, value in scope.items() if value is original]


@contextlib.contextmanager
def patched(exercise: Exercise, answer: Any, at: Places | None = None) -> Iterator[None]:
    """Inside the block the package runs with `answer`, and afterwards with its own function again.

    at: the `found_in`, if they are known.
    """
    holder, name = holder_of(exercise), exercise.function
    original = vars(holder)[name]
    if isinstance(holder, type):
        if isinstance(original, staticmethod | classmethod) and not isinstance(answer, type(original)):
            answer = type(original)(answer)
        setattr(holder, name, answer)
        try:
            yield
        finally:
            setattr(holder, name, original)
        return
    at = found_in(exercise) if at is None else at
    for scope, key in at:
        scope[key] = answer
    try:
        yield
    finally:
        for scope, key in at:
            scope[key] = original


@contextlib.contextmanager
def hollow(exercise: Exercise, other: Callable[..., Any]) -> Iterator[None]:
    """Inside the block the package's own function does what `other` does, for who still has it somewhere."""
    own = function_of(exercise)
    code = own.__code__
    if code.co_freevars:  # a method that calls super() has another kind of code
        yield
        return
    own.__code__ = other.__code__
    try:
        yield
    finally:
        own.__code__ = code


def function_of(exercise: Exercise) -> FunctionType:
    """What a kernel, a static method, or a decorator's wrapper holds."""
    own = vars(holder_of(exercise))[exercise.function]
    return cast(FunctionType, inspect.unwrap(getattr(own, "fn", getattr(own, "__func__", own))))
