"""The gradients are those of the plain run, bit for bit, whatever calls backward."""

from functools import partial

import pytest
import torch
from torch import nn

from minizero import GPT, GPTConfig
from minizero.memory import Ledger
from minizero.recompute import by_function, by_hooks, checkpoint
from tests.support.recompute_ways import WAYS, as_plain, block, everything, plain, selective, vectors


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.BatchNorm1d, momentum=None), nn.LayerNorm])
@as_plain()
def test_gradients_dropout_and_statistics_are_the_plain_runs_bit_for_bit(way, norm):
    return everything(block(norm), way)


def test_an_input_without_gradient_has_none_in_the_second_run():
    seen = []

    def fn(x, y):
        seen.append((x.requires_grad, y.requires_grad))
        return (x * y).exp().sin()

    for way in (by_hooks, checkpoint, WAYS["verified"], selective):
        way(fn, vectors(), vectors().requires_grad_()).sum().backward()
    assert seen == [(False, True)] * 8


class Fills(torch.autograd.Function):
    """Saves a tensor, and fills it afterwards."""

    @staticmethod
    def forward(ctx, x):
        factor = torch.empty_like(x)
        ctx.save_for_backward(factor)
        factor.copy_(x)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "fn",
    [
        nn.RReLU(),
        lambda x: nn.functional.rrelu(x, training=True)[1:] + 1,
        nn.Sequential(nn.RReLU(), nn.RReLU(), nn.BatchNorm1d(8)),
        nn.Sequential(nn.Linear(8, 8), nn.RReLU()).requires_grad_(False),
        lambda x: nn.functional.fractional_max_pool2d(x[None], 2, output_size=2),
        Fills.apply,
    ],
)
@as_plain()
def test_an_operator_that_saves_a_tensor_before_it_fills_it(way, fn):
    """RReLU so saves its noise: pytorch#193671."""
    torch.manual_seed(0)
    torch.full((5, 8), 777.0)  # what lies in the memory that comes next
    x = vectors().requires_grad_()
    way(fn, x).sum().backward()
    return [x.grad]


def squared_then_shifted(x):
    h = x * 2
    y = h * h.sin()
    h.add_(1)
    return y * x


def hidden_by_detach(x):
    h = x.tanh()
    h.detach().zero_()
    return h


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.exp().mul_(2).sin(),
        lambda x: nn.functional.relu(x.exp(), inplace=True) * x,
        lambda x: x.exp().index_fill_(0, torch.tensor([1]), 0.0).sin(),
        squared_then_shifted,
        hidden_by_detach,  # at the end
        lambda x: hidden_by_detach(x) * x,
    ],
)
def test_a_write_to_what_backward_needs_raises_as_it_does_without(fn, way):
    """pytorch#119590, pytorch#113737."""
    for run in (plain, WAYS[way]):
        with pytest.raises(RuntimeError, match="modified by an inplace|in place"):
            run(fn, vectors().requires_grad_()).sum().backward()


def test_an_unknown_way_of_a_gpt_is_refused():
    with pytest.raises(ValueError, match="recompute is 'most'; expected one of none, selective, full"):
        GPT(GPTConfig(recompute="most"))


@as_plain("by_hooks", "checkpoint", "verified", "selective", "wrapped")
def test_parameters_get_their_gradient_though_no_input_asks_for_one(way):
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    way(module, vectors()).sum().backward()
    return [module.weight.grad]


@as_plain("checkpoint")
def test_autograd_grad_and_chosen_inputs(way):
    module, x = block(nn.LayerNorm), vectors().requires_grad_()
    torch.manual_seed(0)
    y = way(module, x * 1)
    last, first = module[-1].weight, module[0].weight
    grad = torch.autograd.grad(y.sum(), [last, x], retain_graph=True)
    y.square().sum().backward(inputs=[first])
    return [*grad, first.grad]


def test_what_a_partial_backward_does_not_use_goes_with_it():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    with Ledger(module) as ledger:
        loss = checkpoint(module, vectors()).sum()
        before = ledger.current["total"]
        torch.autograd.grad(loss, module[-1].weight, retain_graph=True)
        assert ledger.current["total"] == before
        assert ledger.peak["total"] > before + 5 * 64 * 4


@as_plain("by_hooks", "checkpoint", "verified", "selective", "nested")
def test_a_graph_can_be_gone_through_twice_and_differentiated_twice(way):
    module, x = block(nn.LayerNorm), vectors().requires_grad_()
    torch.manual_seed(0)
    y = way(module, x * 1).square().sum()
    y.backward(retain_graph=True)
    (once,) = torch.autograd.grad(y, x, create_graph=True)
    (once.square().sum() + y).backward()
    return [x.grad, once.detach(), *(p.grad for p in module.parameters())]


def test_by_function_has_no_second_derivative():
    x = vectors().requires_grad_()
    (once,) = torch.autograd.grad(by_function(torch.exp, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_a_released_graph_is_refused_as_autograd_does():
    for way in (checkpoint, selective):
        y = way(block(nn.LayerNorm), vectors().requires_grad_()).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


@as_plain("checkpoint", "verified", "selective", "everything kept", "nested")
def test_a_function_may_differentiate_inside(way):
    def penalty(x):
        h = x.exp().sin()
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h * slope.square()

    x = vectors().requires_grad_()
    way(penalty, x * 1).sum().backward()
    return [x.grad]


class Cube(torch.autograd.Function):
    """Fetches what it saved twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0] * ctx.saved_tensors[0]


@as_plain("checkpoint", "everything kept")
def test_what_was_saved_may_be_fetched_twice_and_looked_at_outside_of_a_backward(way):
    x = vectors().requires_grad_()
    y = way(lambda x: Cube.apply(x).sin(), x)
    looked_at = y.grad_fn._saved_self.detach()
    y.sum().backward()
    return [x.grad, looked_at]


def test_hooks_around_get_the_inputs_to_keep():
    """save_on_cpu moves what autograd saves off the GPU: here, what we keep."""
    packed, x = [], vectors().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.clone()) or packed[-1], lambda t: t):
        y = checkpoint(lambda x: x.exp().sin(), x * 1)
    assert [tensor.shape for tensor in packed] == [(5, 8)]
    y.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())
