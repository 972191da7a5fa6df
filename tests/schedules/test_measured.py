"""Real chains: sizes by hand, no traces, and `fit`, which names the least budget and meets it."""

import time

import pytest
import torch
from torch import nn

from minizero.schedules import fit
from minizero.schedules.measured import measure_chain


def mlp(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def test_measured_sizes():
    """In units of the input: what each layer's tape and output are, by hand."""
    width = 64
    layers = [nn.Linear(width, width), nn.ReLU(), nn.GELU(), nn.Dropout(0.5), mlp(width), nn.Linear(width, width // 2)]
    stages = measure_chain(layers, torch.ones(128, width))
    unit = 128 * width * 4
    assert [stage.boundary for stage in stages] == [unit] * 6
    # Linear and GELU save their input, ReLU its output, dropout its mask. The block's worst moment is in its second
    # layer's backward: 4 + 4 saved, a gradient of 4, the output and its gradient; input and output count by themselves.
    assert [stage.tape for stage in stages] == [0, 0, 0, unit, (4 + 4 + 4 + 2 - 3) * unit, 0]
    assert [stage.output for stage in stages] == [None] * 5 + [unit // 2]
    assert all(stage.forward > 0 and stage.backward > 0 for stage in stages)


def test_measured_times():
    """A pause is never shorter than it says, however busy the machine is; so only lower bounds are sure."""

    def pause(x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(0.04))
        time.sleep(0.02)
        return y

    _, slow = measure_chain([nn.Linear(4, 4), pause], torch.ones(2, 4))
    assert slow.forward >= 0.02 and slow.backward >= 0.04


def test_measuring_leaves_no_trace():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    model[0].weight.grad = torch.ones(8, 8)
    model[3].weight.register_post_accumulate_grad_hook(lambda p: pytest.fail("an optimizer would have stepped here"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator, sample = torch.get_rng_state(), torch.ones(4, 8)
    fit(model, sample, 10**6)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8)) and model[3].weight.grad is None
    assert sample.grad is None and not sample.requires_grad


def test_an_input_changed_in_place_is_refused():
    with pytest.raises(ValueError, match=r"layer 1 \(ReLU\) changes its input in place"):
        fit([nn.Linear(4, 4), nn.ReLU(inplace=True)], torch.ones(2, 4), 10**6)
    sample = -torch.ones(2, 4)
    with pytest.raises(ValueError, match="layer 0"):
        fit([nn.ReLU(inplace=True)], sample, 10**6)
    assert torch.equal(sample, -torch.ones(2, 4))


def test_what_needs_no_gradient_has_no_tape():
    layers = [nn.Linear(8, 8).requires_grad_(False), nn.Sequential(nn.Tanh(), nn.Tanh())]
    assert [stage.tape for stage in measure_chain(layers, torch.ones(4, 8))] == [0, 0]
    tapes = [stage.tape for stage in measure_chain(layers, torch.ones(4, 8, requires_grad=True))]
    assert tapes == [0, 2 * 4 * 8 * 4]  # what is between the two, and its gradient
    stages = measure_chain([nn.Embedding(16, 8), layers[0], mlp(8)], torch.zeros(4, 2, dtype=torch.long))
    assert (stages[0].boundary, stages[1].boundary, stages[1].tape) == (4 * 2 * 8, 4 * 2 * 8 * 4, 0)  # of integers
