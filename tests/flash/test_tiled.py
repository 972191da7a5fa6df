"""Tiled attention: as accurate as plain attention, and linear in memory."""

import math

import pytest
import torch
from hypothesis import given, settings

import flash.tiles
from flash import attention_tiled, flash_attention, flash_attention_varlen
from flash.tiled import online_softmax
from minizero.memory import Ledger
from tests.support.flash_cases import LENGTHS, Case, cases, check_accuracy, tensors


def packed(*args, **kwargs):
    return flash_attention_varlen(*args, backend="tiled", **kwargs)


# Accuracy.


@pytest.mark.accuracy
@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases())
def test_as_accurate_as_plain_attention(case):
    check_accuracy(case, attention_tiled, packed)


def test_gradients_have_no_more_error_than_the_rounding_of_out_gives_them():
    """Dropout leaves few weights, ten times as large. Nearly all the error of dK is that of out in delta."""
    options = {"causal": "bottom-right", "scale": None, "window": (1, 0), "dropout_p": 0.9, "dropout_seed": 131071}
    drawn = tuple(options.items())
    case = Case(854, False, 1, ((2, 15),), 1, 4, 96, torch.bfloat16, "contiguous", "normal", drawn)
    check_accuracy(case, attention_tiled, packed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None)
@given(cases(lengths=(*LENGTHS, 511, 1025)))
def test_as_accurate_as_plain_attention_for_long(case):
    check_accuracy(case, attention_tiled, packed)


@pytest.mark.parametrize(("seed", "n_q", "n_k", "kv_heads", "group"), [(158, 15, 1, 3, 4), (2, 1, 128, 3, 2)])
def test_large_scores_of_few_rows_have_no_more_error_than_dot_products_have(seed, n_q, n_k, kv_heads, group):
    """Where a matrix product would add up 256 columns one by one, in float32: here a score is rounded once."""
    options = (("causal", False), ("scale", 0.3))
    case = Case(seed, True, 1, ((n_q, n_k),), kv_heads, group, 256, torch.float32, "transposed", "1e4", options)
    check_accuracy(case, attention_tiled, packed, terms=1)


# Memory.


@pytest.mark.parametrize("attention", [attention_tiled, flash_attention])
def test_bytes_saved_for_backward_are_out_and_a_number_for_each_row(attention):
    for n in (1, 300, 2000):
        q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, n, 16)] * 3))
        with Ledger() as ledger:
            out = attention(q, k, v)  # noqa: F841
            assert ledger.current["total"] == 2 * n * (16 + 1) * 4


def test_forward_and_backward_take_a_few_tiles_beyond_their_results_whatever_the_batch_heads_and_rows():
    """Five of 2 MiB. 64 tiles of 256 × 256 would be 16 MiB each, and the scores of 4,096 rows 64 MiB."""
    for batch, heads, n in ((4, 16, 256), (8, 16, 256), (1, 1, 4096)):
        q, k, v = (x.requires_grad_() for x in tensors(*[(batch, heads, n, 8)] * 3))
        with Ledger() as ledger:
            attention_tiled(q, k, v).sum().backward()
        results = batch * heads * n * (5 * 8 + 4) * 4  # out, dout, dq, dk, dv; lse, dlse, delta and a spare
        assert ledger.peak["total"] - results < 5 * 4 * flash.tiles.TILE


# A row, step by step.


@pytest.mark.parametrize("block", [1, 3, 100])
def test_online_softmax_step_by_step(block):
    scores, values = tensors((10,), (10, 4), dtype=torch.float64)
    steps = online_softmax(scores, values, block)
    assert len(steps) == math.ceil(10 / block) and [step.keys.start for step in steps] == [*range(0, 10, block)]
    for before, step in zip([None, *steps], steps):
        seen = scores[: step.keys.stop]
        assert step.maximum == seen.max().item()
        assert step.total == pytest.approx((seen - seen.max()).exp().sum().item())
        assert step.rescale == (math.exp(before.maximum - step.maximum) if before else 0)
        torch.testing.assert_close(step.output, seen.softmax(0) @ values[: step.keys.stop])

    scores, values = torch.tensor([0.0, 1e4, -1e4, 1e4]), torch.eye(4)
    assert online_softmax(scores, values)[-1].output.tolist() == [0, 0.5, 0, 0.5]
