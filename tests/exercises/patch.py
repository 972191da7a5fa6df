"""An answer in place of the package's function: wherever a module of ours has the one by name, it gets the other."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

OURS = {"minizero", "flash", "precision", "tests"}


def resolve(target: str) -> tuple[Any, str]:
    """What holds the target, a module or a class, and its name there."""
    path = target.split(".")
    for length in range(len(path) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(path[:length]))
        except ModuleNotFoundError as error:
            if not ".".join(path[:length]).startswith(error.name or "?"):
                raise
            continue
        for name in path[length:-1]:
            holder = getattr(holder, name)
        return holder, path[-1]
    raise ValueError(f"there is no {target}")


@contextlib.contextmanager
def patched(target: str, answer: Any) -> Iterator[None]:
    """The package runs with `answer` inside, and with its own function again afterwards."""
    holder, name = resolve(target)
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


def _replace(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] in OURS:
            for scope in [vars(module), *(v for v in vars(module).values() if type(v) is dict)]:
                for name in [name for name, value in scope.items() if value is old]:
                    scope[name] = new
