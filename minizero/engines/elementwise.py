"""Can an optimizer train flat shards? A trial decides: the same numbers, trained whole and as halves of a flat buffer.

    whole     one optimizer for a matrix and two convolutions' weights, in their own shapes
    halves    two optimizers, one for each half of the flat buffer with all, as two ranks of ZeRO hold it

An elementwise optimizer, such as AdamW, computes a number's new value from that number, its gradient and its states.
It never notices the cut, and both ways end with the same bits. LARS divides by the norm of a tensor, Adafactor looks
at rows and columns, Prodigy sums over all that it holds: a half has another norm, no rows, another sum. Such an
optimizer would train something else under ZeRO, without an error. No attribute tells; the numbers do.
"""

import concurrent.futures
import contextlib
import copy
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from minizero.ranks.alone import ALONE

# Factored optimizers leave matrices alone that have fewer than 128 rows or columns.
# A vector unit computes up to 16 numbers at once, two such vectors in a row, and what is left one by one, which can
# round differently. Here nothing is left: each tensor and each half is a multiple of 32. The cut lies inside a row.
SHAPES = ((128, 128), (16, 8, 3, 3), (16, 8, 4))
STEPS = 50  # some change only their states in the first ones
RATE = 1.0  # in place of the user's, which is 0 where a warm-up begins, and would hide everything

Settings = dict[str, Any]
Tensors = Sequence[torch.Tensor]
Plain = bool | int | float | str | None


class CannotTry(Exception):
    """The trial says nothing about this optimizer."""


def needs_whole_tensors(optimizer: Optimizer, group: Settings, device: torch.device, *, closure: bool) -> bool:
    """Does the optimizer, with the group's settings, train flat halves differently? `CannotTry` if nobody can know.

    group: one of `optimizer.param_groups`. closure: whether the user calls `step` with one. The trial's tensors are new
    ones on `device`; the optimizer, its parameters and the random generators stay as they are.
    """
    build = functools.partial(build_like, optimizer, group)

    def on_one_processor() -> bool:
        processors = torch.get_num_threads()
        torch.set_num_threads(1)  # to divide such small tensors takes longer than to compute them
        try:
            return differs(build, device, closure)
        finally:
            torch.set_num_threads(processors)

    # A thread of its own: what counts, casts or fakes tensors in the user's thread does not see the trial's.
    # Its name tells collectives and engines to raise: the other ranks wait for the trial, and would not answer.
    with untouched_generators(device), concurrent.futures.ThreadPoolExecutor(1, ALONE) as thread:
        try:
            return thread.submit(on_one_processor).result()
        except CannotTry:
            raise
        except Exception as error:
            raise CannotTry(f"{type(error).__name__}: {error}") from error


def differs(build: Callable[[Tensors], Optimizer], device: torch.device, closure: bool) -> bool:
    """Train the same numbers whole and as flat halves, with the same gradients. Does any bit ever differ?"""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    downhill = [torch.randn(shape, generator=generator) for shape in SHAPES]
    whole, again = on(device, start), on(device, start)  # again: one that draws random numbers differs from itself
    halves = on(device, flat(start).chunk(2))
    of_whole, of_again = build(whole), build(again)
    of_halves: list[Optimizer] = []
    for step in range(STEPS):
        gradients = []
        for weight, slope in zip(whole, downhill, strict=True):
            gradient = slope + torch.randn(slope.shape, generator=generator)  # a descent: some measure their progress
            gradient *= 10.0 ** (step % 4 - 1)  # of several sizes: some clip by a norm
            if step % 2:  # orthogonal to each row of the weights: there AdamP and SGDP project
                rows, w = gradient.flatten(1), weight.detach().cpu().flatten(1)
                rows -= w * ((rows * w).sum(1, keepdim=True) / w.square().sum(1, keepdim=True))
            gradients.append(gradient.to(device))
        take_step(of_whole, whole, gradients, closure)
        take_step(of_again, again, gradients, closure)
        try:
            of_halves = of_halves or [build([half]) for half in halves]
            for optimizer, half, gradient in zip(of_halves, halves, flat(gradients).chunk(2), strict=True):
                take_step(optimizer, [half], [gradient], closure)
            equal = torch.equal(flat(whole), flat(halves))
        except Exception:  # it can train the whole, but no flat half
            equal = False
        if not flat(whole).isfinite().all():
            raise CannotTry(f"the trial's weights are not finite after {step + 1} steps")
        if not torch.equal(flat(whole), flat(again)):
            raise CannotTry("it draws random numbers")
        if not equal:
            return True
    if torch.equal(flat(whole).cpu(), flat(start)):
        raise CannotTry(f"it moved no weight in {STEPS} steps")
    return False


def flat(tensors: Tensors) -> torch.Tensor:
    """All numbers end to end, as in a unit's flat buffer."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def on(device: torch.device, values: Tensors) -> list[nn.Parameter]:
    """Parameters with these values."""
    return [nn.Parameter(value.to(device, copy=True)) for value in values]


def settings_of(group: Settings) -> Settings:
    """A group's options, with the trial's rate."""
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if isinstance(rate := settings.get("lr"), torch.Tensor):
        settings["lr"] = torch.full_like(rate, RATE)
    elif rate is not None:
        settings["lr"] = RATE
    return settings


def attributes_of(optimizer: Optimizer) -> Settings:
    """What the optimizer keeps beside groups, states and hooks."""
    others = ("defaults", "state", "param_groups", "step", "tried_with")
    return {n: v for n, v in vars(optimizer).items() if n not in others and not n.startswith("_optimizer_")}


def is_plain(value: Any) -> bool:
    """Is it plain data, also inside? What `repr` tells of it is then all that there is."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, Plain)


def build_like(optimizer: Optimizer, group: Settings, parameters: Tensors) -> Optimizer:
    """A new optimizer for `parameters`, of the class and with the settings of `optimizer`, without its history.

    The constructor builds it. A copy with empty states would need no arguments, but some optimizers, such as Adagrad,
    make their states in the constructor. Its arguments are sought by name: in the group, the defaults, the attributes.
    """
    settings = copy.deepcopy(settings_of(group))
    first, *others = inspect.signature(type(optimizer)).parameters
    known = vars(optimizer) | optimizer.defaults | settings
    inner = known.get(first, known.get(f"_{first}"))
    base: Any = [{"params": parameters} | settings]
    if isinstance(inner, Optimizer):  # a wrapper, such as Lookahead
        base = build_like(inner, group, parameters)
    new = type(optimizer)(base, **{name: copy.deepcopy(known[name]) for name in others if name in known})
    vars(new).update({n: copy.deepcopy(v) for n, v in attributes_of(optimizer).items() if is_plain(v)})
    # PyTorch wraps `step`, to call hooks and to write into profiles. Those are the user's: take what is inside.
    step = type(new).step
    new.step = functools.partial(step.__wrapped__ if hasattr(step, "hooked") else step, new)  # type: ignore
    return new


def take_step(optimizer: Optimizer, parameters: Tensors, gradients: Tensors, closure: bool) -> None:
    """Step with these gradients, which a closure sets again as often as it is called."""

    def evaluate() -> torch.Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()  # some write into it
        return (flat(parameters) * flat(gradients)).sum()

    evaluate()
    optimizer.step(evaluate) if closure else optimizer.step()  # type: ignore[arg-type,call-arg]


@contextlib.contextmanager
def untouched_generators(device: torch.device) -> Iterator[None]:
    """Leave the random generators of Python, NumPy and PyTorch as they were.

    They are the process's. Ranks that are threads draw from them, too, but not now: all are about to step.
    """
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
