"""Loss scaling: step for step as torch.amp.GradScaler inside the bounds, and never out of them."""

import copy
import math
import pickle
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from precision.scaling import DynamicLossScaler, LossScaler, StaticLossScaler

BOUNDS = {"min_scale": 2.0**-120, "max_scale": 2.0**120}  # out of reach


def one_weight(value=1.0, gradient=0.0):
    weight = nn.Parameter(torch.tensor([value]))
    weight.grad = torch.tensor([gradient])
    return weight


# Against torch.amp.GradScaler: random programs of calls, misuse included, on two optimizers.


class Side:
    """Two optimizers and a scaler. `do`: one call of a program, and all that can be seen of it; FP16 is refused."""

    def __init__(self, scaler, dtype):
        self.scaler = scaler
        self.weights = [[nn.Parameter(torch.tensor([1.0, -2.5, 3e-3], dtype=dtype)) for _ in range(2)] for _ in "ab"]
        sgd = torch.optim.SGD(self.weights[0], lr=0.1, momentum=0.9)
        self.optimizers = [sgd, torch.optim.Adam(self.weights[1], lr=0.1)]

    def do(self, call, which, values):
        scaler, result = self.scaler, None
        try:
            if call == "backward":
                for weight, value in zip(self.weights[which], values):
                    weight.grad = None if value is None else torch.full_like(weight, value)
            elif call == "scale":
                result = scaler.scale(torch.tensor(1.5)).item()
            elif call == "update":
                scaler.update()
            elif call == "save and load":
                state = scaler.state_dict()
                scaler.load_state_dict(state)
                result = {key: state[key] for key in state if key not in BOUNDS}
            else:
                result = getattr(scaler, call)(self.optimizers[which])
        except Exception as error:
            result = type(error).__name__
        seen = [(w.tolist(), None if w.grad is None else w.grad.tolist()) for w in sum(self.weights, [])]
        return repr((result, scaler.get_scale(), seen))  # as text, where NaN equals NaN


ordinary, broken = st.floats(-1e3, 1e3, width=32), st.sampled_from([math.inf, -math.inf, math.nan])


def mostly(usual, *others):
    """`usual` nine times in ten or so: one_of would count each strategy once."""
    return st.integers(0, 9 * len(others)).flatmap(lambda i: others[i - 1] if 0 < i <= len(others) else usual)


gradients = st.tuples(mostly(ordinary, broken, st.none()), mostly(ordinary, broken))
calls = st.sampled_from(["backward", "unscale_", "step", "step", "update", "scale", "save and load"])
programs = st.lists(st.tuples(calls, st.integers(0, 1), gradients), min_size=5, max_size=40)
# As a loop has it: both backward, perhaps unscale, step, update.
iteration = st.builds(
    lambda first, second, unscaled, both: [
        *(("backward", 0, first), ("backward", 1, second), *[("unscale_", 0, ())] * unscaled),
        *(("step", 0, ()), *[("step", 1, ())] * both, ("update", 0, ())),
    ],
    *(gradients, gradients, st.booleans(), st.booleans()),
)
trainings = st.lists(iteration, min_size=2, max_size=12).map(lambda iterations: sum(iterations, []))
options = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 2.0**16, 1000.0, 3.3]),
        "growth_factor": st.sampled_from([2.0, 1.5, 3.7]),
        "backoff_factor": st.sampled_from([0.5, 0.3]),
        "growth_interval": st.integers(1, 4),
    }
)
TYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("of_calls", [True, False])
def test_programs_of_calls_and_training_as_grad_scaler(of_calls, examples):
    fell, rose = [], []

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(options, programs if of_calls else trainings, st.sampled_from([*TYPES, *[torch.float16] * of_calls]))
    def check(settings_of_scaler, program, dtype):
        theirs = Side(torch.amp.GradScaler(device="cpu", **settings_of_scaler), dtype)
        ours = Side(DynamicLossScaler(**settings_of_scaler, **BOUNDS), dtype)
        # GradScaler rounds its scale to FP32 with the first call; before that only errors are to be seen.
        for early in ("step", "update", "unscale_"):
            assert theirs.do(early, 0, ())[:17] == ours.do(early, 0, ())[:17] == "('AssertionError'"
        scales = []
        for call in [("scale", 0, ()), *program]:
            assert theirs.do(*call) == ours.do(*call), call
            scales.append(ours.scaler.get_scale())
        fell.append(any(after < before for before, after in zip(scales, scales[1:])))
        rose.append(any(after > before for before, after in zip(scales, scales[1:])))

    check()
    assert len(fell) >= examples
    assert of_calls or min(sum(fell), sum(rose)) > 0.3 * examples, "neither was rare"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scaled_outputs_have_grad_scalers_dtype(dtype, shape):
    """An FP16 loss comes out as FP32: in FP16 65536 would be inf."""
    outputs = torch.full(shape, 0.5, dtype=dtype)
    ours = DynamicLossScaler().scale(outputs)
    theirs = torch.amp.GradScaler(device="cpu").scale(outputs)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_scale_takes_iterables():
    scaler = StaticLossScaler(4.0)
    ones = torch.ones(2)
    result = scaler.scale([ones, (ones, [2 * ones])])
    assert isinstance(result, list) and isinstance(result[1], tuple) and isinstance(result[1][1], list)
    assert result[0].tolist() == [4, 4] and result[1][1][0].tolist() == [8, 8]
    assert [t.tolist() for t in scaler.scale(t for t in [ones])] == [[4, 4]]
    named = scaler.scale({"loss": ones, "parts": (Pair(ones, ones * 2), torch.return_types.max([ones, ones]))})
    assert named["loss"].tolist() == [4, 4] and named["parts"][0].second.tolist() == [8, 8]
    assert isinstance(named["parts"][0], Pair) and named["parts"][1].indices.tolist() == [4, 4]
    for wrong in (3.0, None, [ones, 3.0], "loss", {"loss": ones, "name": "x"}, [b"x"]):
        with pytest.raises(ValueError, match="tensor"):
            scaler.scale(wrong)


def test_sparse_and_empty_gradients_as_grad_scaler():
    for bad in (1.0, math.inf):
        sides = []
        for scaler in (torch.amp.GradScaler(device="cpu", init_scale=8.0), DynamicLossScaler(8.0)):
            torch.manual_seed(0)
            table, empty = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(0, 3))
            optimizer = torch.optim.SGD([table.weight, empty], lr=1.0)
            scaler.scale(table(torch.tensor([1, 1, 3])).sum() * bad + empty.sum()).backward()
            scaler.unscale_(optimizer)
            gradient = table.weight.grad.to_dense().tolist()
            scaler.step(optimizer)
            scaler.update()
            sides.append((gradient, table.weight.tolist(), scaler.get_scale()))
        assert sides[0] == sides[1] and sides[0][2] == (8.0 if bad == 1.0 else 4.0)


def test_states_go_from_grad_scaler_and_back():
    theirs = torch.amp.GradScaler(device="cpu", init_scale=512.0, growth_factor=3.0, growth_interval=7)
    weight = one_weight()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    theirs.scale(torch.ones(()))
    theirs.step(optimizer)
    theirs.update()
    ours = DynamicLossScaler(256.0, min_scale=2.0, max_scale=1024.0)
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 512
    assert (ours.min_scale, ours.max_scale) == (2, 1024)  # its own bounds: GradScaler has none
    assert theirs.state_dict().items() <= ours.state_dict().items() and ours.state_dict()["_growth_tracker"] == 1
    back = torch.amp.GradScaler(device="cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == theirs.state_dict()
    static = StaticLossScaler(1.0)
    static.load_state_dict(theirs.state_dict())
    assert static.get_scale() == 512 and static.state_dict() == {"scale": 512.0}


def test_a_loaded_scaler_goes_on_where_the_saved_one_was():
    saved = DynamicLossScaler(4.0, growth_interval=3, max_scale=16.0)
    optimizer = torch.optim.SGD([one_weight()], lr=0.1)
    iterate(saved, optimizer, [1.0, 1.0])
    loaded = DynamicLossScaler()
    loaded.load_state_dict(saved.state_dict())
    for scaler in (loaded, pickle.loads(pickle.dumps(saved)), copy.deepcopy(saved)):
        assert iterate(scaler, optimizer, [1.0] * 7) == [8, 8, 8, 16, 16, 16, 16]


# What GradScaler has not: bounds, and ranks that agree (more of them in tests/engines/test_stage3_options.py).


def iterate(scaler, optimizer, values):
    """Iterations with these gradients; the scale after each."""
    scales = []
    for value in values:
        scaler.scale(torch.ones(()))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, value)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_scale_stays_inside_its_bounds():
    optimizer = torch.optim.SGD([one_weight()], lr=0.1)
    scaler = DynamicLossScaler(8.0, growth_interval=1, min_scale=1.5, max_scale=20.0)
    assert iterate(scaler, optimizer, [math.inf] * 4) == [4, 2, 1.5, 1.5]
    assert iterate(scaler, optimizer, [0.0] * 5) == [3, 6, 12, 20, 20]


def test_a_static_scale_stays_and_still_skips():
    weight = one_weight(1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = StaticLossScaler(1000)
    assert iterate(scaler, optimizer, [math.inf, math.nan]) == [1000, 1000]
    assert weight.item() == 1  # both skipped
    iterate(scaler, optimizer, [500.0])
    assert weight.item() == 0.5


def test_combine_is_asked_once_for_each_optimizer():
    asked = []

    def combine(flag):
        asked.append((flag.item(), flag.shape, flag.dtype))
        return torch.ones_like(flag)

    scaler = StaticLossScaler(2.0, combine=combine)
    weights = [one_weight(1.0, 1.0), one_weight(1.0, math.inf)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        assert scaler.step(optimizer) is None
    scaler.update()
    assert asked == [(0, (), torch.float32), (1, (), torch.float32)]
    assert weights[0].item() == 1  # nothing of its own, but another rank overflowed


# Misuse and bad input. What else is refused is refused in the programs above, too, as GradScaler refuses it.


def test_misuse_is_refused_as_grad_scaler_refuses_it():
    """A closure's gradients would not be unscaled. GradScaler lets one through that is given by place."""
    optimizer = torch.optim.SGD([one_weight(1.0, 1.0)], lr=0.1)
    for scaler in (torch.amp.GradScaler(device="cpu"), DynamicLossScaler(), StaticLossScaler(8.0)):
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="[Cc]losure"):
            scaler.step(optimizer, closure=lambda: None)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already"):
            scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)


def test_arguments_and_result_of_step_are_passed_on():
    class Told(torch.optim.SGD):
        def step(self, *args, **kwargs):
            return args, kwargs

    optimizer = Told([one_weight()], lr=0.1)
    scaler = DynamicLossScaler()
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer, 3, name="x") == ((3,), {"name": "x"})


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"init_scale": 0.0}, "scale must be a positive"),
        ({"init_scale": math.nan}, "not nan"),
        ({"init_scale": math.inf}, "not inf"),
        ({"init_scale": 1e-60}, "FP32"),
        ({"init_scale": 0.5}, r"from min_scale \(1\) to max_scale .* not 0.5"),
        ({"init_scale": 2.0**30}, "max_scale"),
        ({"init_scale": 10**400}, "scale must be a positive"),
        ({"min_scale": -1.0}, "min_scale must be a positive"),
        ({"max_scale": math.inf}, "max_scale must be a positive"),
        ({"min_scale": 2.0**20, "max_scale": 2.0**10}, "min_scale"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 1.5}, "growth_interval"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"growth_factor": 10**400}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
    ],
)
def test_bad_options_are_named(wrong, says):
    with pytest.raises(AssertionError if "factor" in says else ValueError, match=says):  # GradScaler's types
        DynamicLossScaler(**wrong)


STATE = DynamicLossScaler(max_scale=2.0**18).state_dict()
BAD_STATES = [
    (STATE | {"scale": 2.0**20}, ValueError, "max_scale"),
    *[(STATE | {"_growth_tracker": n}, ValueError, "_growth_tracker must be a whole number") for n in (-1, 1.5, "7")],
    ({}, RuntimeError, "empty"),
    ({"growth_factor": 2.0}, KeyError, "scale"),
]


@pytest.mark.parametrize("state, error, says", BAD_STATES)
def test_a_bad_state_leaves_the_scaler_as_it_was(state, error, says):
    scaler = DynamicLossScaler(max_scale=2.0**18)
    with pytest.raises(error, match=says):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == STATE


def test_a_static_scale_is_a_positive_number():
    for wrong, error in (("8", TypeError), (-8.0, ValueError)):
        with pytest.raises(error, match=f"number, not {wrong!r}"):
            StaticLossScaler(wrong)
    with pytest.raises(KeyError, match="scale"):
        StaticLossScaler(8.0).load_state_dict({"growth_factor": 2.0})
    assert not hasattr(LossScaler, "state_dict")  # the base is none of its own


@pytest.mark.gpu
def test_on_a_gpu_as_grad_scaler():
    sides = []
    for scaler in (torch.amp.GradScaler(init_scale=8.0, growth_interval=2), DynamicLossScaler(8.0, growth_interval=2)):
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        scales = iterate(scaler, optimizer, [1.0, 2.0, math.inf, 3.0, math.nan, 1.0])
        sides.append((scales, weight.tolist()))
    assert sides[0] == sides[1] and len(set(sides[0][0])) > 2
