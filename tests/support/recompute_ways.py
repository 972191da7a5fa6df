"""The ways to run a function again in backward, and what a run gives, to compare them by."""

import contextlib
import gc
import inspect
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minizero.recompute import (
    Checkpointed,
    by_function,
    by_hooks,
    checkpoint,
    checkpoint_selective,
    checkpoint_sequential,
    keep_matmuls,
)
from minizero.schedules import every_k


def plain(fn, *args, **kwargs):
    return fn(*args, **kwargs)


verified = partial(checkpoint, verify=True)
selective = partial(checkpoint_selective, keep_matmuls)


def nested(fn, x):
    return checkpoint(lambda a: checkpoint(fn, a), x)


def sequential(fn, x):
    """As the first layer of two: it runs without a tape, and again when the second has gone backward."""
    return checkpoint_sequential([fn, lambda y: y.view_as(y)], x, every_k(2, 1))


WAYS = {
    "by_function": by_function,
    "by_hooks": by_hooks,
    "checkpoint": checkpoint,
    "verified": verified,
    "selective": selective,
    "everything kept": partial(checkpoint_selective, lambda operator: True),
    "nested": nested,
    "wrapped": lambda fn, x: Checkpointed(fn)(x),
    "sequential": sequential,
}


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b))


def as_plain(*names):
    """Decorator: a test that a function of a way gives in each way so named what it gives in the plain call.

    Its other arguments are columns of the test's table.
    """

    def decorate(results):
        def test(way, **row):
            assert equal(results(WAYS[way], **row), results(plain, **row))

        test.__doc__, test.__signature__ = results.__doc__, inspect.signature(results)
        return pytest.mark.parametrize("way", names or WAYS)(test)

    return decorate


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def block(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), norm(16), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 8)
    )


def vectors(rows=5, width=8, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def everything(module, way, passes=2):
    """Output, gradients, buffers and the generator's next numbers after a few forwards and backwards."""
    torch.manual_seed(3)
    x, outputs = vectors().requires_grad_(), []
    for _ in range(passes):
        outputs.append(way(module, x * 2))
        outputs[-1].square().sum().backward()
    gradients = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
    return [y.detach() for y in outputs] + gradients + [b.clone() for b in module.buffers()] + [torch.rand(2)]


class Counted(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.count = module, Counter()  # no attribute of its own, which a second run leaves as it was

    @property
    def calls(self):
        return self.count.total()

    def forward(self, x):
        self.count["calls"] += 1
        return self.module(x)


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
