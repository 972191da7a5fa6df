"""What FP32 masters cannot do is refused: rates, parameters and states that make no sense, and weights written to."""

import math

import pytest
import torch
from torch import nn

from precision.master import MasterWeights
from tests.support.half_network import backward, network


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan])
def test_learning_rates_that_are_not_finite(rate):
    weight = nn.Parameter(torch.ones(2).half())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=f"learning rate must be finite, not {rate}"):
        MasterWeights([weight], torch.optim.SGD, lr=rate)
    with pytest.raises(ValueError, match=f"must be finite, not {rate}"):
        MasterWeights([{"params": [weight], "lr": rate}], torch.optim.SGD, lr=0.1)
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.1)
    weights.param_groups[0]["lr"] = rate  # as a broken scheduler does
    with pytest.raises(ValueError, match=f"must be finite, not {rate}"):
        weights.step()
    assert weight.tolist() == [1, 1]


def test_parameters_that_cannot_have_masters():
    weight = nn.Parameter(torch.ones(2).half())
    for wrong in (nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2, dtype=torch.complex64))):
        with pytest.raises(ValueError, match=str(wrong.dtype)):
            MasterWeights([wrong], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="twice"):
        MasterWeights([{"params": [weight]}, {"params": [weight]}], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        MasterWeights([], torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError):
        MasterWeights(weight, torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="class"):
        MasterWeights([weight], torch.optim.SGD([weight], lr=0.1))
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="twice"):
        weights.add_param_group({"params": [weight]})
    assert [group["params"] for group in weights.param_groups] == [weights.masters]  # as it was


def test_a_weight_written_behind_the_masters_back():
    """The step would undo it: a checkpoint loaded too late, weights clamped in place."""
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model, 0)
    model.load_state_dict(network().state_dict())
    with pytest.raises(RuntimeError, match="parameter 0 was written to"):
        weights.step()


def test_states_that_do_not_fit():
    small, large = network(), nn.Linear(3, 3).half()
    weights = MasterWeights(small.parameters(), torch.optim.SGD, lr=0.1)
    before = [master.clone() for master in weights.masters]
    other = MasterWeights(large.parameters(), torch.optim.SGD, lr=0.1).state_dict()
    plain = torch.optim.SGD(network(torch.float32).parameters(), lr=0.1).state_dict()
    for state in (other, plain):
        with pytest.raises(ValueError, match="masters of shapes"):
            weights.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights.masters))
