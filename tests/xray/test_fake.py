"""A step on fake tensors holds, byte for byte and category by category, what the real step does."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from minizero.ranks.one_of_many import one_of_many
from minizero.xray.case import Case
from minizero.xray.fake import Copier, build, pretend
from minizero.xray.plan import Plan
from minizero.xray.step import measure
from tests.support.xray_cases import OWN, WithLoss, adamw, allocated, fake, real


class Calls(nn.Linear):
    """Calls a function, and adds up what it returns."""

    def __init__(self, function):
        super().__init__(1, 1)
        self.function = function

    def forward(self, x):
        return super().forward(x).sum() + sum(tensor.sum() for tensor in tree_leaves(self.function()))


def calls(function):
    return Calls(function), torch.ones(1)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


X = (8, 16)
CASES = {
    **{
        loss.__name__: lambda loss=loss: loss(leaf(*X), torch.rand(X))
        for loss in (F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.l1_loss, F.huber_loss)
    },
    "mse_loss, unreduced": lambda: F.mse_loss(leaf(*X), torch.rand(X), reduction="none").exp(),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(leaf(*X).sigmoid(), torch.rand(X)),
    "kl_div": lambda: F.kl_div(leaf(*X).log_softmax(1), torch.rand(X).softmax(1), reduction="batchmean"),
    "convolutions": lambda: (nn.Conv1d(4, 8, 3)(leaf(2, 4, 9)), nn.ConvTranspose2d(4, 8, 3)(leaf(2, 4, 9, 9))),
    "norms": lambda: [f(leaf(2, 4, 8, 8)) for f in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8))],
    "activations": lambda: tuple(f(leaf(4, 8)) for f in (F.gelu, F.silu, F.relu, F.mish, F.softplus, F.glu, F.dropout)),
    "attention, dropout": lambda: F.scaled_dot_product_attention(*(leaf(2, 4, 64, 16) for _ in "qkv"), dropout_p=0.1),
}
IN_MAKE_TEST = ("LSTM", "UNet", "resnet")
MAKES = OWN | {name: functools.partial(calls, function) for name, function in CASES.items()}
OTHERS = {name: pytest.mark.slow if name in IN_MAKE_TEST else pytest.mark.real for name in OWN if name != "GPT"}


@pytest.mark.parametrize("name", ["GPT", *CASES, *(pytest.param(name, marks=mark) for name, mark in OTHERS.items())])
def test_every_moment_of_the_curve_is_real(name):
    """New releases of PyTorch are watched by this, too."""
    module, inputs = MAKES[name]()
    without = Case(module, inputs, adamw).measure(Plan())
    numbers = measure(copy.deepcopy(module), inputs, Plan(), adamw, one_of_many(1))
    assert without.ledger.curve == numbers.ledger.curve


@pytest.mark.slow
@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, F.glu])
def test_the_allocator_hands_out_as_many_bytes(function):
    make = functools.partial(calls, lambda: function(leaf(512, 64)) * function(leaf(512, 64)))
    assert 0 <= allocated(make) - fake(make, Plan()).peak["total"] < 1024  # scratch of sums


IN_A_LOOP = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam"]


@pytest.mark.parametrize(
    "kind, options",
    [("AdamW", {"foreach": True}), ("AdamW", {"fused": True})]
    + [pytest.param(kind, {}, marks=pytest.mark.slow) for kind in IN_A_LOOP],
)
def test_optimizers(kind, options):
    make = functools.partial(getattr(torch.optim, kind), **options)
    assert fake(OWN["GPT"], Plan(), make) == real(OWN["GPT"], Plan(), make)


def test_what_shares_memory_shares_it_again_and_nothing_with_the_original():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))])
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    model.register_buffer("part", model.table[5:])
    with pretend() as mode:
        copied = Copier(mode).copy(model)
        assert copied[1].weight is copied[0].weight
        assert copied[2] is not model[2] and len({*copied.parameters()} & {*model.parameters()}) == 0
        storages = [tensor.untyped_storage() for tensor in (copied.table, copied.part, model.table)]
        assert storages[0] is storages[1] and storages[0] is not storages[2]
        assert copied.part.storage_offset() == 5
        assert isinstance(copied[0].weight, nn.Parameter) and copied[0].weight.device.type == "cpu"
    assert model[0].weight.abs().sum() > 0  # the original has its numbers


def test_what_looks_at_a_number_while_it_is_built_is_built_for_real():
    built = []

    def make():
        built.append(float(torch.ones(()).sum()))
        return nn.Linear(1, 1), (torch.ones(1, 1),)

    assert not build(make)[0].weight.is_meta and len(built) == 1  # on meta it raised
    assert build(lambda: nn.Linear(1, 1)).weight.is_meta


def test_what_a_distribution_looks_at_is_allowed():
    """It looks at its numbers, unless it is told not to."""
    make = functools.partial(calls, lambda: torch.distributions.Normal(leaf(*X), 1.0).rsample())
    assert fake(make, Plan()) == real(make, Plan())


@pytest.mark.slow  # it loads PyTorch's compiler
def test_what_is_compiled_runs_uncompiled():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), (torch.ones(2, 4), torch.zeros(2).long())
    plain, compiled = (Case(WithLoss(inner), batch).run(Plan()).peak for inner in (model, torch.compile(model)))
    assert plain == compiled


def test_a_default_device_of_the_caller_is_for_the_model_alone():
    """Under `with torch.device("meta")` an optimizer makes its counters there, and PyTorch 2.11 reads them."""
    expected = fake(OWN["GPT"], Plan()).peak
    with torch.device("meta"):
        assert Case(*OWN["GPT"]()).run(Plan()).peak == expected
