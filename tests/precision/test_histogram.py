"""Exponent histograms: every bit pattern in its bin, and what the hooks of `collect` see in training."""

import math

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

from precision.histogram import GRADIENTS, WEIGHTS, Collected, Histogram, collect, exponent_histogram
from precision.master import MasterWeights
from precision.scaling import DynamicLossScaler, StaticLossScaler


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def counted_one_by_one(values):
    """The same by Python's own frexp, number by number."""
    counts: dict[int, int] = {}
    for value in values:
        if math.isfinite(value) and value != 0:
            exponent = math.frexp(value)[1] - 1
            counts[exponent] = counts.get(exponent, 0) + 1
    zeros, nonfinite = values.count(0.0), sum(not math.isfinite(value) for value in values)
    return Histogram(dict(sorted(counts.items())), zeros, nonfinite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    histogram = exponent_histogram(every)
    assert histogram == counted_one_by_one(every.tolist()) and histogram.total == 2**16


@pytest.mark.parametrize("bits, lowest, highest", [(32, -149, 127), (64, -1074, 1023)])
def test_wide_numbers_at_the_edges_of_every_exponent(bits, lowest, highest):
    """Each power of two, its two neighbours, and random bits, subnormals among them."""
    dtype, integers = getattr(torch, f"float{bits}"), getattr(torch, f"int{bits}")
    powers = torch.tensor([math.ldexp(1.0, e) for e in range(lowest, highest + 1)], dtype=torch.float64).to(dtype)
    bits = powers.view(integers)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(torch.iinfo(integers).min, torch.iinfo(integers).max, (3000,), generator=generator)
    tiny = torch.randint(0, 2**20, (500,), generator=generator)
    values = torch.cat([bits, bits - 1, bits + 1, random.to(integers), tiny.to(integers)]).view(dtype)
    values = torch.cat([values, -values, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0]).to(dtype)])
    assert exponent_histogram(values) == counted_one_by_one(values.tolist())


def test_any_shape_layout_and_number_of_tensors():
    transposed = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]).t()
    sparse = torch.sparse_coo_tensor([[1, 1]], [4.0, 4.0], (3,), check_invariants=True)  # 0, 8, 0
    mixed = [transposed, sparse, torch.tensor(0.75, dtype=torch.float64), torch.ones(2, 0), torch.ones(2).half()]
    assert exponent_histogram(iter(mixed)) == Histogram({-1: 1, 0: 3, 1: 2, 2: 1, 3: 1}, zeros=4)
    assert exponent_histogram([]) == Histogram() and Histogram().total == 0
    assert exponent_histogram(torch.tensor([1 - 4j]).conj().imag).counts == {2: 1}  # a view with a sign of its own
    weight = nn.Parameter(torch.ones(3))
    assert exponent_histogram(weight).counts == {0: 3} and weight.grad is None


def test_shares_are_of_all_values():
    histogram = Histogram({-30: 1, -27: 2, -25: 3, -24: 4, 5: 5}, zeros=80, nonfinite=5)
    assert histogram.total == 100
    assert histogram.share(-math.inf, -27) == 0.01
    assert histogram.share(-27, -24) == 0.05  # the lower end is in, the upper is not
    assert histogram.share(-24, math.inf) == 0.09
    assert histogram.share(3, 3) == 0
    with pytest.raises(ValueError, match="low .4. must be at most high .3."):
        histogram.share(4, 3)
    for ask in (lambda: Histogram().share(0, 1), Histogram().plot):
        with pytest.raises(ValueError, match="empty"):
            ask()


def test_histograms_add_up():
    first, second = torch.randn(1000) * 1e-3, torch.cat([torch.randn(500), torch.zeros(7), torch.tensor([math.nan])])
    together = exponent_histogram([first, second])
    added = exponent_histogram(first) + exponent_histogram(second)
    assert added == together and list(added.counts) == sorted(added.counts)
    assert sum([exponent_histogram(second), exponent_histogram(first)], Histogram()) == together


@pytest.mark.parametrize(
    "wrong",
    [np.ones(2), np.array(1.0), np.float32(1), 1.0, [1.0], torch.ones(2, device="meta"), torch.ones(2).long()]
    + [torch.ones(2).cfloat()],
)
def test_what_is_no_tensor_with_values_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match="needs tensors of .* not .*(ndarray|float|meta|int64|complex64)"):
        exponent_histogram(wrong)


# Training.


def seen_in(model, optimizer, backward, steps=1, scaler=None):
    with collect(model, optimizer) as found:
        for _ in range(steps):
            backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return found


class WithLoss(nn.Module):
    """A module that contains others, whose own gradient, 1, is no activation's; and one that it does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.used(x).square().mean()


MODELS = [
    (WithLoss(), 4, 4 * 3 + 4),
    (nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Dropout(0.5).eval()), 4, 4 * 3 + 4),  # hand on
    (nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), 4 + 4 + 1, 4 * 3 + 4 + 5),
]


@pytest.mark.parametrize(("model", "outputs", "in_use"), MODELS)
def test_each_output_and_each_parameter_in_use_is_counted_once_a_step(model, outputs, in_use):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = seen_in(model, optimizer, lambda: model(torch.randn(5, 3)).sum().backward(), steps=3)
    assert found.activation_gradients.total == 3 * 5 * outputs
    assert found.weights.total == found.gradients.total == found.updates.total == 3 * in_use


def test_what_is_collected():
    """A model whose every number is known: y = 3 · relu(2 x), x = (1, -1), loss = sum of y / 2^20."""
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(first.weight, 2.0), nn.init.constant_(second.weight, 3.0)
    model = nn.Sequential(first, nn.ReLU(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.tensor([[1.0], [-1.0]])
    found = seen_in(model, optimizer, lambda: (model(x).sum() / 2**20).backward())
    assert found.weights == Histogram({1: 2})
    assert found.gradients == Histogram({-19: 2})  # 3 x and relu(2 x), over 2^20
    assert found.updates == Histogram({-21: 2})  # a quarter of that
    # Of y: 1, 1. Of relu(2x): 3, 3. Of 2x: 3, 0. All over 2^20.
    assert found.activation_gradients == Histogram({-20: 2, -19: 3}, zeros=1)


def test_an_update_may_be_larger_than_fp16():
    weight = nn.Parameter(torch.tensor([60000.0]).half())
    weight.grad = torch.ones(1).half()

    class ToTheOtherSide(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            weight.neg_()

    optimizer = ToTheOtherSide([weight])
    with collect(nn.Module(), optimizer) as found:
        optimizer.step()
    assert weight.item() == -60000 and found.updates == Histogram({16: 1})


def test_hooks_go_when_training_breaks_off_and_an_evaluation_is_not_counted():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyError), collect(model, optimizer) as found, torch.no_grad():
        model(torch.ones(2, 3))
        raise KeyError
    assert found == Collected() and not model._forward_hooks and not optimizer._optimizer_step_post_hooks


def test_masters_are_seen_and_gradients_without_their_scale():
    """FP16 weights and a loss scale: what is counted is what the FP32 step sees; a step that is skipped is not."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model.half()
    weights = MasterWeights(model.parameters(), torch.optim.SGD, lr=2.0**-12)
    scaler = StaticLossScaler(2.0**10)
    x = torch.ones(1, 1).half()
    found = seen_in(model, weights, lambda: scaler.scale(model(x).float().sum() * 2.0**-5).backward(), scaler=scaler)
    assert found.gradients.counts == {-5: 1} and found.activation_gradients.counts == {5: 1}
    assert found.updates.counts == {-17: 1}  # which FP16 weights could not have taken
    assert model.weight.item() == 1 and weights.masters[0].item() == 1 - 2.0**-17

    scaler = DynamicLossScaler(2.0**24)
    found = seen_in(model, weights, lambda: scaler.scale(model(x).float().sum()).backward(), scaler=scaler)
    assert found.gradients.total == found.updates.total == 0 and found.activation_gradients.nonfinite == 1


# The picture.


def test_bars_show_percentages_and_zeros_stand_apart():
    histogram = Histogram({-30: 10, -20: 30}, zeros=55, nonfinite=5)
    axes = histogram.plot()
    counted, (zero,), (broken,), *_ = axes.containers
    assert {bar.get_x(): bar.get_height() for bar in counted} == {-30: 10, -20: 30}
    assert zero.get_x() + zero.get_width() < -30 and zero.get_height() == 55
    assert broken.get_x() > 16 and broken.get_height() == 5
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert "zero" in names and "inf\nNaN" in names and "$2^{-24}$" in names


def bands(axes):
    """(left, right) of FP16's boxes, which are drawn after the bars and the zeros."""
    return [(box.get_x(), box.get_x() + box.get_width()) for (box,) in axes.containers[2:]]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_bands_are_where_fp16_is_and_where_it_is_after_scaling():
    smallest, normal = float(np.finfo(np.float16).smallest_subnormal), float(np.finfo(np.float16).smallest_normal)
    ends = [math.log2(smallest), math.log2(normal), math.ceil(math.log2(float(np.finfo(np.float16).max)))]
    histogram = Histogram({-30: 10, -26: 20, -20: 30, 15: 25, 16: 5}, zeros=10)
    axes = histogram.plot()
    assert bands(axes) == [(ends[0], ends[1]), (ends[1], ends[2])]
    assert "30 % below" in texts(axes) and "5 %\ntoo large" in texts(axes)
    axes = histogram.plot(scale=8)
    assert bands(axes)[2:] == [(-27, -17), (-17, 13)]
    assert Histogram({0: 1}).plot(scale=8).get_xlim()[0] < -27, "a band is not cut off"
    assert "FP16 after scaling by 8" in texts(axes) and "10 % below" in texts(axes)
    assert "30 %\ntoo large" in texts(axes)
    assert "about 5 % below" not in texts(axes)
    assert any(text.startswith("about") for text in texts(histogram.plot(scale=1000)))


def test_it_draws_on_given_axes_in_a_given_colour():
    axes = pyplot.Figure().subplots()
    assert Histogram({0: 1}).plot(axes, color=WEIGHTS) is axes
    for drawn, colour in ((axes, WEIGHTS), (Histogram({0: 1}).plot(), GRADIENTS)):
        assert matplotlib.colors.to_hex(drawn.patches[0].get_facecolor()) == colour.lower()
    for scale in (0.0, -8.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale"):
            Histogram({0: 1}).plot(scale=scale)


@pytest.mark.gpu
def test_on_a_gpu():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert exponent_histogram(every.cuda()) == exponent_histogram(every)
    subnormal = torch.arange(2**16, dtype=torch.int32).view(torch.float32)
    assert exponent_histogram([subnormal.cuda(), every]) == exponent_histogram([subnormal, every])
