"""Which optimizers ZeRO's flat shards can serve: a trial finds those that need whole tensors, and leaves no trace."""

import functools
import random
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minizero import DDP, World, Zero1, Zero2, Zero3, all_reduce
from minizero.memory import Ledger
from tests.support.helpers import run

# The essential lines of optimizers that trained shards wrongly without a word: timm's Lars, NvNovoGrad,
# AdafactorBigVision, Mars, AdamP and SGDP, and Prodigy.


class Small(Optimizer):
    """`move` gives a parameter's step, from its gradient, its states and the group."""

    def __init__(self, params, lr=1e-2, **settings):
        super().__init__(params, {"lr": lr} | settings)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.move(p, p.grad, self.state[p], group)


class Elementwise(Small):
    def move(self, p, g, state, group):
        return g


class TrustRatio(Small):
    def move(self, p, g, state, group):
        return g * (p.norm() / g.norm() if group["weight_decay"] else 1.0)


class NormOfTheWhole(Small):
    def move(self, p, g, state, group):
        state["second"] = 0.9 * state.get("second", 0.0) + 0.1 * g.norm() ** 2
        return g / (state["second"].sqrt() + 1e-8)


class Factored(Small):
    def move(self, p, g, state, group):
        if p.dim() != 2 or min(p.shape) < 128:
            return g
        return g / (g.square().mean(0, keepdim=True) * g.square().mean(1, keepdim=True)).sqrt()


class ClippedMatrices(Small):
    def move(self, p, g, state, group):
        return g / g.norm().clamp(min=1.0) if p.dim() > 1 else g


class Projected(Small):
    def move(self, p, g, state, group):
        if p.dim() > 1 and torch.cosine_similarity(g.flatten(1), p.flatten(1)).abs().max() < 0.1 / p[0].numel() ** 0.5:
            state["momentum"] = state.get("momentum", 0.0) + g
            return state["momentum"] - p * ((state["momentum"] * p).sum() / p.square().sum())
        state["momentum"] = state.get("momentum", 0.0) + g
        return state["momentum"]


class DistanceToTheSolution(Small):
    def step(self, closure=None):
        group, sums = self.param_groups[0], 0.0
        for p in group["params"]:
            start = self.state[p].setdefault("start", p.detach().clone())
            self.state[p]["sum"] = self.state[p].get("sum", 0.0) + group["d"] * p.grad
            group["progress"] += group["d"] * float((p.grad * (start - p.detach())).sum())
            sums += float(self.state[p]["sum"].abs().sum())
        group["d"] = max(group["d"], group["progress"] / sums)
        super().step()

    def move(self, p, g, state, group):
        return group["d"] * g.sign()


class CoupledConvolutions(Small):
    def move(self, p, g, state, group):
        return g / g.norm() if p.dim() == 3 else g


COUPLED = {
    CoupledConvolutions: {},
    TrustRatio: {"weight_decay": 0.02},
    NormOfTheWhole: {},
    Factored: {},
    ClippedMatrices: {},
    Projected: {},
    DistanceToTheSolution: {"d": 1e-4, "progress": 0.0},
    torch.optim.Adafactor: {},
}


def first_steps(comm, stage, build, steps=1, make=lambda: nn.Linear(8, 8), schedule=None):
    """What each rank is told by a few steps: an error's text, or nothing."""
    optimizer = build(stage(make(), comm).parameters())
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for _ in range(steps):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        if scheduler:
            scheduler.step()
    return ""


@pytest.mark.parametrize("rate", [1e-2, 0.0, 1e-12])
@pytest.mark.parametrize("kind", COUPLED)
def test_what_needs_whole_tensors_is_refused_at_any_rate(kind, rate):
    build = functools.partial(kind, lr=rate, **COUPLED[kind])
    for message in run(2, first_steps, Zero3, build):
        assert f"{kind.__name__} needs whole tensors, Zero3 gives it flat shards: use DDP" in message
    assert run(2, first_steps, DDP, build) == ["", ""]
    for message in run(2, first_steps, functools.partial(DDP, dtype=torch.bfloat16), build):  # its masters are flat
        assert f"{kind.__name__} needs whole tensors, DDP gives it flat shards: use DDP in FP32" in message


class Nested(AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Wrapper(Optimizer):
    """As Lookahead: it holds another optimizer, whose groups are its own."""

    def __init__(self, base_optimizer, k=6):
        super().__init__(base_optimizer.param_groups, {})
        self._base_optimizer, self.param_groups, self.k, self.count = base_optimizer, base_optimizer.param_groups, k, 0

    def step(self, closure=None):
        self._base_optimizer.step(closure)


class InTrainingMode(Small):
    """As a schedule-free optimizer: a mode that the user switches on, and a counter in the group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
        super().step()

    def move(self, p, g, state, group):
        assert group["training"]
        return g / group["k"]


class ScaledOnce(SGD):
    """An argument that is no option of a group, and has no default."""

    def __init__(self, params, scale):
        super().__init__(params, lr=0.1)
        self.scale = scale


ALLOWED = {
    "amsgrad": functools.partial(AdamW, amsgrad=True),
    "foreach": functools.partial(AdamW, foreach=True),
    "fused": functools.partial(AdamW, fused=True),
    "rate in a tensor": lambda params: AdamW(params, lr=torch.tensor(1e-3), foreach=False),
    "momentum": functools.partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "states of the constructor": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "named parameters": lambda params: AdamW([(f"{i}", p) for i, p in enumerate(params)]),
    "subclass": Nested,
    "wrapper": lambda params: Wrapper(AdamW(params)),
    "training mode": functools.partial(InTrainingMode, training=True, k=0),
    "required argument": functools.partial(ScaledOnce, scale=2.0),
    "switched off": functools.partial(TrustRatio, weight_decay=0.0),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_elementwise_steps_without_a_word(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(2, first_steps, Zero1, ALLOWED[name], steps=3) == ["", ""]


def test_a_wrapper_is_judged_by_what_it_holds():
    for message in run(2, first_steps, Zero2, lambda params: Wrapper(NormOfTheWhole(params))):
        assert "Wrapper needs whole tensors" in message


def test_each_group_is_tried_also_on_a_rank_that_holds_nothing_of_it():
    def build(params):
        (shard,) = params
        mine = [[shard], []] if shard.storage_offset() == 0 and shard[0] == 0 else [[], [shard]]
        return TrustRatio([{"params": p, "weight_decay": decay} for p, decay in zip(mine, (0.0, 0.1))])

    def make():
        module = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(module.weight[:2])
        return module

    assert all("whole tensors" in message for message in run(2, first_steps, Zero3, build, make=make))


def test_an_option_that_is_switched_on_later_is_tried_then():
    def work(comm):
        model = Zero3(nn.Linear(8, 8), comm)
        optimizer = TrustRatio(model.parameters(), weight_decay=0.0)
        for decay, refused in ((0.0, False), (0.1, True)):
            optimizer.param_groups[0]["weight_decay"] = decay
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            if refused:
                with pytest.raises(RuntimeError, match="whole tensors"):
                    optimizer.step()
            else:
                optimizer.step()

    run(2, work)


class Configured(Small):
    """An option of the optimizer's own, in one of several places."""

    def __init__(self, params, place, coupled=False):
        super().__init__(params, mode="lars" if place == "mode" and coupled else "sgd")
        self.place, self.config, self.options = place, {"coupled": [coupled]}, types.SimpleNamespace(coupled=coupled)

    def move(self, p, g, state, group):
        places = {
            "dict": lambda: self.config["coupled"][0],
            "namespace": lambda: self.options.coupled,
            "mode": lambda: group["mode"] == "lars",
            "attribute": lambda: getattr(self, "coupled", False),
        }
        return g / g.norm() if places[self.place]() else g


def test_options_that_differ_only_inside_an_attribute_are_tried_again():
    for place in ("dict", "namespace", "mode"):
        found = [run(2, first_steps, Zero1, functools.partial(Configured, place=place, coupled=c)) for c in (0, 1)]
        assert found[0] == ["", ""] and all("whole tensors" in message for message in found[1]), place


class Coupled(nn.Module):
    """An object that nobody can compare with another."""

    def __init__(self, coupled):
        super().__init__()
        self.coupled = coupled


class Holding(Small):
    def __init__(self, params, given):
        super().__init__(params)
        self.given = given

    def move(self, p, g, state, group):
        return g / g.norm() if self.given.coupled else g


def test_what_cannot_be_compared_is_tried_for_each_optimizer():
    found = [run(2, first_steps, Zero1, functools.partial(Holding, given=Coupled(c))) for c in (False, True)]
    assert found[0] == ["", ""] and all("whole tensors" in message for message in found[1])


@pytest.mark.parametrize("place", ["dict", "namespace", "mode", "attribute"])
def test_what_is_switched_later_is_tried_then(place):
    def work(comm):
        model = Zero3(nn.Linear(8, 8), comm)
        optimizer = Configured(model.parameters(), place)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.config["coupled"][0] = optimizer.options.coupled = True
        optimizer.param_groups[0]["mode"] = "lars"
        if place == "attribute":
            optimizer.coupled = True
        with pytest.raises(RuntimeError, match="whole tensors"):
            optimizer.step()

    run(2, work)


class Noisy(Small):
    def move(self, p, g, state, group):
        return g + random.random() + np.random.rand() + torch.randn_like(p)


class WithoutRate(Small):
    def move(self, p, g, state, group):
        return 0.0 * g


class Hidden(Elementwise):
    def __init__(self, params, secret):
        super().__init__(params)


@pytest.mark.parametrize(
    "build, reason",
    [
        (Noisy, "draws random numbers"),
        (WithoutRate, "moved no weight"),
        (functools.partial(Hidden, secret=1), "missing 1 required positional argument: 'secret'"),
    ],
)
def test_what_cannot_be_tried_is_said_once_and_goes_on(build, reason):
    with pytest.warns(UserWarning, match="nobody has verified") as said:
        assert run(3, first_steps, Zero3, build, steps=3) == ["", "", ""]
    assert [reason in str(warning.message) for warning in said] == [True]


@pytest.mark.parametrize(
    "stage, talk",
    [
        (Zero3, lambda model, comm: model.clip_grad_norm_(1.0)),
        (functools.partial(DDP, dtype=torch.bfloat16), lambda model, comm: model.clip_grad_norm_(1.0)),
        (Zero1, lambda model, comm: all_reduce(torch.ones(1), comm)),
        (Zero1, lambda model, comm: comm.send_recv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)),
        (Zero2, lambda model, comm: model(torch.ones(1, 8))),
    ],
)
def test_a_step_that_talks_to_other_ranks_is_not_tried(stage, talk):
    """One rank tries it for all: no other would answer. The trial has not touched the gradients before the step."""

    def work(comm):
        model = stage(nn.Linear(8, 8), comm)

        class Talking(AdamW):
            def step(self, closure=None):
                if self is optimizer:
                    untouched.append(all(bool((p.grad == 3.0).all()) for p in model.parameters()))
                talk(model, comm)
                return super().step(closure)

        optimizer, untouched = Talking(model.parameters()), []
        for p in model.parameters():
            p.grad = torch.full_like(p, 3.0)
        optimizer.step()
        talk(model, comm)  # the communicator still works
        return untouched

    with pytest.warns(UserWarning, match="could not be tried on flat shards .*its step calls"):
        assert World(2, device="cpu", timeout=30).run(work) == [[True], [True]]


@pytest.mark.parametrize("schedule", [lambda step: step / 5, lambda step: 0.5**step])  # the first rate is 0, or not
def test_once_for_a_class_and_its_settings(schedule):
    class Counted(Elementwise):
        built = 0

        def __init__(self, params, lr=0.1, decay=0.0):
            super().__init__(params, lr, decay=decay)
            Counted.built += 1

    def built_by_trials(decay):
        before = Counted.built
        run(3, first_steps, Zero3, functools.partial(Counted, decay=decay), steps=4, schedule=schedule)
        return Counted.built - before - 3

    one = built_by_trials(0.0)
    assert one > 0
    assert [built_by_trials(decay) for decay in (0.1, 0.1, 0.2, 0.0)] == [one, 0, one, 0]


def test_the_trial_leaves_no_trace():
    """Not in the random generators, not in hooks, not in the optimizer."""

    class Traced(Noisy):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr)
            torch.rand(3), np.random.rand(3), random.random()

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def work(comm):
        model = Zero3(nn.Linear(8, 8), comm)
        optimizer = Traced(model.parameters())
        optimizer.step = lambda: None  # as a scheduler does, it puts a function of its own here
        before, seen = states(), []
        optimizer.register_step_pre_hook(lambda its, *_: seen.append((its, states() == before, [*its.state])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            Traced.step(optimizer)
        return seen == [(optimizer, True, [])]

    calls = []
    handle = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    try:
        assert run(1, work) == [True]
    finally:
        handle.remove()
    assert len(calls) == 1


def test_the_ledger_does_not_count_the_trial():
    class Fresh(Elementwise):
        pass

    def peak(comm):
        model = Zero1(nn.Linear(8, 8), comm)
        optimizer = Fresh(model.parameters())
        with Ledger(model, optimizer) as ledger:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return ledger.peak

    first, second = run(1, peak), run(1, peak)
    assert first == second
