"""A step on fake tensors holds, byte for byte in each category, what the real step does, with each technique."""

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from minizero import GPT, GPTConfig, RankFailed
from minizero.engines.any_model.units import repeated_blocks
from minizero.ranks.one_of_many import one_of_many
from minizero.xray.__main__ import maker, parse
from minizero.xray.case import Case, NotPossible
from minizero.xray.fake import Copier, build, pretend
from minizero.xray.head import LossInChunks
from minizero.xray.places import CARD, having, place_of
from minizero.xray.plan import Plan, use_foreach
from minizero.xray.step import loss_of, measure
from minizero.xray.techniques import TECHNIQUES, costs_of, name_of, outcome, plans, rows_of
from tests.support.xray_cases import OWN, Does, WithLoss, adamw, attention, fake, gpt, real


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


ROWS = {name_of(plan): plan for plan in plans(4, 4)}


def steps():
    """Each row of a GPT, and of other models in a long run; each optimizer; a distribution, which looks at numbers."""
    for name, plan in ROWS.items():
        slow = name not in ("recompute of each block", "frozen matrices in 4 bits", "ZeRO-3 on 4 ranks")
        yield pytest.param(OWN["GPT"], plan, adamw, id=name, marks=[pytest.mark.slow, pytest.mark.accuracy] * slow)
        for other in ("LSTM", "resnet"):
            marks = [pytest.mark.slow, pytest.mark.soak]
            yield pytest.param(OWN[other], plan, adamw, id=f"{name}, {other}", marks=marks)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam"):
        yield pytest.param(OWN["GPT"], Plan(), getattr(torch.optim, name), id=name, marks=pytest.mark.slow)
    for way in ("foreach", "fused"):
        yield pytest.param(OWN["GPT"], Plan(), functools.partial(torch.optim.AdamW, **{way: True}), id=way)
    drawn = functools.partial(calls, lambda: torch.distributions.Normal(leaf(*X), 1.0).rsample())
    yield pytest.param(drawn, Plan(), adamw, id="a distribution")


@pytest.mark.parametrize("make, plan, optimizer", [*steps()])
def test_a_step_is_a_real_run(make, plan, optimizer):
    """Equal; but with prefetch a real message may have arrived early, and its memory be free at the peak.

    A rank alone holds each message as long as it can: a unit's gradient, and the two chunks that a ring receives into.
    """
    try:
        expected = fake(make, plan, optimizer)
    except NotPossible as error:
        with pytest.raises((ValueError, RankFailed), match=str(error).split(" (")[0]):
            real(make, plan, optimizer)
        return
    found = real(make, plan, optimizer)
    if plan.stage == 3 and found != expected:
        largest = max(sum(p.numel() for p in block.parameters()) for _, block in repeated_blocks(make()[0]))
        message = 1.5 * largest * (plan.dtype or torch.float32).itemsize
        assert expected.peak["total"] - message <= found.peak["total"] <= expected.peak["total"]
        assert found.sent == expected.sent
    else:
        assert found == expected


def test_each_field_and_each_technique_is_in_some_row_and_a_stack_has_the_words_of_all_its_own():
    in_rows = {field for plan in ROWS.values() for field, value in vars(plan).items() if value != vars(Plan())[field]}
    assert in_rows == vars(Plan()).keys() and all(plan.ranks == 1 for plan in plans(1, 4))
    assert {row for plan in ROWS.values() for row in rows_of(plan).values()} == {*TECHNIQUES.values()}
    stack = Plan(stage=3, ranks=4, dtype=torch.bfloat16, recompute=True)
    assert name_of(stack) == "ZeRO-3 on 4 ranks, BF16 with FP32 masters, recompute of each block"
    costs = "half as much again is sent; rounding to 8 bits; 20 bytes a parameter on one card"
    assert costs_of(stack).startswith(costs)
    assert name_of(Plan(ranks=4)) == "as it is" and costs_of(Plan()) == ""


@pytest.mark.slow
@pytest.mark.accuracy
def test_a_technique_that_holds_more_says_so_and_why():
    case = Case(GPT(GPTConfig()), tuple(torch.zeros(2, 2, 64, dtype=torch.long)))
    for plan, words in (
        (Plan(micro_batches=2), "the gradients so far wait"),
        (Plan(dtype=torch.bfloat16), "masters"),
        (Plan(stage=3, ranks=8), ""),
    ):
        row = outcome(case, plan)
        assert (row.against > 1) is bool(words) is bool(row.remark) and words in row.remark


@pytest.mark.slow
@pytest.mark.accuracy
def test_attention_without_scores_keeps_what_attention_in_tiles_keeps():
    naive, tiled = (fake(gpt(attention=kind, sequence_length=128), Plan()) for kind in ("naive", "tiled"))
    without = fake(gpt(sequence_length=128), Plan(flash=True))
    activations = [found.peak["activations"] for found in (naive, without, tiled)]
    assert activations[0] > 1.4 * activations[1] and activations[1] == pytest.approx(activations[2], rel=0.05)
    assert naive.peak["total"] > 1.2 * without.peak["total"]


def test_pytorchs_own_attention_stores_scores_under_dropout_and_the_row_says_what_a_gpu_would_hold():
    """With dropout it stores scores on a CPU, and none on a GPU."""
    case = Case(attention(8, dropout_p=0.1, is_causal=True), (torch.ones(2, 2, 128, 8),))
    scores = 2 * 2 * 128 * 128 * 4
    plain, without = (case.run(plan).peak["activations"] for plan in (Plan(), Plan(flash=True)))
    assert plain > 3 * scores > scores > without


# From a head to its loss.
WAYS = {
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "as a view, in FP32": lambda z, y: F.cross_entropy(z.float().view(-1, 50), y.view(-1)),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, 50), y[:, 1:].reshape(-1), ignore_index=-100),
    "shifted, with dots": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, 50), y[..., 1:].flatten()),
    "as a sum": lambda z, y: F.cross_entropy(z.reshape(-1, 50), y.flatten(), reduction="sum"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_in_chunks_is_the_loss(way, bias):
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=bias)}
    model = Does(lambda self, x, y: WAYS[way](self.head(self.embedding(x)), y), **layers)
    inputs, parameters = torch.randint(50, (2, 3, 9)), [*model.parameters()]
    inputs[1, 0, 2:4] = -100
    plain = loss_of(model, tuple(inputs))
    expected = torch.autograd.grad(plain, parameters)
    with LossInChunks():
        loss_of(model, tuple(inputs))  # finds the head
        loss = loss_of(model, tuple(inputs))
        found = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close([loss, *found], [plain, *expected])


def test_an_optimizer_keeps_what_its_user_has_chosen():
    def kinds(optimizer=torch.optim.AdamW, **options):
        use_foreach(made := optimizer(nn.Linear(2, 2).parameters(), **options))
        return made.param_groups[0]["foreach"]

    assert kinds() is True and kinds(foreach=False) is False and kinds(fused=True) is None
    assert kinds(torch.optim.Adafactor) is None  # its default on a GPU, too
    assert isinstance(Plan(momentum=True).optimizer(adamw, nn.Linear(2, 2)), torch.optim.SGD)


def test_rows_that_are_one_step_are_run_once():
    batch = torch.ones(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    case = Case(WithLoss(nn.Linear(8, 8).bfloat16()), batch, card="h100")
    case.run_all([Plan(3, 2), Plan(3, 2, dtype=torch.bfloat16)])
    assert len(case.found) == 1 and case.run(Plan(3, 2)).peak


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
    assert build(lambda: nn.Linear(1, sum(torch.tensor(5000 * [1]).tolist()))).weight.is_meta  # Python has these anyway


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
