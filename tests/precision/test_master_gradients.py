"""Gradients are copied to the FP32 masters once for each backward, whoever unscales or empties them."""

import pytest
import torch
from torch import nn

from precision.master import MasterWeights
from tests.support.half_network import backward, batch, network


def test_zero_grad_empties_both():
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model, 0)
    weights.copy_gradients()
    pairs = list(zip(model.parameters(), weights.masters))
    assert all(torch.equal(master.grad, parameter.grad.float()) for parameter, master in pairs)
    weights.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() and not master.grad.any() for parameter, master in pairs)
    weights.zero_grad()
    assert all(parameter.grad is None and master.grad is None for parameter, master in pairs)


def test_a_gradient_is_copied_once_and_anew_when_it_was_emptied_or_a_state_loaded():
    weight = nn.Parameter(torch.tensor([1.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    state = weights.state_dict()

    def step(gradient=None):
        before = weight.item()
        weight.grad = weight.grad if gradient is None else torch.tensor([gradient]).half()
        weights.step()
        return before - weight.item()

    for forget in (weights.zero_grad, lambda: weights.zero_grad(False), lambda: weights.load_state_dict(state)):
        weight.grad = torch.tensor([8.0]).half()
        weights.copy_gradients()
        weights.masters[0].grad.div_(32)
        assert step() == 0.25, "what was unscaled stays"
        assert step() == 8, "nobody copied since"
        weights.copy_gradients()
        forget()
        assert step(0.25) == 0.25


def test_grad_scaler_works_on_it_once_gradients_are_copied():
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.01)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=128.0)
    start = [master.clone() for master in weights.masters]
    x, y = batch(0)
    scaler.scale((model(x).float() - y).square().mean()).backward()
    gradients = [parameter.grad.float() / 128 for parameter in model.parameters()]
    weights.copy_gradients()
    scaler.step(weights)
    for old, gradient, master in zip(start, gradients, weights.masters):
        assert torch.equal(master, old.add(gradient, alpha=-0.01))


def test_gradients_that_change_after_they_were_copied():
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model, 0)
    weights.copy_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # the wrong ones: the step reads the masters'
    with pytest.raises(RuntimeError, match="gradient of parameter 0 changed"):
        weights.step()
    weights.zero_grad()

    backward(model, 0)
    weights.copy_gradients()  # and the step is skipped, say, but zero_grad() is not called here
    model.zero_grad()
    backward(model, 1)
    with pytest.raises(RuntimeError, match="zero_grad"):
        weights.step()
    weights.copy_gradients()
    weights.step()
