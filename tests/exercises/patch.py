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


@contextlib.contextmanager
def patched(exercise: Exercise, answer: Any) -> Iterator[None]:
    """Inside the block the package runs with `answer`, and afterwards with its own function again."""
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
    _replace(original, answer)
    try:
        yield
    finally:
        _replace(answer, original)


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


def _replace(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] in OURS:
            for scope in [vars(module), *(v for v in vars(module).values() if type(v) is dict)]:
                for name in [name for name, value in scope.items() if value is old]:
                    scope[name] = new
