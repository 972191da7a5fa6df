"""Random generators, set back for a second run, so that dropout repeats its first mask.

Torch's generators are set back: the global ones and those among the arguments. The global ones of NumPy and Python
are not, so a function that draws from them is refused. A rank that is a thread has states of its own of the global
ones; `torch.random.default_generator` then stands for them.
"""

import ctypes
import random
from collections.abc import Iterable
from typing import Any

import torch
from numpy.random import MT19937, mtrand

from minizero.recompute.guards.mismatch import RecomputeMismatch
from minizero.torch_private import without_modes

States = list[tuple[torch.Generator, torch.Tensor]]


class Generators:
    """The states of generators before the first run. given: the tensors and generators among the arguments."""

    def __init__(self, given: Iterable[Any]) -> None:
        generators = [one for one in given if isinstance(one, torch.Generator)]
        generators += _global_generators([one for one in given if isinstance(one, torch.Tensor)])
        self.states: States = [(generator, generator.get_state()) for generator in generators]
        self.refused = [(name, read, read()) for name, read in (("NumPy", _numpy_state), ("Python", random.getstate))]

    def first_run_is_over(self) -> None:
        """Forgets generators that were not used. Raises `RecomputeMismatch` if a number drawn cannot be drawn again."""
        with without_modes():  # a mode that watches operators is not to see the comparison
            self.states = [(one, before) for one, before in self.states if not torch.equal(one.get_state(), before)]
        for name, read, before in self.refused:
            if read() != before:
                raise RecomputeMismatch(
                    f"checkpoint: numbers were drawn from {name}'s global generator, which is not set back for the "
                    "second forward: draw them with torch, or outside, and pass them as an argument"
                )
        self.refused = []

    def put_back(self) -> States:
        """Sets the generators to where they were before the first run. Returns where they are now, for `set_states`."""
        now = [(generator, generator.get_state()) for generator, _ in self.states]
        set_states(self.states)
        return now


def set_states(states: States) -> None:
    """Set each generator to its state. A mode that watches operators does not see it."""
    if states:
        with without_modes():
            for generator, state in states:
                generator.set_state(state)


def _global_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Torch's generators of the CPU, of the current GPU and of the GPUs that the tensors are on."""
    if not torch.cuda.is_initialized():
        return [torch.random.default_generator]
    indices = {tensor.get_device() for tensor in tensors if tensor.is_cuda} | {torch.cuda.current_device()}
    return [torch.random.default_generator, *(torch.cuda.default_generators[index] for index in sorted(indices))]


_without_spare = b""  # the words of NumPy's generator when last no spare waited


def _numpy_state() -> tuple[Any, Any]:
    """What changes if something is drawn from NumPy's global generator: its words, and the spare."""
    # Normal numbers are made in pairs, of which the second waits as a spare. Taking it changes no word.
    # Reading the words takes half a microsecond, reading the spare 30.
    global _without_spare
    generator = mtrand.get_bit_generator()
    # 624 words, and which is next
    words = ctypes.string_at(generator.ctypes.state_address, 2500) if type(generator) is MT19937 else b""
    if words and words == _without_spare:
        return words, None
    state: Any = mtrand.get_state(legacy=False)
    spare = state["gauss"] if state["has_gauss"] else None
    if spare is None:
        _without_spare = words
    return words or repr(state["state"]), spare
