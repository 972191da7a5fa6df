"""FP32 masters: what is lost without them, exactly; and that around any optimizer nothing is lost with them."""

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from minizero import GPT
from precision.master import MasterWeights, gradient_to_master, master_to_weight
from precision.scaling import DynamicLossScaler
from tests.support.helpers import SMALL, STAGES, run
from tests.support.helpers import batch as tokens

OPTIMIZERS = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.01},
    "Adadelta": {},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
    "Muon": {"lr": 0.01},
}


# The literature's claims about FP16, checked on every number they are about.


def test_values_below_2_to_the_minus_24_mostly_do_not_vanish():
    """The claim is "below 2^-24 becomes zero". Under round-to-nearest the cut is 2^-25: all of them above that
    become 2^-24, and 2^-25 itself is a tie, which goes to the even neighbour, zero."""
    between = torch.arange(2**23, dtype=torch.int32)  # every mantissa

    def with_exponent(e):
        return (between + ((e + 127) << 23)).view(torch.float32)

    halves = with_exponent(-25)
    assert halves[0] == 2.0**-25 and halves[-1] < 2.0**-24
    assert halves[0].half() == 0 and bool((halves[1:].half() == 2.0**-24).all())
    assert bool((with_exponent(-26).half() == 0).all())
    assert bool((with_exponent(-24)[: 2**22].half() == 2.0**-24).all())


def lost_ratios(sign, exponent):
    """For every FP16 weight w in [2^exponent, 2^(exponent+1)) and every FP16 update u from w/16384 to w/1024:
    w / u, and whether w ± u rounds back to w. Both (weights, updates)."""
    mantissas = 1 + torch.arange(1024) / 1024
    weights = (mantissas * 2.0**exponent).half()[:, None]
    updates = torch.cat([mantissas * 2.0 ** (exponent - k) for k in (13, 12, 11, 10)]).half()
    updates = updates[updates > 0].unique()
    return weights.double() / updates.double(), weights + sign * updates == weights


@pytest.mark.parametrize("exponent", [-13, -2, 0, 15])
def test_from_which_ratio_on_an_addition_is_lost(exponent):
    """The claim is a ratio of 2048. It is where losses begin; where they end depends on the significand."""
    ratio, lost = lost_ratios(+1, exponent)
    assert ratio[lost].min() == 2048
    assert ratio[~lost].max() == 4094
    # The largest significand, 2047, is odd: half a spacing is a tie, and a tie goes to the even neighbour above.
    weight, update = torch.tensor([2047 * 2.0 ** (exponent - 10), 2.0 ** (exponent - 11)]).half()
    assert weight / update == 4094 and weight + update > weight


@pytest.mark.parametrize("exponent", [-12, -2, 0, 15])
def test_from_which_ratio_on_a_subtraction_is_lost(exponent):
    """It begins just above 2048, and ends at 4096: below a power of two the numbers lie twice as close."""
    ratio, lost = lost_ratios(-1, exponent)
    assert 2048 < ratio[lost].min() <= 2052
    assert ratio[0][lost[0]].min() == 4096 and bool(lost[ratio >= 4096].all())  # [0]: the power of two itself
    if exponent >= 0:  # updates fine enough: the second significand, 1025, and a little less than half a spacing
        assert ratio[lost].min() == 1025 / (2047 / 4096)


def test_in_the_lowest_binades_no_update_is_lost():
    """There FP16 has one spacing for all numbers, 2^-24, which is also its smallest update."""
    updates = torch.arange(1, 2049, dtype=torch.int16).view(torch.float16)
    weights = torch.arange(2048, dtype=torch.int16).view(torch.float16)[:, None]
    assert weights.max() < 2.0**-13 and bool((weights + updates != weights).all())


def test_without_masters_small_updates_are_lost_and_with_them_they_add_up():
    """2048 + 1 = 2048 in FP16, hundreds of times over; the master counts."""
    plain = nn.Parameter(torch.tensor([2048.0]).half())
    optimizer = torch.optim.SGD([plain], lr=1.0)
    weight = nn.Parameter(torch.tensor([2048.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for step in range(1, 301):
        plain.grad, weight.grad = -torch.ones_like(plain), -torch.ones_like(weight)
        optimizer.step()
        weights.step()
        assert weights.masters[0].item() == 2048 + step
    assert plain.item() == 2048 and weight.item() == 2348


# The class.


def network(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def batch(step, dtype=torch.float16):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 6, generator=generator).to(dtype)
    return x, x.float().square().sum(1, keepdim=True)


def backward(model, step):
    x, y = batch(step, next(model.parameters()).dtype)
    loss = (model(x).float() - y).square().mean()
    loss.backward()
    return loss


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
    model, other = (
        nn.Sequential(*(nn.Linear(n, m, bias=name != "Muon") for n, m in [(6, 8), (8, 1)])).to(dtype) for _ in "ab"
    )
    other.load_state_dict(model.state_dict())
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
        up = gradient_to_master(numbers)
        assert up.dtype == torch.float32 and torch.equal(up.double(), numbers.double())  # exact
        back = torch.empty_like(numbers)
        master_to_weight(up, back)
        assert torch.equal(back.view(torch.int16), numbers.view(torch.int16))
    weight = torch.zeros(3, dtype=torch.float16)
    master_to_weight(torch.tensor([2049.0, 2051.0, 65519.996]), weight)
    assert weight.tolist() == [2048, 2052, 65504]  # to nearest, ties to even
    gradient = torch.ones(2)
    assert gradient_to_master(gradient) is gradient


@pytest.mark.parametrize("stage", STAGES)
def test_the_engines_convert_the_same_way(stage):
    """After each step the FP16 parameters are the FP32 masters, rounded; the shards' gradients are FP32."""

    def work(comm):
        model = stage(GPT(SMALL), comm, dtype=torch.float16)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(*tokens(comm.rank)).backward()
            kinds = {shard.grad.dtype for shard in model.parameters()}
            optimizer.step()
            optimizer.zero_grad()
        model(*tokens(comm.rank))  # brings the replicas up to date
        masters = model.gather_state_dict()
        rounded = []
        for unit in model.units:
            model.gather(unit)
            for name, parameter in zip(unit.layout.names, unit.parameters, strict=True):
                weight = torch.empty_like(parameter)
                master_to_weight(masters[name], weight)
                rounded.append(parameter.dtype == torch.float16 and torch.equal(parameter, weight))
        return kinds, rounded

    for kinds, rounded in run(2, work):
        assert kinds == {torch.float32} and len(rounded) > 10 and all(rounded)


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


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda weights: lr_scheduler.StepLR(weights, 2, gamma=0.5),
        lambda weights: lr_scheduler.OneCycleLR(weights, max_lr=0.1, total_steps=6),
        lambda weights: lr_scheduler.CosineAnnealingLR(weights, 6),
        lambda weights: lr_scheduler.CyclicLR(weights, 0.01, 0.1),
    ],
)
def test_schedulers_work_on_it(scheduler):
    """And say nothing of a step that they did not see."""
    rates, trained = [], []
    for make in (lambda model: MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), None):
        model = network()
        optimizer = make(model) if make else torch.optim.SGD(model.float().parameters(), lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = scheduler(optimizer)
            used = []
            for step in range(5):
                backward(model, step)
                before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                used.append(optimizer.param_groups[0]["lr"])
                trained.append(not torch.equal(before[0], optimizer.param_groups[0]["params"][0]))
        rates.append(used)
    assert rates[0] == rates[1] and len(set(rates[0])) > 1 and all(trained)


def test_a_scheduled_rate_is_the_rate_of_the_step():
    weight = nn.Parameter(torch.tensor([1.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    schedule = lr_scheduler.ExponentialLR(weights, gamma=0.5)
    path = []
    for _ in range(3):
        weight.grad = torch.tensor([0.125]).half()
        weights.step()
        schedule.step()
        path.append(weight.item())
    assert path == [0.875, 0.8125, 0.78125]


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


def test_a_gradient_that_was_unscaled_is_not_copied_again():
    weight = nn.Parameter(torch.tensor([1.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for start in (1.0, 0.75):
        weight.grad = torch.tensor([8.0]).half()
        weights.copy_gradients()
        weights.masters[0].grad.div_(32)
        weights.step()
        assert weight.item() == start - 0.25
    weights.step()  # nobody copied since: 8 again
    assert weight.item() == -7.5


def test_after_zero_grad_or_a_loaded_state_gradients_are_copied_anew():
    weight = nn.Parameter(torch.tensor([1.0]).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    state = weights.state_dict()
    forgets = weights.zero_grad, lambda: weights.zero_grad(set_to_none=False), lambda: weights.load_state_dict(state)
    for forget in forgets:
        weight.grad = torch.tensor([8.0]).half()
        weights.copy_gradients()
        forget()
        weight.grad = torch.tensor([0.25]).half()
        before = weight.item()
        weights.step()
        assert weight.item() == before - 0.25


def test_an_unused_parameter_stays():
    weights = MasterWeights([used := nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).half())],
                            torch.optim.SGD, lr=0.5)  # fmt: skip
    used.sum().backward()
    weights.step()
    assert [master.tolist() for master in weights.masters] == [[0.5, 0.5], [1, 1]]


def test_grad_scaler_works_on_it_once_gradients_are_copied():
    model = network()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.01)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=128.0)
    start = [master.clone() for master in weights.masters]
    scaler.scale(backward_loss(model)).backward()
    gradients = [parameter.grad.float() / 128 for parameter in model.parameters()]
    weights.copy_gradients()
    scaler.step(weights)
    for old, gradient, master in zip(start, gradients, weights.masters):
        assert torch.equal(master, old.add(gradient, alpha=-0.01))


def backward_loss(model):
    x, y = batch(0)
    return (model(x).float() - y).square().mean()


def test_nothing_outlives_it():
    weight = nn.Parameter(torch.ones(2).half())
    weights = MasterWeights([weight], torch.optim.SGD, lr=0.1)
    weight.sum().backward()
    weights.step()
    master = weakref.ref(weights.masters[0])
    del weights
    gc.collect()
    assert master() is None


# What is refused.


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
