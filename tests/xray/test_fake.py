"""A step on fake tensors holds, byte for byte and category by category, what the real step does."""

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from minizero.ranks.one_of_many import one_of_many
from minizero.xray.__main__ import maker, parse
from minizero.xray.case import Case
from minizero.xray.fake import Copier, build, pretend
from minizero.xray.places import CARD, having, place_of
from minizero.xray.plan import Plan
from minizero.xray.step import measure
from tests.support.xray_cases import OWN, Does, WithLoss, adamw, fake, real


def calls(function):
    """A layer, and the sum of what a function returns."""

    def add_up(self, x):
        return self.layer(x).sum() + sum(tensor.sum() for tensor in tree_leaves(function()))

    return Does(add_up, layer=nn.Linear(1, 1)), torch.ones(1)


def reads(self, x, sizes, numbers):
    """Splits its batch by sizes, and picks samples by their numbers, as models do that read images."""
    parts = torch.split(self.layer(x), sizes.tolist())
    return sum(part.square().mean() for part in parts) + parts[0][numbers[: len(parts[0])] > 1].sum()


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
    "down and up": lambda: F.interpolate(F.max_pool2d(leaf(2, 4, 8, 8).mul(2).relu_(), 2), scale_factor=2.0),
    "an LSTM without gradients": lambda: torch.no_grad()(nn.LSTM(8, 8).forward)(torch.ones(5, 2, 8))[0],
    "attention, dropout": lambda: F.scaled_dot_product_attention(*(leaf(2, 4, 64, 16) for _ in "qkv"), dropout_p=0.1),
}
MAKES = OWN | {name: functools.partial(calls, function) for name, function in CASES.items()}
SIZES = torch.ones(7, 8), torch.tensor([5, 2]), torch.arange(7)
MAKES["small whole numbers"] = lambda: (Does(reads, layer=nn.Linear(8, 8)), SIZES)
MARKS = {"LSTM": [pytest.mark.slow], "resnet": [pytest.mark.slow], "GPT": []}
MARKS = {name: MARKS.get(name, [pytest.mark.real] * (name in OWN)) for name in MAKES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in MAKES])
def test_every_moment_of_the_curve_is_real(name):
    """New releases of PyTorch are watched by this, too."""
    module, inputs = MAKES[name]()
    without = Case(module, inputs, adamw).measure(Plan())
    numbers = measure(copy.deepcopy(module), inputs, Plan(), adamw, one_of_many(1))
    assert without.ledger.curve == numbers.ledger.curve


DRAWN = functools.partial(calls, lambda: torch.distributions.Normal(leaf(*X), 1.0).rsample())
STEPS = [(OWN["GPT"], functools.partial(torch.optim.AdamW, **{way: True})) for way in ("foreach", "fused")]
IN_A_LOOP = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam"]
STEPS += [pytest.param(OWN["GPT"], getattr(torch.optim, kind), marks=pytest.mark.slow) for kind in IN_A_LOOP]


@pytest.mark.parametrize("make, optimizer", [(DRAWN, adamw), *STEPS])
def test_a_step_is_real_with_each_optimizer_and_with_a_distribution(make, optimizer):
    """A distribution looks at its numbers if there are any."""
    assert fake(make, Plan(), optimizer) == real(make, Plan(), optimizer)


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


def test_what_looks_at_a_number_while_it_is_built_is_built_for_real_if_there_are_many():
    def of_sum(numbers):
        return build(lambda: nn.Linear(1, int(torch.ones(numbers).sum()) * 1000)).weight

    assert not of_sum(5000).is_meta and of_sum(5).is_meta


def test_a_script_is_imported_without_numbers_and_what_it_imports_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "imported_beside.py").write_text("import torch\nONES = torch.ones(5000)\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom imported_beside import ONES\n"
        "model = torch.nn.Linear(5000, 10**9).to('cuda')\n"  # 20 TB
        "adapter = torch.nn.Linear(5000, 5000)\n"
        "beside = torch.zeros(10**13, device=adapter.weight.device)\n"
        "if adapter.weight.device != torch.device('meta'):\n"  # as PEFT asks
        "    adapter.to(model.weight.device)\n"
        "rates = [rate.item() for rate in torch.linspace(0, 1, 5)]\n"
        "def make():\n    return adapter, (ONES.to('cuda') * adapter.weight).sum() * rates[1]\n"
    )
    model, product = build(maker(parse([str(tmp_path / "mine.py")])))
    with having(marks=True):
        assert model.weight.is_meta and product.is_meta and place_of(model.weight) == CARD
    assert sys.modules.pop("imported_beside").ONES.sum() == 5000


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
