"""Around any optimizer and scheduler, FP32 masters lose nothing."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from precision.master import MasterWeights
from precision.scaling import DynamicLossScaler
from tests.support.half_network import backward, batch, network

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
    weights = MasterWeights(model.parameters(), getattr(torch.optim, name), **OPTIMIZERS[name])
    for step in range(5):
        backward(model, step)
        weights.step()
        weights.zero_grad()
    masters = by_hand(name, other, 5, **OPTIMIZERS[name])
    for parameter, mine, theirs, old in zip(model.parameters(), weights.masters, masters, start, strict=True):
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


def test_the_two_conversions():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every.view(dtype)
        numbers = numbers[~numbers.isnan()]
        weight = nn.Parameter(numbers.clone())
        weight.grad = numbers
        (master,) = (weights := MasterWeights([weight], torch.optim.SGD)).masters
        weights.copy_gradients()
        assert master.grad.dtype == torch.float32 and torch.equal(master.grad.double(), numbers.double())  # exact
        weights.zero_grad()
        weights.step()  # which without gradients only rounds back
        assert torch.equal(weight.view(torch.int16), numbers.view(torch.int16))
    weight = nn.Parameter(torch.zeros(3).half())
    weights = MasterWeights([weight], torch.optim.SGD)
    weights.masters[0].copy_(torch.tensor([2049.0, 2051.0, 65519.996]))
    weights.step()
    assert weight.tolist() == [2048, 2052, 65504]  # to nearest, ties to even


def test_groups_names_and_generators():
    model = network()
    first, rest = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": 0.5}, {"params": iter(rest), "weight_decay": 0.1}]
    weights = MasterWeights(groups, torch.optim.SGD, lr=0.25)
    assert [group["lr"] for group in weights.param_groups] == [0.5, 0.25]
    assert [group["weight_decay"] for group in weights.param_groups] == [0, 0.1]
    assert [m.shape for m in weights.masters] == [p.shape for p in model.parameters()]
    assert groups[0]["params"] is first and first[0].dtype == torch.float16  # the caller's groups are left alone
    named = MasterWeights(model.named_parameters(), torch.optim.SGD, lr=0.1)
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_a_group_added_later_has_masters_too():
    model = network()
    weights = MasterWeights(model[0].parameters(), torch.optim.SGD, lr=0.5)
    weights.add_param_group({"params": list(model[2].parameters()), "lr": 0.25})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, 0)
    weights.step()
    for old, master, parameter, rate in zip(before, weights.masters, model.parameters(), [0.5, 0.5, 0.25, 0.25]):
        assert torch.equal(master, old.float().add(parameter.grad.float(), alpha=-rate))


@pytest.mark.parametrize("scheduler", [(lr_scheduler.StepLR, 2, 0.5), (lr_scheduler.CyclicLR, 0.01, 0.1)])
def test_schedulers_work_on_it(scheduler):
    """And say nothing of a step that they did not see."""
    rates, (kind, *arguments) = [], scheduler
    for masters in (True, False):
        model, options = network(), {"lr": 0.1, "momentum": 0.9}
        if masters:
            optimizer = MasterWeights(model.parameters(), torch.optim.SGD, **options)
        else:
            optimizer = torch.optim.SGD(model.float().parameters(), **options)
        with warnings.catch_warnings(action="error"):
            schedule = kind(optimizer, *arguments)
            for step in range(5):
                backward(model, step)
                weight = optimizer.param_groups[0]["params"][0]
                before = weight.detach().clone()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
                assert not torch.equal(before, weight)
    assert rates[:5] == rates[5:] and len(set(rates)) > 1


def test_an_fp32_parameter_is_its_own_master():
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.LayerNorm(4))
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
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


def test_states_keep_what_16_bits_cannot():
    def run(model, weights, steps):
        for step in steps:
            backward(model, step)
            weights.step()
            weights.zero_grad()
        return [master.clone() for master in weights.masters]

    straight = network()
    expected = run(straight, MasterWeights(straight.parameters(), torch.optim.Adam, lr=1e-3), range(6))
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=1e-3)
    run(model, weights, range(3))
    saved = copy.deepcopy([model.state_dict(), weights.state_dict()])

    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=5.0)
    model.load_state_dict(saved[0])  # after the optimizer was made, as is the custom
    weights.load_state_dict(saved[1])
    assert weights.param_groups is weights.optimizer.param_groups and weights.param_groups[0]["lr"] == 1e-3
    schedule = lr_scheduler.LambdaLR(weights, lambda _: 1.0)  # on the loaded groups
    got = run(model, weights, range(3, 6))
    schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    rounded = network()
    rounded.load_state_dict(saved[0])
    again = run(rounded, MasterWeights(rounded.parameters(), torch.optim.Adam, lr=1e-3), range(3, 6))
    assert not all(torch.equal(a, b) for a, b in zip(again, expected))  # what the weights alone would give


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_alone(kind):
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.Adam, lr=0.1)
    backward(model, 0)
    weights.step()
    other, others = kind((model, weights))
    assert others.param_groups is others.optimizer.param_groups and others.state is others.optimizer.state
    start = [master.clone() for master in weights.masters]
    for net, optimizer in ((other, others), (model, weights)):
        assert all(torch.equal(old, master) for old, master in zip(start, optimizer.masters))
        optimizer.zero_grad()
        backward(net, 1)
        optimizer.step()
    for a, b in zip([*model.parameters(), *weights.masters], [*other.parameters(), *others.masters], strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    assert not torch.equal(start[0], weights.masters[0])


@pytest.mark.gpu
def test_on_a_gpu():
    model = network().cuda()
    weights = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scaler = DynamicLossScaler()
    losses = []
    for _ in range(50):
        x, y = (part.cuda() for part in batch(0))
        loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(weights)
        scaler.update()
        weights.zero_grad()
        losses.append(loss.item())
    assert weights.masters[0].is_cuda and losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p, m.half()) for p, m in zip(model.parameters(), weights.masters))


@pytest.mark.parametrize("copies", [False, True])
def test_who_writes_writes_to_the_masters(copies):
    """The step goes on from there, and rounds it back; a write to the weights themselves is still refused."""
    weight = nn.Parameter(torch.zeros(2).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.5)
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
