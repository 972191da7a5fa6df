"""FP32 masters lose nothing, around any optimizer and scheduler; what they cannot do is refused."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from precision.master import BITS, MasterWeights
from precision.scaling import DynamicLossScaler


def network(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def backward(model, step, scale=1.0):
    weight = next(model.parameters())
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step)).to(weight)
    loss = (model(x).float() - x.float().square().sum(1, keepdim=True)).square().mean()
    (scale * loss).backward()
    return loss


def trained(model, optimizer, steps):
    """The masters after these steps."""
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [master.clone() for master in optimizer.masters]


OPTIMIZERS: dict = dict.fromkeys(["Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam"], {"lr": 0.01})
OPTIMIZERS |= dict.fromkeys(["RMSprop", "Rprop", "Adafactor", "Muon"], {"lr": 0.01})
OPTIMIZERS |= {"SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}}


def by_hand(name, model, steps, **options):
    """The three lines of the module's formula, around a plain optimizer of FP32 tensors."""
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = getattr(torch.optim, name)(masters, **options)
    for step in range(steps):
        backward(model, step)
        for parameter, master in zip(model.parameters(), masters):
            master.grad, parameter.grad = parameter.grad.to(torch.float32), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters):
                parameter.copy_(master.to(parameter.dtype))
    return masters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_around_any_optimizer(name, dtype):
    model = nn.Sequential(*(nn.Linear(n, m, bias=name != "Muon") for n, m in [(6, 8), (8, 1)])).to(dtype)
    other = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    found = trained(model, MasterWeights(model.parameters(), getattr(torch.optim, name), **OPTIMIZERS[name]), range(5))
    masters = by_hand(name, other, 5, **OPTIMIZERS[name])
    for parameter, mine, theirs, old in zip(model.parameters(), found, masters, start, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == parameter.shape
        assert torch.equal(mine, theirs) and torch.equal(parameter, mine.to(dtype))
        assert not torch.equal(mine, old.float()) and not torch.equal(mine, parameter.float())  # more than it shows


def test_with_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True).half()
    start = table.weight.detach().clone()
    weights = MasterWeights(table.parameters(), torch.optim.SparseAdam, lr=0.1)
    table(torch.tensor([1, 1, 3])).float().sum().backward()
    weights.step()
    changed = (table.weight != start).any(dim=1)
    assert changed.tolist() == [False, True, False, True, False]


def test_with_closures():
    """LBFGS evaluates the loss at several points in one step: each time the 16-bit weights are those of the masters."""
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.LBFGS, lr=0.3, max_iter=8)
    seen = []

    def closure():
        weights.zero_grad()
        loss = backward(model, 0)
        seen.append((loss.item(), [bool((p == m.half()).all()) for p, m in zip(model.parameters(), weights.masters)]))
        return loss

    first = weights.step(closure)
    weights.step(closure)
    assert first.item() == seen[0][0] and len(seen) > 8 and all(all(equal) for _, equal in seen)
    assert seen[-1][0] < 0.5 * seen[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_two_conversions(dtype):
    """Of every number: up exactly, back to the nearest, in a tie to the even one."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    weight = nn.Parameter(numbers.clone())
    weight.grad = numbers
    (master,) = (weights := MasterWeights([weight], SGD)).masters
    weights.copy_gradients()
    assert master.grad.dtype == torch.float32 and torch.equal(master.grad.double(), numbers.double())
    weights.zero_grad()
    weights.step()  # which without gradients only rounds back
    assert torch.equal(weight.view(torch.int16), numbers.view(torch.int16))
    eps = torch.finfo(dtype).eps
    master[:3].copy_(torch.tensor([1 + eps / 2, 1 + 1.5 * eps, 1 + 0.51 * eps]))
    weights.step()
    assert weight[:3].tolist() == [1, 1 + 2 * eps, 1 + eps]


def test_groups_names_and_generators():
    model = network()
    first, rest = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": 0.5}, {"params": iter(rest), "weight_decay": 0.1}]
    weights = MasterWeights(groups, SGD, lr=0.25)
    assert [group["lr"] for group in weights.param_groups] == [0.5, 0.25]
    assert [group["weight_decay"] for group in weights.param_groups] == [0, 0.1]
    assert [m.shape for m in weights.masters] == [p.shape for p in model.parameters()]
    assert groups[0]["params"] is first and first[0].dtype == torch.float16  # the caller's groups are left alone
    named = MasterWeights(model.named_parameters(), SGD, lr=0.1)
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_a_group_added_later_has_masters_too():
    model = network()
    weights = MasterWeights(model[0].parameters(), SGD, lr=0.5)
    weights.add_param_group({"params": list(model[2].parameters()), "lr": 0.25})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, 0)
    weights.step()
    for old, master, parameter, rate in zip(before, weights.masters, model.parameters(), [0.5, 0.5, 0.25, 0.25]):
        assert torch.equal(master, old.float().add(parameter.grad.float(), alpha=-rate))


@pytest.mark.parametrize("scheduler", [(lr_scheduler.StepLR, 2, 0.5), (lr_scheduler.CyclicLR, 0.01, 0.1)])
def test_schedulers_work_on_it(scheduler):
    """And say nothing of a step that they did not see."""
    kind, *arguments = scheduler
    model, plain = network(), nn.Linear(1, 1)
    weights = MasterWeights(model.parameters(), SGD, lr=0.1, momentum=0.9)
    rates = []
    with warnings.catch_warnings(action="error"):
        for optimizer in (weights, SGD(plain.parameters(), lr=0.1, momentum=0.9)):
            schedule = kind(optimizer, *arguments)
            for step in range(5):
                before = weights.masters[0].clone()
                trained(model, weights, [step]) if optimizer is weights else optimizer.step()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
                assert torch.equal(before, weights.masters[0]) == (optimizer is not weights)
    assert rates[:5] == rates[5:] and len(set(rates)) > 1


def test_an_fp32_parameter_is_its_own_master():
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.LayerNorm(4))
    weights = MasterWeights(model.parameters(), SGD, lr=0.1)
    shared = [m.data_ptr() == p.data_ptr() for m, p in zip(weights.masters, model.parameters())]
    assert shared == [False, False, True, True]
    scaler = DynamicLossScaler(8.0)
    for _ in range(2):
        old = model[1].weight.detach().clone()
        scaler.scale(model[1](model[0](torch.randn(3, 4).half()).float()).square().sum()).backward()
        scaled = model[1].weight.grad.clone()
        scaler.unscale_(weights)
        nn.utils.clip_grad_norm_(weights.masters, 1e6)
        scaler.step(weights)
        scaler.update()
        weights.zero_grad()
        assert torch.allclose(model[1].weight, old - 0.1 * scaled / 8, atol=1e-6)
        with torch.no_grad():
            model[1].weight.clamp_(min=0.5)  # allowed: it is the master that is written to
    weights.step()
    model[1].weight.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"not masters\[2\]"):
        weights.step()


def test_states_keep_what_16_bits_cannot():
    straight, model = network(), network()
    expected = trained(straight, MasterWeights(straight.parameters(), torch.optim.Adam, lr=1e-3), range(6))
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=1e-3)
    trained(model, weights, range(3))
    saved = copy.deepcopy([model.state_dict(), weights.state_dict()])

    model, rounded = network(), network()
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=5.0)
    model.load_state_dict(saved[0])  # after the optimizer was made, as is the custom
    weights.load_state_dict(saved[1])
    assert weights.param_groups is weights.optimizer.param_groups and weights.param_groups[0]["lr"] == 1e-3
    schedule = lr_scheduler.LambdaLR(weights, lambda _: 1.0)  # on the loaded groups
    got = trained(model, weights, range(3, 6))
    schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    rounded.load_state_dict(saved[0])
    again = trained(rounded, MasterWeights(rounded.parameters(), torch.optim.Adam, lr=1e-3), range(3, 6))
    assert not all(torch.equal(a, b) for a, b in zip(again, expected))  # what the weights alone would give


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_alone(kind):
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=0.1)
    start = trained(model, weights, [0])
    other, others = kind((model, weights))
    assert others.param_groups is others.optimizer.param_groups and others.state is others.optimizer.state
    ends = [trained(other, others, [1]), trained(model, weights, [1])]
    for old, mine, theirs, parameter in zip(start, *ends, other.parameters(), strict=True):
        assert torch.equal(mine, theirs) and torch.equal(parameter, mine.half()) and not torch.equal(old, mine)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in other.parameters()}


@pytest.mark.gpu
def test_on_a_gpu():
    model = network().cuda()
    weights, scaler = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2), DynamicLossScaler()
    losses = []
    for _ in range(50):
        losses.append(backward(model, 0, scaler.scale(torch.ones((), device="cuda"))).item())
        scaler.step(weights)
        scaler.update()
        weights.zero_grad()
    assert weights.masters[0].is_cuda and losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p, m.half()) for p, m in zip(model.parameters(), weights.masters))


@pytest.mark.parametrize("copies", [False, True])
def test_who_writes_writes_to_the_masters(copies):
    """The step goes on from there, and rounds it back; a write to the weights themselves is still refused."""
    weight = nn.Parameter(torch.zeros(2).half())
    weights = MasterWeights([weight], SGD, lr=0.5)
    if copies:
        weights = copy.deepcopy(weights)
        weight = weights.parameters[0]
    for start in (3.0, 5.0):
        with torch.no_grad():
            weights.masters[0].fill_(start)
        weight.grad = torch.ones_like(weight)
        weights.step()
        assert weight.tolist() == weights.masters[0].tolist() == [start - 0.5] * 2
    weight.data.fill_(7)
    with pytest.raises(RuntimeError, match=r"is not masters\[0\], rounded"):
        weights.step()


# Gradients are copied to the masters once for each backward, whoever unscales or empties them.


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_empties_both(set_to_none):
    model = network()
    weights = MasterWeights(model.parameters(), SGD, lr=0.1)
    backward(model, 0)
    weights.copy_gradients()
    assert all(torch.equal(m.grad, p.grad.float()) for p, m in zip(model.parameters(), weights.masters))
    weights.zero_grad(set_to_none)
    for tensor in (*model.parameters(), *weights.masters):
        assert tensor.grad is None if set_to_none else not tensor.grad.any()


def test_a_gradient_is_copied_once_and_anew_when_it_was_emptied_or_a_state_loaded():
    weight = nn.Parameter(torch.tensor([1.0]).half())
    weights = MasterWeights([weight], SGD, lr=1.0)
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
    weights = MasterWeights(model.parameters(), SGD, lr=0.01)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=128.0)
    start = [master.clone() for master in weights.masters]
    backward(model, 0, scaler.scale(torch.ones(())))
    weights.copy_gradients()
    scaler.step(weights)
    for old, parameter, master in zip(start, model.parameters(), weights.masters):
        assert torch.equal(master, old.add(parameter.grad.float() / 128, alpha=-0.01))


def test_gradients_that_change_after_they_were_copied():
    model = network()
    weights = MasterWeights(model.parameters(), SGD, lr=0.1)
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


# What masters cannot do.


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan, 10**400])
def test_learning_rates_that_are_not_finite(rate):
    weight = nn.Parameter(torch.ones(2).half())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=f"learning rate must be finite, not {rate}"):
        MasterWeights([weight], SGD, lr=rate)
    with pytest.raises(ValueError, match=f"must be finite, not {rate}"):
        MasterWeights([{"params": [weight], "lr": rate}], SGD, lr=0.1)
    weights = MasterWeights([weight], SGD, lr=0.1)
    weights.param_groups[0]["lr"] = rate  # as a broken scheduler does
    with pytest.raises(ValueError, match=f"must be finite, not {rate}"):
        weights.step()
    assert weight.tolist() == [1, 1]


WEIGHT = nn.Parameter(torch.ones(2).half())
REFUSED = [
    ([nn.Parameter(torch.ones(2).double())], SGD, ValueError, "float64"),
    ([nn.Parameter(torch.ones(2).cfloat())], SGD, ValueError, "complex64"),
    ([nn.Parameter(torch.ones(1).half().expand(4))], SGD, ValueError, "share memory"),
    ([nn.Parameter(torch.ones(3).half().as_strided((2, 2), (1, 0)).t())], SGD, ValueError, "share memory"),
    ([nn.Parameter(torch.ones(9).half().unfold(0, 3, 2))], SGD, ValueError, "share memory"),
    ([{"params": [WEIGHT]}, {"params": [WEIGHT]}], SGD, ValueError, "twice"),
    ([], SGD, ValueError, "empty"),
    (WEIGHT, SGD, TypeError, "iterable"),
    ([WEIGHT], SGD([WEIGHT], lr=0.1), TypeError, "class"),
]


@pytest.mark.parametrize("parameters, optimizer_class, error, words", REFUSED)
def test_what_cannot_have_masters(parameters, optimizer_class, error, words):
    with pytest.raises(error, match=words):
        MasterWeights(parameters, optimizer_class, lr=0.1)


def test_a_group_that_is_refused_changes_nothing():
    weights = MasterWeights([WEIGHT], SGD, lr=0.1)
    with pytest.raises(ValueError, match="twice"):
        weights.add_param_group({"params": [WEIGHT]})
    assert [group["params"] for group in weights.param_groups] == [weights.masters]


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
    weights = MasterWeights(model.parameters(), SGD, lr=0.1)
    trained(model, weights, [0])
    write(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"parameter \d was written to, or moved, and is not masters\["):
        weights.copy_gradients() if unscales else weights.step()


def test_weights_written_to_both_and_weights_that_came_back_are_no_error():
    model = network()
    weights = MasterWeights(model.parameters(), SGD, lr=0.5)
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
@pytest.mark.parametrize("lies", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, :0]])
def test_what_is_no_number_is_not_taken_for_a_write(dtype, lies):
    """A parameter that starts with NaNs of all kinds, dense in memory or not, and to which a step adds some."""
    whole = torch.ones(40, 3, dtype=dtype)
    whole.view(BITS[dtype])[: len(NAN[dtype]), 0] = torch.tensor(NAN[dtype]).to(BITS[dtype])
    weight = nn.Parameter(lies(whole))
    weights = MasterWeights([weight], SGD, lr=0.1)
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
