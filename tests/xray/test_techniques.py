"""Each row of the table is a run: the figures of a technique are those of a real step with it."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import GPT, GPTConfig, RankFailed
from minizero.engines.any_model.units import repeated_blocks
from minizero.xray.case import Case, NotPossible
from minizero.xray.head import LossInChunks
from minizero.xray.plan import Plan, use_foreach
from minizero.xray.step import loss_of
from minizero.xray.techniques import TECHNIQUES, costs_of, name_of, outcome, plans, rows_of
from tests.support.xray_cases import OWN, Does, WithLoss, adamw, fake, gpt, real

ROWS = {name_of(plan): plan for plan in plans(4, 4)}


def rows():
    """Each row of a GPT; of other models in a long run."""
    for name in ROWS:
        slow = name not in ("recompute of each block", "frozen matrices in 4 bits", "ZeRO-3 on 4 ranks")
        yield pytest.param(name, "GPT", marks=[pytest.mark.slow, pytest.mark.accuracy] * slow)
    others = product(ROWS, ["LSTM", "resnet"])
    yield from (pytest.param(*row, marks=[pytest.mark.slow, pytest.mark.soak]) for row in others)


@pytest.mark.parametrize("name, model", [*rows()])
def test_a_row_is_a_real_run(name, model):
    """Equal; but with prefetch a real message may have arrived early, and its memory be free at the peak.

    A rank alone holds each message as long as it can: a unit's gradient, and the two chunks that a ring receives into.
    """
    plan = ROWS[name]
    try:
        expected = fake(OWN[model], plan)
    except NotPossible as error:
        with pytest.raises((ValueError, RankFailed), match=str(error).split(" (")[0]):
            real(OWN[model], plan)
        return
    found = real(OWN[model], plan)
    if plan.stage == 3 and found != expected:
        largest = max(sum(p.numel() for p in block.parameters()) for _, block in repeated_blocks(OWN[model]()[0]))
        message = 1.5 * largest * (plan.dtype or torch.float32).itemsize
        assert expected.peak["total"] - message <= found.peak["total"] <= expected.peak["total"]
        assert found.sent == expected.sent
    else:
        assert found == expected


def test_every_field_of_a_plan_is_in_some_row_and_on_one_rank_none_shards():
    in_rows = {field for plan in ROWS.values() for field, value in vars(plan).items() if value != vars(Plan())[field]}
    assert in_rows == vars(Plan()).keys()
    assert all(plan.ranks == 1 for plan in plans(1, 4))


def test_a_stack_has_the_words_of_all_its_techniques():
    stack = Plan(stage=3, ranks=4, dtype=torch.bfloat16, recompute=True)
    assert name_of(stack) == "ZeRO-3 on 4 ranks, BF16 with FP32 masters, recompute of each block"
    assert costs_of(stack).startswith(
        "half as much again is sent; rounding to 8 bits; 20 bytes a parameter on one card"
    )
    assert name_of(Plan(ranks=4)) == "as it is" and costs_of(Plan()) == ""
    assert {row for plan in ROWS.values() for row in rows_of(plan).values()} == {*TECHNIQUES.values()}


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

    def attention(self, x):
        q, k, v = (self.layer(x) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).sum()

    case = Case(Does(attention, layer=nn.Linear(8, 8)), (torch.ones(2, 2, 128, 8),))
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
    inputs = torch.randint(50, (2, 3, 9))
    inputs[1, 0, 2:4] = -100
    plain = loss_of(model, tuple(inputs))
    plain.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with LossInChunks():
        loss_of(model, tuple(inputs))  # finds the head
        loss = loss_of(model, tuple(inputs))
        loss.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_an_optimizer_keeps_what_its_user_has_chosen():
    def kinds(optimizer=torch.optim.AdamW, **options):
        model = WithLoss(nn.Linear(2, 2))
        use_foreach(made := optimizer(model.parameters(), **options))
        return made.param_groups[0]["foreach"]

    assert kinds() is True and kinds(foreach=False) is False and kinds(fused=True) is None
    assert kinds(torch.optim.Adafactor) is None  # its default on a GPU, too
    assert isinstance(Plan(momentum=True).optimizer(adamw, WithLoss(nn.Linear(2, 2))), torch.optim.SGD)


def test_rows_that_are_one_step_are_run_once():
    batch = torch.ones(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    case = Case(WithLoss(nn.Linear(8, 8).bfloat16()), batch, card="h100")
    case.run_all([Plan(3, 2), Plan(3, 2, dtype=torch.bfloat16)])
    assert len(case.found) == 1 and case.run(Plan(3, 2)).peak
