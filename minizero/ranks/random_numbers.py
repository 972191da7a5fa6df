"""A rank that is a thread draws the random numbers that a process of its own would draw.

Threads share torch's default generators. So each rank has a state of its own for them, and takes it up around whatever
comes to them. Then it is alone:

    set the rank's state | dropout, normal_, manual_seed, get_rng_state … | note the state, set the old one back

Operators come to a generator: `torch.library` puts a function of ours around the kernels of those that draw. And
torch's functions, such as `torch.manual_seed`, find a generator by its name: an `OfThisRank` has that name.
All else runs at the same time, as before. (If one rank computed at a time, the generator could change hands where
ranks wait for each other; but then a step of the demo takes up to 1.6 times as long on two cores.)

Meant are torch's generators of the CPU and of the rank's GPU. The methods of `torch.default_generator` itself, NumPy's
generator and Python's still belong to the process, and a thread that a rank starts is no rank: `shared_states` shows
what was drawn there.
"""

import contextlib
import functools
import os
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from minizero import torch_private

States = dict[Any, torch.Tensor]  # by generator

LOCK = threading.RLock()  # who holds it has the default generators
THIS_THREAD = threading.local()  # .states: of the rank that this thread is; None while its generators have them
WRAPPED = torch.library.Library("aten", "IMPL")

if hasattr(os, "register_at_fork"):  # a process that forks off here must not wait for a thread that it does not have
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


@contextlib.contextmanager
def as_this_rank() -> Iterator[None]:
    """Inside, the default generators have the states of the rank that this thread is, if it is one."""
    with LOCK:
        states = getattr(THIS_THREAD, "states", None)
        if states is None:
            yield
            return
        before, THIS_THREAD.states = swap_states(states), None
        try:
            yield
        finally:
            THIS_THREAD.states = swap_states(before)


def swap_states(states: States) -> States:
    """Set the generators to these states. Returns those that they had."""
    before = {generator: generator.get_state() for generator in states}
    for generator, state in states.items():
        generator.set_state(state)
    return before


def states_for(device: torch.device) -> States:
    """What a rank on this device begins with: the states that its generators have for this thread."""
    wrap("CPU")
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # there are no generators before
        wrap("CUDA")
        stand_in: Any = torch.cuda.default_generators[device.index or 0]
        generators.append(stand_in.generator)
    with as_this_rank():
        return {generator: generator.get_state() for generator in generators}


def shared_states() -> dict[str, bytes]:
    """The states of the generators that no rank has for itself: Python's, NumPy's, and torch's outside of ranks."""
    with LOCK:
        states = {
            "Python's random": random.getstate(),
            "numpy.random": np.random.get_state(legacy=False),
            "torch's generator in a thread of their own": torch.default_generator.get_state().numpy(),
        }
    return {name: pickle.dumps(state) for name, state in states.items()}


@functools.cache
def wrap(kind: str) -> None:
    """From now on each thread that is a rank has its own states of the default generators of the CPU, or of CUDA."""
    for operator in torch_private.operators_that_draw(kind):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            WRAPPED.impl(operator, around(torch.library.get_kernel(operator, kind)), kind, with_keyset=True)
    if kind == "CPU":
        torch.random.default_generator = OfThisRank(torch.default_generator)  # type: ignore[assignment]
    else:
        torch.cuda.default_generators = tuple(map(OfThisRank, torch.cuda.default_generators))  # type: ignore[assignment]


def around(kernel: Any) -> Callable[..., Any]:
    """The kernel of an operator that draws, which draws as this rank."""

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with as_this_rank():
            return kernel.call_boxed(keys, *args, **kwargs)

    return draw


class OfThisRank:
    """A default generator's stand-in: what is asked of it is asked of the generator with this rank's state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any) -> Any:
            with as_this_rank():
                return getattr(self.generator, name)(*args)

        return method
