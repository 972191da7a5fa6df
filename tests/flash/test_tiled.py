"""Tiled attention: as accurate as plain attention, and linear in memory."""

import math

import pytest
import torch
from hypothesis import given, settings

import flash.tiles
from flash import attention_reference, attention_tiled, flash_attention_varlen
from flash.attention import flash_attention
from flash.tiled import online_softmax
from minizero.memory import Ledger
from tests.support.flash_cases import LENGTHS, Case, cases, check_accuracy, tensors

INF, NAN = math.inf, math.nan


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


# Numbers that are not usual.


# Memory.


def bytes_saved(attention, n):
    """What is alive after the forward pass and was not before, by the ledger."""
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, n, 16)] * 3))
    with Ledger() as ledger:
        out = attention(q, k, v)
        return ledger.current["total"], out


@pytest.mark.parametrize("attention", [attention_tiled, flash_attention])
def test_bytes_saved_for_backward_are_out_and_a_number_for_each_row(attention):
    for n in (1, 300, 1000, 2000):
        assert bytes_saved(attention, n)[0] == 2 * n * (16 + 1) * 4
    scores = [bytes_saved(attention_reference, n)[0] for n in (1000, 2000)]
    assert scores[1] > 3.8 * scores[0] > 3.8 * 2 * 1000**2 * 4, "plain attention keeps N × N"


def peak(attention, n):
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 1, n, 16)] * 3))
    with Ledger() as ledger:
        attention(q, k, v, causal=True).sum().backward()
    return ledger.peak["total"]


@pytest.mark.slow
def test_the_peak_grows_along_a_line():
    """Forward and backward, from 1k to 4k. What a line leaves unexplained is less than a tile."""
    lengths = torch.tensor([1024, 2048, 4096], dtype=torch.float64)
    peaks = torch.tensor([peak(attention_tiled, int(n)) for n in lengths], dtype=torch.float64)
    slope = (peaks[-1] - peaks[0]) / (lengths[-1] - lengths[0])
    assert 16 * 4 * 4 <= slope <= 16 * 4 * 8, f"{slope} bytes per row: out, dq, dk, dv and little else"
    assert (peaks - peaks[0] - slope * (lengths - lengths[0])).abs().max() < 2**18, peaks
    assert peak(attention_reference, 1024) > 3 * 4 * 1024**2, "plain attention: three matrices of scores and more"


def test_tiles_do_not_grow_with_heads_and_batch():
    """What forward and backward take beyond their results is a few tiles, of 2 MiB, for 64 heads and for 128."""

    def beyond_results(batch):
        q, k, v = (x.requires_grad_() for x in tensors(*[(batch, 16, 256, 8)] * 3))
        with Ledger() as ledger:
            attention_tiled(q, k, v).sum().backward()
        # out, dout, dq, dk, dv; lse, dlse, delta and a spare
        return ledger.peak["total"] - batch * 16 * 256 * (5 * 8 + 4) * 4

    some, more = beyond_results(4), beyond_results(8)
    assert some < 5 * 4 * flash.tiles.TILE, "64 tiles of 256 × 256 would be 16 MiB each"
    assert more < 1.01 * some


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
