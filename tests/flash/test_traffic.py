"""The model of bytes against bytes that are counted, and against the paper."""

import types

import pytest
import torch

from flash import choose_blocks, hbm_bytes, tiled
from flash.checks import check
from flash.traffic import GPUS, Traffic, count, sram_here, sram_needed, theorem_bytes
from tests.support.flash_cases import drawn


@pytest.mark.parametrize("number", range(16))
def test_the_tiles_move_exactly_what_the_model_says(number):
    dtypes = [torch.float16, torch.float32, torch.float64]
    dtype, case = drawn(number, 150, [16, 32, 50, 64, 300], dtypes, heads=(1, 2, 5))
    rows = (case["batch"], case["heads"], case["n_q"], case["head_dim"])
    keys = (case["batch"], case["kv_heads"], case["n_k"], case["head_dim"])
    q, dout, out = (torch.ones(rows, dtype=dtype) for _ in range(3))
    k, v, dk, dv = (torch.ones(keys, dtype=dtype) for _ in range(4))
    dq = torch.ones(rows, dtype=tiled.compute_dtype(q))
    lse, dlse, delta = (torch.ones(rows[:3], dtype=dq.dtype) for _ in range(3))
    options = check("test", q, k, v, causal=case["causal"], window=case["window"])
    rest = options.with_lengths(case["n_q"], case["n_k"]), (case["block_q"], case["block_k"])
    forward = count(tiled.forward_tiles, q, k, v, out, lse, *rest)
    assert forward == hbm_bytes(**case)
    first = count(tiled.delta_tiles, dout, out, dlse, delta, q, k, *rest)
    second = count(tiled.backward_tiles, dout, q, k, v, lse, delta, dq, dk, dv, *rest)
    assert tuple(map(sum, zip(first, second))) == hbm_bytes(backward=True, **case)


def test_plain_attention_moves_exactly_what_the_model_says():
    q, out, dout, dq = (torch.ones(6, 20, 8) for _ in range(4))
    k, v, dk, dv = (torch.ones(6, 12, 8) for _ in range(4))
    s, p, dp, ds = (torch.ones(6, 20, 12) for _ in range(4))

    def forward(q, k, v, s, p, out):
        torch.bmm(q, k.mT, out=s)
        torch.softmax(s, -1, out=p)
        torch.bmm(p, v, out=out)

    def backward(dout, q, k, v, p, dp, ds, dq, dk, dv):
        torch.bmm(p.mT, dout, out=dv)
        torch.bmm(dout, v.mT, out=dp)
        torch._softmax_backward_data(dp, p, -1, torch.float32, grad_input=ds)
        torch.bmm(ds, k, out=dq)
        torch.bmm(ds.mT, q, out=dk)

    case = dict(n_q=20, n_k=12, head_dim=8, algorithm="naive", batch=2, heads=3, itemsize=4)
    assert count(forward, q, k, v, s, p, out) == hbm_bytes(**case)
    assert count(backward, dout, q, k, v, p, dp, ds, dq, dk, dv) == hbm_bytes(backward=True, **case)


def test_by_hand():
    """Four rows of 2 elements of 4 bytes in two blocks: Q once, K and V twice; out and lse once."""
    case = dict(n_q=4, head_dim=2, itemsize=4, block_q=2, block_k=1)
    assert hbm_bytes(**case) == Traffic(32 + 2 * (32 + 32), 32 + 16)
    # Backward kernels: delta; per key block K, V, and Q, dO, lse, delta of all rows; per row block the reverse.
    loads = (2 * 32 + 16) + (2 * 32 + 4 * (2 * 32 + 2 * 16)) + (2 * 32 + 2 * 16 + 2 * (32 + 32))
    assert hbm_bytes(**case, algorithm="kernels", backward=True) == Traffic(loads, 16 + 3 * 32)
    # Three heads that share keys: a program per head loads those three times.
    grouped = hbm_bytes(heads=3, kv_heads=1, algorithm="kernels", **case)
    assert grouped.loads == 3 * hbm_bytes(**case).loads
    assert Traffic(160, 48).total == 208 and theorem_bytes(2**15, 64, 2**17) == 2**30 * 64**2 / 2**16 * 2
    # A tile of 2 rows, 3 keys, 5 elements of 2 bytes: Q and, in float32, O; K and V; S in float32.
    assert sram_needed(2, 3, 5, 2) == 2 * 5 * (2 + 4) + 2 * (3 * 5 * 2) + 2 * 3 * 4


def test_counting_sees_every_load_and_store_and_nothing_else():
    x, y = torch.ones(10), torch.ones(10)

    def work(x, y):
        tile = x[:5].clone() + 1  # 20 bytes from HBM; the sum happens in SRAM
        torch.empty_like(x)
        y[5:].copy_(tile)  # 20 bytes to HBM
        y[:5].add_(tile)  # 20 there and back
        torch.cat([x, tile])  # 40 from HBM
        return x.view(2, 5)

    assert count(work, x, y) == Traffic(20 + 20 + 40, 20 + 20)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_blocks_fit_and_no_others_that_fit_move_less(name, head_dim):
    def moved(blocks):
        shape = dict(algorithm="kernels", block_q=blocks[0], block_k=blocks[1])
        return sum(hbm_bytes(4096, head_dim, backward=backward, **shape).total for backward in (False, True))

    chosen = choose_blocks(head_dim, sram=name)
    assert sram_needed(*chosen, head_dim) <= GPUS[name].sram
    sizes = (16, 32, 64, 128, 256)
    for other in ((q, k) for q in sizes for k in sizes):
        assert sram_needed(*other, head_dim) > GPUS[name].sram or moved(other) >= moved(chosen)


def test_the_device_at_hand(monkeypatch):
    assert sram_needed(*choose_blocks(64), 64) <= sram_here()
    assert sram_here("cpu") >= 2**15
    for unknown in (0, -1):  # what systems say that do not know
        monkeypatch.setattr("os.sysconf", lambda _, unknown=unknown: unknown)
        assert sram_here("cpu") == 2**20
    gpu = types.SimpleNamespace(shared_memory_per_block=48 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert sram_here("cuda") == 48 * 1024
    gpu.shared_memory_per_block_optin = 227 * 1024  # what one program may ask for
    assert sram_here("cuda") == 227 * 1024


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: choose_blocks(256, sram=20_000), "16 rows and 16 keys of head dim 256 need .* there are 20,000"),
        (lambda: choose_blocks(64, sram="H1000"), "sram is 'H1000'; expected a number of bytes or one of V100"),
        (lambda: hbm_bytes(9, 9, algorithm="flash"), "algorithm is 'flash'; expected 'naive', 'tiled' or 'kernels'"),
        (lambda: hbm_bytes(9, 9, heads=3, kv_heads=2), "3 heads, 2 key/value heads; these must divide"),
        (lambda: hbm_bytes(9, 9, heads=2, kv_heads=0), "2 heads, 0 key/value heads; these must divide"),
        (lambda: hbm_bytes(9, 9, causal="top-left"), "hbm_bytes: causal is 'top-left'; expected False, True"),
        (lambda: hbm_bytes(9, 9, window=(-2, 0)), r"hbm_bytes: window is \(-2, 0\); each side"),
        (lambda: hbm_bytes(9, 9, block_k=0), "blocks of 128 rows and 0 keys; expected at least 1"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
