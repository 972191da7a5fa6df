"""Bytes: what each stage holds, measured by the ledger, against the formulas."""

import functools
import gc
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, GPT, GPTConfig, Zero1, Zero2, Zero3
from minizero.memory import CATEGORIES, Ledger, predict, predict_activations, predict_sent
from minizero.memory.tape import holders, moments
from minizero.models.gpt import Attention, Block
from tests.support.by_module import by_module
from tests.support.helpers import STAGES, run, slow, soak
from tests.support.stage_bytes import BLOCK, CONFIG, ROOT, TOTAL, measure, most


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float16, mark=pytest.mark.slow), *soak(torch.bfloat16)])
@pytest.mark.parametrize("world_size", [2, *soak(4), *slow(8, mark=pytest.mark.slow)])
def test_persistent_bytes_are_the_formulas(world_size, dtype):
    for number, stage in enumerate(STAGES):
        expected = predict(TOTAL, world_size, number, dtype=dtype)
        padding = 16 * world_size * (CONFIG.layers + 1)
        for current, *_ in filter(None, run(world_size, measure, stage, None if dtype == torch.float32 else dtype)):
            for category in ("parameters", "gradients", "optimizer"):
                over = current[category] - expected[category]
                slack = 0.001 * expected[category] + padding
                assert -slack <= over <= slack, f"{stage.__name__} {category} {over:+} bytes"
            left = current["total"] - sum(current[c] for c in ("parameters", "gradients", "optimizer"))
            assert left < 2000, f"{stage.__name__} keeps {left} bytes of something else"


def test_each_stage_frees_what_it_should():
    one_at_a_time = functools.partial(Zero3, prefetch=0)  # whose peaks are the same in every run
    curves = {stage: run(4, measure, one_at_a_time if stage is Zero3 else stage)[0][1] for stage in STAGES}
    for stage in (DDP, Zero1):
        assert most(curves[stage], "gradients", "optimizer") == pytest.approx(4 * TOTAL, rel=1e-3)
    for stage in (Zero2, Zero3):  # never more than the shards and one unit's full gradient
        assert most(curves[stage], "gradients", "backward") <= TOTAL + 4 * BLOCK + 4 * ROOT
        assert most(curves[stage], "gradients", "optimizer") == pytest.approx(TOTAL, rel=1e-3)
    assert most(curves[Zero3], "parameters", "optimizer") == pytest.approx(TOTAL, rel=1e-3)
    for stage in (Zero1, Zero2, Zero3):  # a ring receives into two chunks of one unit at most
        assert 0 < most(curves[stage], "communication", "backward") <= 2 * BLOCK + 64
    # DDP averages in buckets: for a moment it holds the gradients twice, and two chunks of the bucket.
    assert 2 * BLOCK < most(curves[DDP], "communication", "backward") <= 2 * TOTAL
    assert most(curves[DDP], "gradients", "backward") == pytest.approx(2 * 4 * TOTAL, rel=1e-3)


def test_a_frozen_unit_is_released_in_backward_too():
    """Nothing of its own says that its backward is over; its input's gradient does."""

    def gathered(comm):
        module = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(6)))
        for layer in module[1:]:
            layer.requires_grad_(False)
        model = Zero3(module, comm)
        with Ledger(model) as ledger:
            model(torch.zeros(1, 100)).sum().backward()
        return max(sample["parameters"] for sample in ledger.curve)

    shards = 6 * 40_000 / 2
    assert run(2, gathered)[0] <= shards + 2 * 40_000


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("stage", "options"),
    [(stage, {}) for stage in STAGES] + [(Zero3, {"sharding_factor": 1}), (Zero3, {"offload": True})],
)
def test_frozen_units_count_as_what_they_hold(stage, options, dtype):
    """Half of the model is frozen. All that lives are the units' buffers, before a step and after it."""

    def work(comm):
        module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        module[:2].requires_grad_(False)
        model = stage(module, comm, dtype=dtype, **options)
        tensors = [t for unit in model.units for t in (unit.replica, unit.master) if t is not None]
        held = sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors) if s.nbytes()}.values())
        with Ledger(model) as ledger:
            before = dict(ledger.current)
            model(torch.ones(1, 100)).sum().backward()
            model.zero_grad()
        return held, before, ledger.current, by_module(ledger.holders)

    held, before, after, modules = run(2, work)[0]
    for current in (before, after):
        assert held == current["total"] + current["host"] == sum(current[c] for c in CATEGORIES)
    assert {"0", "1", "2", "3"} <= modules.keys()


@pytest.mark.accuracy
def test_memory_returns_without_the_garbage_collector():
    def leftover(comm, stage):
        gc.collect()
        gc.disable()
        try:
            model = stage(GPT(CONFIG), comm)
            with Ledger(model) as ledger:
                before = ledger.current["total"]
                tokens = torch.zeros(1, 8, dtype=torch.long)
                for _ in range(3):
                    model(tokens, tokens).backward()
                    model.zero_grad()
                return ledger.current["total"] - before
        finally:
            gc.enable()

    for stage in STAGES:
        assert run(1, leftover, stage)[0] < 1000


# The formulas.


def test_predictions_in_these_bytes_and_in_the_papers():
    psi, n = 1_000_000, 4

    def total(stage, **options):
        return predict(psi, n, stage, **options)["total"] / psi

    assert [total(stage) for stage in range(4)] == [16, 8 + 8 / n, 4 + 12 / n, 16 / n]
    half = {"dtype": torch.bfloat16}
    assert [total(stage, **half) for stage in range(4)] == [20, 4 + 16 / n, 2 + 16 / n, 16 / n]
    paper = {"convention": "paper"}
    assert [total(stage, **paper) for stage in range(4)] == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert predict(psi, 64, 3, sharding_factor=8) == predict(psi, 8, 3)
    # Table 1 of the ZeRO paper, 7.5B parameters on 64 GPUs, decimal GB: 31.4, 16.6, 1.88.
    table = [predict(7_500_000_000, 64, stage, convention="paper")["total"] / 1e9 for stage in (1, 2, 3)]
    assert table == pytest.approx([31.4, 16.6, 1.88], abs=0.05)
    assert predict_sent(psi, n, 3, n_root=1000) == (3 * psi - 1000) * 4 * 3 / 4


SIZES = {"batch_size": 2, "sequence_length": 8, "width": 16, "heads": 2}
COUNTS = {"n_parameters": 10, "world_size": 4, "stage": 1}
RIGHT = {predict: COUNTS, predict_sent: COUNTS, predict_activations: SIZES}
WRONG = {
    "world_size": [0, 4.0],
    "stage": [4],
    "sharding_factor": [0, 3, 8],
    "n_root": [11],
    "bytes_each": [0],
    "width": [15],
    "dtype": [torch.float8_e4m3fn, torch.int8, torch.complex64, "float32", None],
    "convention": ["other"],
}
NO_COUNTS = [-1, 2.5, "3", True, math.nan, math.inf, [4], torch.tensor(2)]


@pytest.mark.parametrize("function", RIGHT)
def test_predictions_refuse_what_could_not_be_by_name(function):
    for name, parameter in inspect.signature(function).parameters.items():
        wrong = WRONG.get(name, []) + NO_COUNTS * ("int" in str(parameter.annotation))
        wrong += [None] * (parameter.annotation is int)
        for value in [*wrong, torch.float64] if name == "dtype" and function is predict else wrong:
            with pytest.raises(ValueError, match=f"{function.__name__}: {name} (.* )?must"):
                function(**(RIGHT[function] | {name: value}))


def test_whole_numbers_of_any_type():
    assert predict(7e9, 4, 3) == predict(7 * 10**9, 4, 3)
    psi = np.int32(2 * 10**9)  # 16 of it are no int32 any more
    assert predict(psi, np.int64(4), np.int8(0))["total"] == 32e9 and predict_sent(psi, 2, 0) == 8e9
    each = [np.int16(size) for size in (4, 32, 4096, 64)]
    assert predict_activations(*each) == predict_activations(4, 32, 4096, 64)


# Activations, a layer at a time.


class DropoutAttention(Attention):
    """With dropout where the paper has it: over the softmax and over the output."""

    def forward(self, x, mask):
        (tokens, width), sequence = x.shape, mask.shape[0]
        qkv = self.qkv(x).view(-1, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, -1, sequence, width // self.heads)
        weights = F.dropout(torch.baddbmm(mask, q, k.transpose(1, 2)).softmax(-1), 0.1)
        heads = torch.bmm(weights, v).view(-1, self.heads, sequence, width // self.heads)
        return F.dropout(self.out(heads.transpose(1, 2).reshape(tokens, width)), 0.1)


class DropoutBlock(Block):
    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("batch", "sequence", "width", "heads"), [(4, 32, 64, 4), (3, 20, 48, 2)])
def test_a_layers_activations_are_the_formula_to_the_byte(dropout, dtype, batch, sequence, width, heads):
    def kept(layers):
        model = GPT(GPTConfig(64, sequence, width, layers, heads)).to(dtype)
        if dropout:
            for block in model.blocks:
                block.__class__, block.attention.__class__ = DropoutBlock, DropoutAttention
        x, y = torch.zeros(2, batch, sequence, dtype=torch.long)
        with Ledger(model) as ledger:
            model(x, y).backward()
        return ledger

    formula = predict_activations(batch, sequence, width, heads, dtype=dtype, dropout=dropout)
    three, two = kept(3), kept(2)
    assert three.peak["activations"] - two.peak["activations"] == formula["total"]

    # Each term stands in the table under the module that made it.
    most, replayed = three.peak["activations"], moments(three.tape, three.start)
    rows = next(holders(moment) for moment in replayed if moment.totals["activations"] == most)
    held = {name: module.get("activations", 0) for name, module in by_module(rows).items()}
    statistics = formula["norms: a mean and a deviation for each token"] / 2
    assert held["blocks.1.up"] == formula["perceptron: input of GELU"]
    assert held["blocks.1.norm2"] == formula["perceptron: input of the first layer"] + statistics
    assert held["blocks.1.norm1"] == formula["attention: input of the projection to q, k, v"] + statistics
    attention = ("q, k", "v", "output of the softmax", "dropout's mask over that", "dropout's output")
    attention += ("input of the last projection", "dropout's mask over its output")
    assert held["blocks.1.attention"] == sum(formula[f"attention: {name}"] for name in attention)


def test_activations_in_the_papers_convention():
    """34 s b h + 5 a s² b. Of that, FP32 without dropout keeps 2 · (34 − 2) and 2 · (5 − 3), beside the norms'."""
    b, s, h, a = 4, 32, 64, 8
    paper = predict_activations(b, s, h, a, convention="paper")
    assert paper["total"] == s * b * h * (34 + 5 * a * s / h)
    ours = predict_activations(b, s, h, a)
    assert ours["total"] == s * b * h * (64 + 4 * a * s / h) + 16 * s * b
