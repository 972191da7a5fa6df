"""Inputs and outputs of a model and of a unit may have any structure."""

import collections
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

from minizero import DDP, Zero3
from tests.support.helpers import STAGES, run, slow
from tests.support.small_models import Blocks, check, fit, seeded


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    note: str


class Structured(Blocks):
    def forward(self, x, kind="dict"):
        out = super().forward(x["a"][0])
        loss = out.square().mean()
        unseen = {"closure": (torch.arange(2), lambda: loss), "iterator": iter([loss])}
        seen = {"dict": {"loss": loss, "n": 3}, "tuple": (None, [loss]), "dataclass": Output(loss, "hi")}
        return (seen | unseen)[kind]


@pytest.mark.parametrize("kind", ["dict", "closure", *slow("tuple", "dataclass", "iterator")])
def test_structured_inputs_and_outputs(kind):
    def forward(model, x, rank):
        out = model({"a": (x, 1)}, kind=kind)
        unseen = {"closure": lambda: out[1](), "iterator": lambda: next(out)}
        seen = {"dict": lambda: out["loss"], "tuple": lambda: out[1][0], "dataclass": lambda: out.loss}
        return (seen | unseen)[kind]()

    check(seeded(Structured), forward=forward, stages=(DDP, Zero3))


def test_sixteen_bits_cast_floating_inputs_only():
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, index, scale=None):
            assert x.dtype == scale["s"].dtype == torch.bfloat16 and index.dtype == torch.int64
            return self.linear(x).float()

    def probe(comm, stage):
        model = stage(Probe(), comm, dtype=torch.bfloat16)
        out = model(torch.randn(2, 4), torch.arange(2), scale={"s": torch.ones(1)})
        out.sum().backward()
        return out.dtype, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}

    for stage in STAGES:
        assert run(2, probe, stage)[0] == (torch.float32, {torch.float32}, {torch.float32})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_module_writes_into_its_arguments_comes_back(dtype):
    class Collects(nn.Linear):
        def forward(self, x, *boxes, more):
            y = super().forward(x)
            for box in (*boxes, more["box"]):
                box.append(y.mean()) if isinstance(box, list) else box.update(y=y.mean())
            return y

    def collect(comm, stage):
        boxes, ids, more = [], {"ids": torch.arange(2)}, {"box": [], "x": torch.ones(1)}
        stage(Collects(7, 7), comm, dtype=dtype)(torch.ones(2, 7), boxes, ids, more=more)
        return len(boxes), "y" in ids, len(more["box"])

    for stage in STAGES:
        assert run(2, collect, stage)[0] == (1, True, 1)


class Gain(nn.Module):
    """A unit that hands out what it makes in one of several ways; `fixed` is a frozen unit of its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.lin = way, nn.Linear(8, 8)
        self.fixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        y = self.lin(x).tanh()
        side = ((y @ self.fixed).sin() * self.lin.bias).square().mean()
        if self.way == "view":
            return (y * self.lin.bias.view(1, 8)).view(-1, 8)
        if self.way == "attribute":
            self.side = side
        if self.way == "list":
            self.side = [(side,)]
        if self.way == "buffer":
            self._buffers["side"] = side
        if self.way == "namespace":
            return types.SimpleNamespace(y=y, side=side)
        return collections.UserDict(y=y, side=side) if self.way == "mapping" else y


class Handed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.blocks = way, nn.Linear(7, 8), nn.ModuleList(Gain(way) for _ in range(3))

    def forward(self, x):
        x, loss = self.first(x), 0.0
        for block in self.blocks:
            before, x = x, block(x)
            if self.way == "view":
                x += before
            elif self.way in ("attribute", "list"):
                loss = loss + (block.side if self.way == "attribute" else block.side[0][0])
            elif self.way == "buffer":
                loss = loss + block._buffers.pop("side")
            else:
                x, loss = (x.y, loss + x.side) if self.way == "namespace" else (x["y"], loss + x["side"])
        return x.square().mean() + loss


@pytest.mark.parametrize("way", ["view", "attribute", "list", "buffer", "namespace", "mapping"])
@pytest.mark.parametrize("prefetch", [0, *slow(3)])
def test_whatever_leaves_a_unit_gathers_it_in_backward(way, prefetch):
    stages = [DDP, functools.partial(Zero3, prefetch=prefetch)]
    expected, found = (run(2, fit, stage, seeded(functools.partial(Handed, way)))[0] for stage in stages)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_leaves_a_unit_unseen_is_an_error_with_its_name():
    class Secretive(nn.Linear):
        def forward(self, x):
            side = (x + self.bias).sum()
            self.get = lambda: side
            return super().forward(x)

    def work(comm):
        model = Zero3(nn.Sequential(Secretive(8, 8), Secretive(8, 8)), comm)
        model(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="Zero3: backward reached 1 while it was not gathered: .*: return it"):
            model.module[1].get().backward()

    run(2, work)
