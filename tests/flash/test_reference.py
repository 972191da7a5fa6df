"""The oracle itself: against PyTorch's attention, against loops, and the dropout mask against its definition."""

import math
import struct
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from flash import attention_reference
from flash.options import dropout_keep
from flash.reference import attention_reference_varlen

INF = float("inf")


def tensors(n_q=9, n_k=9, heads=4, kv_heads=4, head_dim=8, batch=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, n_q), (kv_heads, n_k), (kv_heads, n_k))
    return [torch.randn(batch, *shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_k", [9, 4, 15])
def test_it_is_pytorchs_attention(kv_heads, causal, n_k):
    q, k, v = tensors(n_k=n_k, kv_heads=kv_heads)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(attention_reference(q, k, v, causal=causal, scale=0.7), expected)


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize("window", [None, (2, 1), (0, 0), (None, 2), (3, None)])
@pytest.mark.parametrize("diagonal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("n_k", [9, 4, 15])
def test_which_keys_a_query_sees(causal, window, diagonal, n_k):
    """Pair by pair, as the contract words it; a row without keys gives 0 and -inf."""
    q, k, v = tensors(n_k=n_k)
    out, lse = attention_reference(q, k, v, causal=causal, window=window, window_diagonal=diagonal, return_lse=True)
    left, right = (INF if side is None else side for side in window or (None, None))
    o = n_k - 9 if causal == "bottom-right" else 0
    w = n_k - 9 if "bottom-right" in (causal, diagonal) else 0
    for i in range(9):
        seen = [j for j in range(n_k) if i + w - left <= j <= i + w + right and not (causal and j > i + o)]
        scores = q[:, :, i, None] @ k[:, :, seen].mT / math.sqrt(8)
        torch.testing.assert_close(out[:, :, i, None], scores.softmax(-1) @ v[:, :, seen])
        expected = scores.exp().sum(-1)[..., 0].log() if seen else torch.full((2, 4), -INF, dtype=torch.float64)
        torch.testing.assert_close(lse[:, :, i], expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_rows_that_see_nothing_have_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(n_q=6, n_k=3))
    with torch.autograd.detect_anomaly():  # no NaN on the way either
        out, lse = attention_reference(q, k, v, causal="bottom-right", return_lse=True)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, :, :3] == 0).all() and (gradients[0][:, :, 3:] != 0).all()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("keywords", [{}, dict(causal=True), dict(window=(1, 0))])
def test_scores_beyond_float16_are_no_keys_that_are_not_there(sign, autocast, keywords):
    """±720,000, also where autocast would compute in float16. Equal scores: the output is the mean of the values."""
    q, v = torch.full((1, 2, 4, 64), 300.0).half(), torch.ones(1, 1, 4, 64).half().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out, lse = attention_reference(q, sign * q[:, :1], v, scale=0.125, return_lse=True, **keywords)
    assert (out == 1).all() and ((lse - sign * 720_000).abs() < 2).all()
    assert torch.autograd.grad(out.sum(), v)[0].sum() == 2 * 4 * 64


def test_packed_sequences_are_sequences_one_by_one():
    (q, k, v), lengths = tensors(12, 17, batch=1), [(5, 0), (0, 4), (3, 9), (3, 2)]
    starts = [torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0).int() for side in (0, 1)]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    out, lse = attention_reference_varlen(*packed, *starts, causal=True, return_lse=True)
    for number, pair in enumerate(lengths):
        rows, keys = (slice(int(s[number]), int(s[number + 1])) for s in starts)
        one, one_lse = attention_reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=True, return_lse=True)
        torch.testing.assert_close(out[rows], one[0].transpose(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(lse[:, rows], one_lse[0], rtol=0, atol=0)
        assert pair[1] or (lse[:, rows] == -INF).all() and (out[rows] == 0).all()
    assert (out[11:] == 0).all() and (lse[:, 11:] == -INF).all(), "the last row is in no sequence"


# Dropout.


def murmur3(data, seed=0):
    """MurmurHash3_x86_32 of bytes, on Python's integers."""

    def rotate(x, bits):
        return (x << bits | x >> 32 - bits) & 0xFFFFFFFF

    h, whole = seed, len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        word = rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    if data[whole:]:
        word = int.from_bytes(data[whole:], "little")
        h ^= rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_this_murmur3_gives_published_hashes():
    """From the hash's own test vectors, as its ports quote them."""
    assert murmur3(b"") == 0 and murmur3(b"", 1) == 0x514E28B7
    assert murmur3(b"test") == 0xBA6BD213 and murmur3(b"Hello, world!") == 0xC0363E43


@pytest.mark.parametrize("seed", [0, 5, -3, 2**40 + 7, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("p", [0.3, 1 - 2**-40])
def test_the_mask_is_murmur3_of_its_position(seed, p):
    batches, heads, rows, keys = torch.tensor([0, 7]), torch.arange(3), torch.tensor([2, 70_000]), torch.arange(40)
    kept = dropout_keep(torch.tensor(seed), p, batches, heads, rows, keys)
    for b, batch in enumerate(batches.tolist()):
        for h in heads.tolist():
            for r, i in enumerate(rows.tolist()):
                for j in keys.tolist():
                    words = struct.pack("<qIIII", seed, batch, h, i, j)
                    expected = murmur3(words) >= min(round(p * 2**32), 2**32 - 1)
                    assert bool(kept[b, h, r, j]) == expected, (batch, h, i, j)


def test_a_weight_whose_hash_is_the_threshold_is_kept():
    """So that p = 0 would keep all."""
    position = torch.tensor([2]), torch.tensor([3]), torch.tensor([4]), torch.tensor([5])
    hashed = murmur3(struct.pack("<qIIII", 7, 2, 3, 4, 5))
    kept = [dropout_keep(torch.tensor(7), (hashed + more) / 2**32, *position).item() for more in (-1, 0, 1)]
    assert kept == [True, True, False]


# The package, in a process of its own, which forks for each case.

IMPORTS = """
import os, sys, torch
for gpu, value in ((False, None), (True, None), (False, "0")):
    if os.fork() == 0:
        os.environ.pop("TRITON_INTERPRET", None)
        if value:
            os.environ["TRITON_INTERPRET"] = value
        torch.cuda.is_available = lambda: gpu
        import flash
        others = [name for name in ("triton", "minizero", "precision", "matplotlib") if name in sys.modules]
        print(os.environ.get("TRITON_INTERPRET"), others, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_importing_the_package_sets_the_interpreter_and_imports_no_more_than_it_needs():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["1 []", "None []", "0 []"], done.stderr  # what the caller set stays
