"""Generators of its own for a function that runs in a thread, such as a rank of a `World`.

Torch's global generators belong to the process. Ranks that are threads draw from them in any order, so setting them
back would not repeat a rank's numbers. `OwnGenerators` sees every operator of the run. An operator that draws gets
a generator of this run, seeded alike in the first run and in every later one.
"""

import functools
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minizero.recompute.guards.mismatch import RecomputeMismatch
from minizero.torch_private import without_modes

_running = threading.local()  # .own: the innermost `OwnGenerators` of this thread


def in_a_thread() -> bool:
    """Is this a thread beside the main one?"""
    return threading.current_thread() is not threading.main_thread()


class OwnGenerators(TorchDispatchMode):
    """Goes around each run of one function: the numbers drawn inside are the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.seed: int | None = None  # drawn once, when the first run first needs it
        self.asked = 0  # how many checkpoints inside this run have asked for a seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Any:
        # Each run begins anew: the same seed, and no generator yet.
        self.asked, self.generators = 0, {}
        self.outer, _running.own = getattr(_running, "own", None), self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _running.own = self.outer
        super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch keeps its compiler away by one more layer, which doubles an operator's cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Most operators draw nothing: they are let through first.
        if not may_draw(func):
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generator([*args, kwargs.get("device")])
        # Dropout's operator takes no generator: here is its formula.
        if func is torch.ops.aten.native_dropout.default:
            x, p = args[:2]
            mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
            return x * mask * (1 / (1 - p) if p < 1 else 0), mask
        variant = _with_generator(func)
        if variant is None:
            raise RecomputeMismatch(
                f"checkpoint: {func._schema.name} in a thread draws from torch's generator, which all threads share, "
                "and takes no other: make the ranks processes, or leave its dropout out"
            )
        return variant(*args, **kwargs | {"generator": generator})  # kwargs may hold generator=None

    def _generator(self, given: list[Any]) -> torch.Generator:
        """The generator of the first tensor's device in `given`; without tensors, of the device that ends it."""
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), given[-1])
        device = torch.device(device or "cpu")
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self._seed())
        return self.generators[device]

    def _seed(self) -> int:
        if self.seed is None:
            if self.outer is not None:
                # A checkpoint in a checkpoint: the outer one's second run must lead to the same seed.
                self.outer.asked += 1
                self.seed = (self.outer._seed() + 0x9E3779B97F4A7C15 * self.outer.asked) % 2**63
            else:
                with without_modes():
                    self.seed = int(torch.randint(2**63 - 1, ()))
        return self.seed


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator, perhaps the operator itself; None if there is none."""
    names = {argument.name for argument in func._schema.arguments} | {"generator"}
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    return next((o for o in overloads if {argument.name for argument in o._schema.arguments} == names), None)


@functools.cache
def may_draw(func: Any) -> bool:
    """Are there calls of this operator that draw random numbers?"""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does this call of an operator draw random numbers? If it were not repeated, all later draws would differ."""
    if not may_draw(func):
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    if func is torch.ops.aten.native_dropout.default and given["train"] is False:
        return False
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0
