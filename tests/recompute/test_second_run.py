"""A function runs again only if backward needs it, as far as it must, and in the surroundings of its first run."""

import pytest
import torch
from torch import nn

from minizero.recompute import Checkpointed, by_function, by_hooks, checkpoint, checkpoint_sequential
from minizero.recompute.full import set_enabled
from minizero.recompute.replay import is_recomputing
from minizero.schedules import every_k
from tests.support.recompute_ways import (
    Counted,
    Operators,
    as_plain,
    equal,
    nested,
    selective,
    sequential,
    vectors,
    verified,
)

# How often, and how far.


def test_what_is_frozen_is_not_run_again():
    prefix, trained, suffix = (Counted(nn.Linear(8, 8)) for _ in range(3))
    prefix.requires_grad_(False)
    suffix.requires_grad_(False)  # its backward needs its weight only
    x = checkpoint(prefix, vectors())
    checkpoint(suffix, checkpoint(trained, x)).sum().backward()
    assert (prefix.calls, trained.calls, suffix.calls) == (1, 2, 1)
    assert trained.module.weight.grad is not None and not x.requires_grad
    x = nested(lambda x: prefix(x), vectors())  # whose inputs the outer one holds for it, asks for no gradient
    assert prefix.calls == 2 and not x.requires_grad


@pytest.mark.parametrize(("way", "again"), [(checkpoint, 1), (by_hooks, 2), (by_function, 2), (selective, 0)])
def test_the_second_forward_stops_before_the_last_product(way, again):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    y = way(module, vectors().requires_grad_()).sum()
    with Operators() as operators:
        y.backward()
    assert operators.names.count("addmm") == again


class Block(nn.Module):
    """Changes what belongs to it, runs a layer, and changes it back."""

    def __init__(self, change, back):
        super().__init__()
        self.linear, self.norm, self.change, self.back = nn.Linear(8, 8), nn.BatchNorm1d(8), change, back
        self.depth, self.stack, self.table = 0, [], {"depth": 0}

    def forward(self, x):
        handle = self.change(self)
        x = self.norm(self.linear(x)) * (1 + self.depth + len(self.stack) + self.table["depth"])
        if not self.norm.training:
            x = self.linear(x)
        self.back(self, handle)
        return x


def note(block):
    """What a block holds, without its numbers."""
    hooks = [len(module._forward_hooks) for module in block.modules()]
    trains = [module.training for module in block.modules()] + [p.requires_grad for p in block.parameters()]
    return vars(block).copy(), dict(block._modules), block.stack[:], block.table.copy(), hooks, trains


CHANGES = {
    "a layer in evaluation": (lambda b: b.norm.eval(), lambda b, _: b.norm.train()),
    "all in evaluation": (lambda b: b.eval(), lambda b, _: b.train()),
    "a counter": (lambda b: vars(b).update(depth=1), lambda b, _: vars(b).update(depth=0)),
    "a counter in a dict": (lambda b: b.table.update(depth=1), lambda b, _: b.table.update(depth=0)),
    "a list": (lambda b: b.stack.append(1), lambda b, _: b.stack.clear()),
    "a new attribute": (lambda b: setattr(b, "flag", True), lambda b, _: delattr(b, "flag")),
    "another module": (lambda b: setattr(b, "norm", b.norm.double().float()), lambda b, _: None),
    "a hook": (lambda b: b.norm.register_forward_hook(lambda *_: None), lambda b, handle: handle.remove()),
    "a frozen weight": (lambda b: b.norm.requires_grad_(False), lambda b, _: b.norm.requires_grad_(True)),
}


@pytest.mark.parametrize("name", CHANGES)
@as_plain()
def test_a_second_run_leaves_modules_as_the_first_left_them(way, name):
    """Though it may stop before they are changed back: pytorch#96866, pytorch#90105."""
    torch.manual_seed(0)
    block, found = Block(*CHANGES[name]), []
    for _ in range(2):
        x = vectors().requires_grad_()
        y = way(block, x).square().sum()
        after_forward = note(block)
        y.backward()
        assert note(block) == after_forward
        found += [x.grad, block.linear.weight.grad.clone(), *(buffer.clone() for buffer in block.buffers())]
    return found


@pytest.mark.accuracy
@pytest.mark.parametrize("compiled", ["the model", "the block", "the step"])
def test_with_torch_compile(compiled):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            x = Checkpointed(self.block)(checkpoint(self.block, self.first(x)))
            return checkpoint_sequential([self.block, torch.sin], x, every_k(2, 1))

    def gradients(compiled):
        model, x = Model(), vectors().requires_grad_()
        if compiled in ("the block", "the model"):
            (model.block if compiled == "the block" else model).compile(backend="aot_eager")
        step = lambda: model(x).sum().backward()  # noqa: E731
        (torch.compile(step, backend="aot_eager") if compiled == "the step" else step)()
        return [x.grad, *(p.grad for p in model.parameters())]

    torch.compiler.reset()
    assert equal(gradients(compiled), gradients(None))


def test_nesting_runs_each_level_again_once():
    inner, outer = Counted(nn.Tanh()), []

    def fn(x):
        outer.append(is_recomputing())
        return checkpoint(inner, checkpoint(inner, x)).exp()

    x = vectors().requires_grad_()
    checkpoint(fn, x).sum().backward()
    assert outer == [False, True]
    # Twice in the first forward; in the second up to what exp saved; and each once for its own backward.
    assert inner.calls == 2 + 2 + 2


@as_plain("checkpoint")
def test_a_function_that_catches_exceptions_does_not_catch_the_stop(way):
    def fn(x):
        try:
            return x.exp().sin()
        except Exception:
            return x

    x = vectors().requires_grad_()
    way(fn, x).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("way", [checkpoint, selective, verified, sequential])
def test_the_switch_turns_all_of_it_off(way):
    def calls():
        way(counted := Counted(nn.Tanh()), vectors().requires_grad_()).sum().backward()
        return counted.calls

    with set_enabled(False):
        assert calls() == 1
    assert calls() == 2
    set_enabled(False)
    try:
        assert calls() == 1
    finally:
        set_enabled(True)
    assert calls() == 2


# The surroundings of the first run.


@as_plain("checkpoint", "by_function", "verified", "sequential")
def test_autocast_and_the_default_device_are_those_of_the_first_run(way):
    def fn(x):
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.get_default_device() == torch.device("meta")
        return torch.tanh(module(torch.tanh(module(x))))

    torch.manual_seed(0)
    module, x = nn.Linear(8, 8), vectors().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        y = way(fn, x)
    y.float().sum().backward()
    found = [y.detach(), x.grad, module.weight.grad]
    assert y.dtype == torch.bfloat16
    x.grad, y = None, way(lambda x: module(x).exp(), x).sum()  # off in forward, and so off in backward
    with torch.autocast("cpu", torch.bfloat16):
        y.backward()
    return [*found, x.grad]


def test_grad_mode():
    counted = Counted(nn.Tanh())
    with torch.no_grad():
        assert not checkpoint(counted, vectors().requires_grad_()).requires_grad
        assert not sequential(torch.tanh, vectors().requires_grad_()).requires_grad
    with torch.inference_mode():
        mask = checkpoint(counted, vectors())
    assert counted.calls == 2 and not mask.requires_grad


@as_plain("checkpoint", "verified", "selective")
def test_what_is_made_without_a_gradient_inside_and_in_inference_mode_before(way):
    def fn(x, mask):
        with torch.no_grad():
            scale = x.norm()
        return (x / scale).exp() + mask

    with torch.inference_mode():
        mask = vectors() * 2
    x = vectors().requires_grad_()
    way(fn, x * 1, mask).sum().backward()
    return [x.grad]
