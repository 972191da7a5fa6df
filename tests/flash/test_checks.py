"""What flash_attention refuses, and which backend it takes."""

import math
import sys
import types
import warnings

import pytest
import torch

import flash.attention
from flash import attention_reference, attention_tiled, flash_attention, flash_attention_varlen
from flash.reference import attention_reference_varlen
from tests.support.flash_cases import cu

Q = torch.zeros(2, 4, 5, 8)
P = torch.zeros(9, 4, 8)  # packed


# Which backend.


def test_backends_on_a_cpu(monkeypatch):
    called = []
    kernels = types.ModuleType("flash.kernels")
    kernels.INTERPRETED = True
    kernels.forward = lambda *args: called.append("kernels") or flash.tiled.forward(*args)
    kernels.backward = lambda *args: called.append("kernels backward") or flash.tiled.backward(*args)
    monkeypatch.setitem(sys.modules, "flash.kernels", kernels)
    monkeypatch.setattr(flash, "kernels", kernels, raising=False)
    monkeypatch.setattr(flash.attention, "_triton_is_installed", lambda: True)
    q = Q.clone().requires_grad_()
    flash_attention(q, q, q).sum().backward()
    flash_attention(q, q, q, backend="tiled").sum().backward()
    assert called == [], "auto on a CPU is tiled"
    flash_attention(q, q, q, backend="triton").sum().backward()
    assert called == ["kernels", "kernels backward"]
    flash_attention(q[:0], q[:0], q[:0], backend="triton")
    flash_attention(q, q[:, :, :0], q[:, :, :0], backend="triton")
    assert len(called) == 2, "nothing is launched for nothing"
    with pytest.raises(TypeError, match="'triton' takes float16, bfloat16, float32, not float64"):
        flash_attention(*[Q.double()] * 3, backend="triton")
    kernels.INTERPRETED = False
    with pytest.raises(ValueError, match="on cpu, .*TRITON_INTERPRET=1 before the first import"):
        flash_attention(Q, Q, Q, backend="triton")
    monkeypatch.setattr(flash.attention, "_triton_is_installed", lambda: False)
    with pytest.raises(ValueError, match="triton is not installed .* use backend='tiled'"):
        flash_attention(Q, Q, Q, backend="triton")


def test_float64_on_a_gpu_is_tiled(monkeypatch):
    monkeypatch.setattr(flash.attention, "_gpu_can", lambda _: True)
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float64, device="cuda")
    with flash.attention._backend("auto", on_gpu, on_gpu) as module:
        assert module is flash.tiled


def test_a_backend_is_told_the_longest_lengths_and_gets_contiguous_starts(monkeypatch):
    got, forward = [], flash.tiled.forward
    monkeypatch.setattr(flash.tiled, "forward", lambda *args: got.append(args[3]) or forward(*args))
    starts = torch.stack([cu(2, 7, 8), cu(0, 3, 9)], dim=1)
    flash_attention_varlen(P, P, P, *starts.unbind(1))
    assert (got[0].max_q, got[0].max_k) == (5, 6)
    assert got[0].cu_seqlens_q.is_contiguous() and got[0].cu_seqlens_k.is_contiguous()


def test_a_gpu_that_triton_cannot_use_is_said_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(flash.attention, "_triton_is_installed", lambda: True)
    flash.attention._gpu_can.cache_clear()
    with pytest.warns(UserWarning, match="Tesla T4 has compute capability 7.5, below 8.0: backend 'auto' uses 'tiled'"):
        assert not flash.attention._gpu_can(torch.device("cuda:0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flash.attention._gpu_can(torch.device("cuda:0"))
    flash.attention._gpu_can.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flash.attention._gpu_can(torch.device("cuda:0"))
    flash.attention._gpu_can.cache_clear()


# What is refused: the argument, its value, what was expected.

BAD = [
    ((Q[0], Q, Q), {}, ValueError, r"q has 3 dimensions, \(4, 5, 8\); expected \(batch, heads, sequence, head dim\)"),
    ((Q, Q, Q[None]), {}, ValueError, "v has 5 dimensions"),
    ((Q, Q[..., :6], Q), {}, ValueError, r"head dimension of k \(6\) differs from q \(8\); q, k must be \(batch"),
    ((Q, Q, Q[..., :6]), {}, ValueError, r"head dimension of v \(6\) differs from q \(8\)"),
    ((Q, Q[:, :3], Q[:, :3]), {}, ValueError, "q has 4 heads, k and v have 3; .* must divide"),
    ((Q, Q[:, :0], Q[:, :0]), {}, ValueError, "q has 4 heads, k and v have 0"),
    ((Q[:, :0], Q[:, :2], Q[:, :2]), {}, ValueError, "q has 0 heads, k and v have 2; .* must divide"),
    ((Q, Q[:, :2], Q), {}, ValueError, r"k is \(2, 2, 5, 8\), v is \(2, 4, 5, 8\)"),
    ((Q, Q[:, :, :3], Q), {}, ValueError, r"k is \(2, 4, 3, 8\), v is \(2, 4, 5, 8\)"),
    ((Q, Q[:1], Q[:1]), {}, ValueError, "batches differ: q 2, k 1, v 1"),
    ((Q, Q.half(), Q), {}, TypeError, "k is torch.float16, q is torch.float32; all three must have one dtype"),
    ((Q, Q, Q.to("meta")), {}, ValueError, "v is on meta, q is on cpu; all three must be on one device"),
    ((Q.int(), Q.int(), Q.int()), {}, TypeError, "q is torch.int32; expected float16, bfloat16, float32 or float64"),
    (([1.0], Q, Q), {}, TypeError, r"q must be a tensor \(batch, heads, sequence, head dim\), not list"),
    ((torch.zeros(1, 1, 2, 257),) * 3, {}, ValueError, "head dimension 257; expected 1 to 256"),
    ((torch.zeros(1, 1, 2, 0),) * 3, {}, ValueError, "head dimension 0; expected 1 to 256"),
    ((Q, Q, Q), dict(window=(-1, 2)), ValueError, r"window is \(-1, 2\); each side must be a whole number of at least"),
    ((Q, Q, Q), dict(window=(1.5, 2)), ValueError, r"window is \(1.5, 2\); each side must be a whole number"),
    ((Q, Q, Q), dict(window=7), ValueError, r"window is 7; expected \(left, right\) or None"),
    ((Q, Q, Q), dict(causal="top-left"), ValueError, "causal is 'top-left'; expected False, True .* or 'bottom-right'"),
    ((Q, Q, Q), dict(causal=torch.ones(5)), ValueError, r"causal is tensor\(.*; expected False, True"),
    ((Q, Q, Q), dict(window_diagonal="middle"), ValueError, "window_diagonal is 'middle'; expected 'top-left' or 'bot"),
    ((Q, Q, Q), dict(window_diagonal=True), ValueError, "window_diagonal is True; expected 'top-left' or"),
    ((Q, Q, Q), dict(casual=True), TypeError, "unknown keyword casual; expected causal, scale, window,"),
    ((Q, Q, Q), dict(dropout_p=1.0), ValueError, "dropout_p is 1.0; expected a number from 0 to below 1"),
    ((Q, Q, Q), dict(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
    ((Q, Q, Q), dict(dropout_p=math.nan), ValueError, "dropout_p is nan"),
    ((Q, Q, Q), dict(dropout_p=0.5, dropout_seed=1.5), ValueError, "dropout_seed is 1.5; expected a whole number"),
    ((Q, Q, Q), dict(dropout_p=0.5, dropout_seed=2**63), ValueError, "dropout_seed is 9223372036854775808; expected"),
    ((Q, Q, Q), dict(scale=math.inf), ValueError, "scale is inf; expected a finite number, or None"),
    ((Q, Q, Q), dict(scale=-(10**400)), ValueError, "scale is -1000"),
    ((Q, Q, Q), dict(dropout_p=10**400), ValueError, "dropout_p is 1000"),
    ((Q, Q, Q), dict(scale="1"), ValueError, "scale is '1'; expected a finite number"),
]


@pytest.mark.parametrize("attention", [attention_reference, attention_tiled, flash_attention])
@pytest.mark.parametrize(("arguments", "keywords", "kind", "words"), BAD, ids=[bad[3][:30] for bad in BAD])
def test_bad_input(attention, arguments, keywords, kind, words):
    with pytest.raises(kind, match=f"^{attention.__name__}: {words}"):
        attention(*arguments, **keywords)


BAD_PACKED = [
    ((P, P, P, cu(9).long(), cu(9)), TypeError, "cu_seqlens_q is torch.int64; expected int32"),
    ((P, P, P, cu(9), [0, 9]), TypeError, "cu_seqlens_k must be an int32 tensor, not list"),
    ((P, P, P, cu(9)[None], cu(9)), ValueError, r"cu_seqlens_q has shape \(1, 2\); expected \(sequences \+ 1,\)"),
    ((P, P, P, cu(9), cu(9)[:0]), ValueError, r"cu_seqlens_k has shape \(0,\)"),
    ((P, P, P, cu(9)[1:], cu(9)[1:]), ValueError, "cu_seqlens_q starts at 9; expected 0"),
    ((P, P, P, cu(5, 9), cu(5, 3)), ValueError, "cu_seqlens_k decreases from 5 to 3 at sequence 1"),
    ((P, P, P, cu(9), cu(10)), ValueError, "cu_seqlens_k ends at 10, but k has 9 rows"),
    ((P, P, P, cu(5, 9), cu(9)), ValueError, "cu_seqlens_q and cu_seqlens_k have 2 and 1 sequences"),
    ((P, P, P, cu(9).to("meta"), cu(9)), ValueError, "cu_seqlens_q is on meta, q is on cpu"),
    ((Q, Q, Q, cu(9), cu(9)), ValueError, r"q has 4 dimensions, .*; expected \(total, heads, head dim\)"),
    ((P, P[:, :3], P[:, :3], cu(9), cu(9)), ValueError, "q has 4 heads, k and v have 3"),
]


@pytest.mark.parametrize("attention", [attention_reference_varlen, flash_attention_varlen])
@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_PACKED, ids=[bad[2][:30] for bad in BAD_PACKED])
def test_bad_packed_input(attention, arguments, kind, words):
    with pytest.raises(kind, match=f"^{attention.__name__}: {words}"):
        attention(*arguments)
    with pytest.raises(ValueError, match=f"^{attention.__name__}: window_diagonal is 'left'"):
        attention(P, P, P, cu(9), cu(9), window=(1, 0), window_diagonal="left")


@pytest.mark.parametrize("backend", ["cuda", None, "Triton"])
def test_unknown_backend(backend):
    with pytest.raises(ValueError, match=f"backend is {backend!r}; expected 'auto', 'triton' or 'tiled'"):
        flash_attention(Q, Q, Q, backend=backend)
    with pytest.raises(ValueError, match=f"^flash_attention_varlen: backend is {backend!r}"):
        flash_attention_varlen(P, P, P, cu(9), cu(9), backend=backend)
