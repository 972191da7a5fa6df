"""How tiled attention cuts its work: the size of a tile, which blocks need a mask, when results are rounded."""

import pytest
import torch

import flash.tiles
from flash import attention_reference, tiled
from flash.tiles import TILE, parts
from tests.support.flash_cases import options_of, tensors


def test_a_bound_that_no_pair_reaches_is_none():
    q, k = torch.empty(1, 1, 10, 4), torch.empty(1, 1, 20, 4)
    windows = (30, 29), (29, 30), (2**80, 0), (None, 2**30)
    found = [options_of(q, k, k, window=window) for window in windows]
    assert [(x.left, x.right) for x in found] == [(None, 29), (29, None), (None, 0), (None, None)]


@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_a_tile_fits_into_the_cache_however_many_heads_share_keys(group):
    q, k = torch.empty(2, 2 * group, 600, 4), torch.empty(2, 2, 600, 4)
    for part in parts(q, k, options_of(q, k, k)):
        assert TILE / 4 < part.empty_tile(q).numel() <= TILE


@pytest.mark.parametrize(
    ("causal", "window", "masked"),
    # Six blocks of rows, seven of keys. On the diagonal: six. At the left edge: those of one and of two blocks before.
    [
        (False, None, 0),
        (True, None, 6),
        (True, (20, None), 6 + 5 + 4),
        (False, (None, 15), 6),
        (False, (1000, 1000), 0),
    ],
)
def test_only_blocks_at_the_edge_of_the_band_are_masked(causal, window, masked, monkeypatch):
    q, k = tensors((1, 1, 96, 4), (1, 1, 112, 4))
    options, calls, hidden = options_of(q, k, k, causal=causal, window=window), [], flash.tiles.hidden
    monkeypatch.setattr(flash.tiles, "hidden", lambda *args: calls.append(args) or hidden(*args))
    out, lse = tiled.forward(q, k, k, options, (16, 16))
    assert len(calls) == masked
    tiled.backward(out, lse, q, k, k, out, lse, options, (16, 16))
    assert len(calls) == 2 * masked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_summed_in_float32_and_rounded_once(dtype):
    """dQ adds up 64 blocks of keys."""
    q, k, v, dout = tensors(*[(1, 1, 16, 8), (1, 1, 1024, 8), (1, 1, 1024, 8), (1, 1, 16, 8)], dtype=dtype)
    options = options_of(q, k, k)
    out, lse = tiled.forward(q, k, v, options, (16, 16))
    gradients = tiled.backward(dout, torch.ones_like(lse), q, k, v, out, lse, options, (16, 16))
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    exact_out, exact_lse = attention_reference(q, k, v, return_lse=True)
    exact = torch.autograd.grad((exact_out, exact_lse), (q, k, v), (dout.double(), torch.ones_like(exact_lse)))
    # delta is made from an output that is rounded: an error of an epsilon too.
    for found, wanted in zip(gradients, exact):
        assert found.dtype == dtype
        assert (found - wanted).abs().max() < torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("blocks", [(16, 16), (7, 64), (300, 5)])
def test_blocks_change_nothing(blocks):
    """Nor do heads that are cut off from each other: every part gets its own dropout mask."""
    q, k, v, dout = tensors((2, 6, 40, 8), (2, 3, 50, 8), (2, 3, 50, 8), (2, 6, 40, 8), dtype=torch.float64)
    options = options_of(q, k, k, causal="bottom-right", window=(20, 3), dropout_p=0.3, dropout_seed=11)
    results = []
    for size, tile in ((blocks, 1), ((256, 256), 2**18)):
        before, flash.tiles.TILE = flash.tiles.TILE, tile
        out, lse = tiled.forward(q, k, v, options, size)
        flash.tiles.TILE = before
        results.append((out, lse, *tiled.backward(dout, lse * 0 + 0.5, q, k, v, out, lse, options, size)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
