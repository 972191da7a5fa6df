"""Inputs and outputs of a model and of a unit may have any structure."""

import collections
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

from minizero import DDP, Zero3
from tests.support.helpers import STAGES, exactly, run, slow
from tests.support.small_models import Blocks, check, fit, on_ranks, seeded


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    note: str


OUTPUTS = {  # what a forward makes of the loss, and how the loop gets the loss from it
    "dict": (lambda loss: {"loss": loss, "n": 3}, lambda out: out["loss"]),
    "closure": (lambda loss: (torch.arange(2), lambda: loss), lambda out: out[1]()),
    "tuple": (lambda loss: (None, [loss]), lambda out: out[1][0]),
    "dataclass": (lambda loss: Output(loss, "hi"), lambda out: out.loss),
    "iterator": (lambda loss: iter([loss]), next),
}


@pytest.mark.parametrize("kind", ["dict", "closure", *slow("tuple", "dataclass", "iterator")])
def test_structured_inputs_and_outputs(kind):
    put, get = OUTPUTS[kind]

    class Structured(Blocks):
        def forward(self, x):
            return put(super().forward(x["a"][0]).square().mean())

    check(seeded(Structured), forward=lambda model, x, rank: get(model({"a": (x, 1)})), stages=(DDP, Zero3))


class Probe(nn.Linear):
    def forward(self, x, index, scale=None):
        assert x.dtype == scale["s"].dtype == torch.bfloat16 and index.dtype == torch.int64
        return super().forward(x).float()


@on_ranks(make=lambda: Probe(4, 4), dtype=torch.bfloat16)
def test_sixteen_bits_cast_floating_inputs_only(model, comm):
    out = model(torch.randn(2, 4), torch.arange(2), scale={"s": torch.ones(1)})
    out.sum().backward()
    assert {out.dtype, *(d for p in model.parameters() for d in (p.dtype, p.grad.dtype))} == {torch.float32}


class Collects(nn.Linear):
    def forward(self, x, *boxes, more):
        y = super().forward(x)
        for box in (*boxes, more["box"]):
            box.append(y.mean()) if isinstance(box, list) else box.update(y=y.mean())
        return y


@on_ranks(
    [functools.partial(stage, dtype=dtype) for stage in STAGES for dtype in (None, torch.bfloat16)],
    make=lambda: Collects(7, 7),
)
def test_what_a_module_writes_into_its_arguments_comes_back(model, comm):
    boxes, ids, more = [], {"ids": torch.arange(2)}, {"box": [], "x": torch.ones(1)}
    model(torch.ones(2, 7), boxes, ids, more=more)
    assert (len(boxes), "y" in ids, len(more["box"])) == (1, True, 1)


# How a unit hands out what it makes: what it returns, or keeps where; and how to get it.
WAYS = {
    "attribute": (lambda block, y, side: setattr(block, "side", side) or y, lambda block, out: (out, block.side)),
    "list": (lambda block, y, side: setattr(block, "side", [(side,)]) or y, lambda block, out: (out, block.side[0][0])),
    "deque": (
        lambda block, y, side: setattr(block, "box", {"kept": collections.deque([side])}) or y,
        lambda block, out: (out, block.box["kept"].pop()),
    ),
    "part": (lambda block, y, side: y, lambda block, out: (out, block.last().square().mean())),
    "buffer": (
        lambda block, y, side: block._buffers.update(side=side) or y,
        lambda block, out: (out, block._buffers.pop("side")),
    ),
    "namespace": (lambda _, y, side: types.SimpleNamespace(y=y, side=side), lambda _, out: (out.y, out.side)),
    "mapping": (lambda _, y, side: collections.UserDict(y=y, side=side), lambda _, out: (out["y"], out["side"])),
    "view": (lambda block, y, _: (y * block.lin.bias.view(1, 8)).view(-1, 8), lambda _, out: (out, 0.0)),
}


class Gain(nn.Module):
    """`fixed` is a frozen unit of its own."""

    def __init__(self, put):
        super().__init__()
        self.put, self.lin = put, nn.Linear(8, 8)
        self.fixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        caught = collections.deque(maxlen=1)
        self.lin.register_forward_hook(lambda _, __, out: caught.append(out))
        self.last = caught.pop  # no container, so nobody finds the tensor here

    def forward(self, x):
        y = self.lin(x).tanh()
        return self.put(self, y, ((y @ self.fixed).sin() * self.lin.bias).square().mean())


class Handed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first = way, nn.Linear(7, 8)
        self.blocks = nn.ModuleList(Gain(WAYS[way][0]) for _ in range(3))

    def forward(self, x):
        x, loss = self.first(x), 0.0
        for block in self.blocks:
            before, (x, side) = x, WAYS[self.way][1](block, block(x))
            loss = loss + side
            if self.way == "view":
                x += before
        return x.square().mean() + loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefetch", [0, *slow(3)])
def test_whatever_leaves_a_unit_gathers_it_in_backward(way, prefetch):
    stages = [DDP, functools.partial(Zero3, prefetch=prefetch)]
    exactly(*(run(2, fit, stage, seeded(functools.partial(Handed, way))) for stage in stages))


class Secretive(nn.Linear):
    def forward(self, x):
        side = (x + self.bias).sum()
        self.get = lambda: side
        return super().forward(x)


@on_ranks([Zero3], make=lambda: nn.Sequential(Secretive(8, 8), Secretive(8, 8)))
def test_what_leaves_a_unit_unseen_is_an_error_with_its_name(model, comm):
    model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="Zero3: backward reached 1 while it was not gathered: .*: return it"):
        model.module[1].get().backward()
