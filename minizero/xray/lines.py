"""Where in the user's own code each tensor is born: its line, and its shape.

While an operator runs, the line that called it is on Python's stack: the first frame, from the inside, of a file that
belongs neither to PyTorch nor to this package. What is born in backward has no such line. But autograd numbers the
operations of forward, and an operation that goes backwards knows its number. So it has the line that it had forwards.
"""

import functools
import os
import sys
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from minizero import torch_private
from minizero.memory import Ledger
from minizero.memory.operators import dense_parts
from minizero.memory.recorder import Recorder
from minizero.memory.tape import Record

LOOP = os.path.join(os.path.dirname(__file__), "step.py")  # what calls the user's code: beyond it no line counts
HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
MODELS = os.path.join(HERE, "models", "")  # of the lessons: a user's code, like any other model
TORCH, PYTHON = (os.path.join(os.path.dirname(str(module.__file__)), "") for module in (torch, os))


@functools.cache  # it is asked for each frame
def is_users(file: str) -> bool:
    """Does the file belong to the user, or to a library of models?"""
    machinery = file.startswith((HERE, TORCH, "<")) or (file.startswith(PYTHON) and "site-packages" not in file)
    return file.startswith(MODELS) or not machinery


class Birth(NamedTuple):
    """How a tensor came into the world."""

    shape: tuple[int, ...]
    module: str  # whose forward ran, or goes backwards
    line: str  # "gpt.py:148", or "" where no code of the user ran
    operator: str  # which made it
    again: bool  # in a forward that a backward has begun


class LineRecorder(Recorder):
    """A recorder that also notes each tensor's `Birth`, on its record."""

    def __init__(self, tape: Any) -> None:
        super().__init__(tape)
        self.forwards: dict[int, tuple[str, str]] = {}  # by autograd's number of an operation: its module and line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.tape)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.tape) == before:  # no operator
            return result
        module, line = self.position.running[-1], self.line()
        again = self.position.in_backward and len(self.position.running) > self.position.outside
        if not line and (number := torch_private.operation_going_backwards()) in self.forwards:
            module, line = (module, self.forwards[number][1]) if again else self.forwards[number]
        elif not self.position.in_backward:
            self.forwards.setdefault(torch_private.next_operation() - 1, (module, line))
        for entry in self.tape[before:]:
            if type(entry) is Record and (storage := entry()) is not None and not hasattr(entry, "birth"):
                parts = (part for leaf in tree_leaves(result) for part in dense_parts(leaf))
                shapes = [tuple(part.shape) for part in parts if part.untyped_storage() is storage]
                entry.birth = Birth(next(iter(shapes), ()), module, line, str(func), again)
        return result

    def line(self) -> str:
        """The line of the user's code that runs: file and number."""
        frame = sys._getframe(2)
        while frame is not None and (name := frame.f_code.co_filename) != LOOP:
            if is_users(name):
                return f"{os.path.basename(name)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


class LineLedger(Ledger):
    """A ledger whose records know the lines."""

    recorder_type = LineRecorder
