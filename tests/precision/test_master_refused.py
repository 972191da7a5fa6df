"""What FP32 masters cannot do is refused: rates, parameters and states that make no sense, and weights written to."""

import copy
import math

import pytest
import torch
from torch import nn

from precision.master import BITS, MasterWeights
from tests.support.half_network import backward, network


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan, 10**400])
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
    for shared in (
        weight[:1].detach().expand(4),
        weight.detach().as_strided((2, 2), (1, 0)).t(),
        torch.ones(9).half().unfold(0, 3, 2),
    ):
        with pytest.raises(ValueError, match="share memory"):
            MasterWeights([nn.Parameter(shared)], torch.optim.SGD, lr=0.1)
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


WRITES = {
    "load_state_dict": lambda model: model.load_state_dict(network().state_dict()),
    "data.copy_": lambda model: model[2].weight.data.copy_(torch.ones_like(model[2].weight)),
    "data =": lambda model: setattr(model[2].bias, "data", torch.full_like(model[2].bias, 5)),
    "vector_to_parameters": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters()
    ),
    "NumPy, one bit": lambda model: model[0].weight.detach().view(torch.int16).numpy().__ixor__(1),
    "swap_tensors": lambda model: torch.utils.swap_tensors(model[2].bias, nn.Parameter(torch.ones_like(model[2].bias))),
    "another dtype": lambda model: model.bfloat16(),
    "another shape": lambda model: setattr(model[2].bias, "data", torch.zeros(9).half()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_weight_written_behind_the_masters_back(write, unscales):
    """The step would undo it: a checkpoint loaded too late, weights clamped in place. Most of these are not counted."""
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model, 0)
    weights.step()
    weights.zero_grad()
    write(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"parameter \d was written to, or moved, and is not masters\["):
        weights.copy_gradients() if unscales else weights.step()


def test_an_fp32_weight_that_is_its_masters_no_more():
    weight = nn.Parameter(torch.ones(2))
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.5)
    weight.data = torch.zeros(2)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"not masters\[0\]"):
        weights.step()


def test_weights_written_to_both_and_weights_that_came_back_are_no_error():
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.5)
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), weights.masters):
            parameter.copy_(master.fill_(5))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(network().state_dict())  # for an evaluation, say
    model.load_state_dict(kept)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights.step()
    assert all((parameter == 4.5).all() for parameter in model.parameters())


NAN = {torch.float16: (0x7E00, 0x7C01, -1), torch.bfloat16: (0x7FC0, 0x7F81, -1), torch.float32: (0x7F800001, -1)}


@pytest.mark.parametrize("dtype", NAN)
@pytest.mark.parametrize("lies", ["dense", "transposed", "every second column", "empty column"])
def test_what_is_no_number_is_not_taken_for_a_write(dtype, lies):
    """A parameter that starts with NaNs of all kinds, and to which a step adds some."""
    whole = torch.ones(40, 3, dtype=dtype)
    whole.view(BITS[dtype])[: len(NAN[dtype]), 0] = torch.tensor(NAN[dtype]).to(BITS[dtype])
    views = {
        "dense": whole,
        "transposed": whole.t(),
        "every second column": whole[:, ::2],
        "empty column": whole[:, :0],
    }
    weight = nn.Parameter(views[lies])
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.1)
    before = weight.isnan()
    for gradient in (1, float("inf"), -float("nan")):
        weight.grad = torch.full_like(weight, gradient)
        weights.step()
        assert math.isnan(gradient) or torch.equal(before, weight.isnan())
        weights.step()
    assert weight.isnan().all()
    with torch.no_grad():
        weight.fill_(1)
    if weight.numel() and dtype != torch.float32:  # which would be its own master: a number where NaN was is a write
        with pytest.raises(RuntimeError, match="written to"):
            weights.step()
