"""The Triton kernels, under Triton's interpreter where there is no GPU: accuracy, edges, bits, bytes."""

import contextlib
import functools
import math
import random
from unittest import mock

import pytest
import torch
from flash_cases import LENGTHS, Case, cases, check_accuracy
from hypothesis import given, settings
from hypothesis import strategies as st

from flash import flash_attention, flash_attention_varlen, hbm_bytes
from flash.checks import check
from flash.options import all_visible, dropout_keep, keys_of_rows, make_options, rows_of_keys
from flash.traffic import Traffic

pytest.importorskip("triton", reason="Triton is not installed here")
import triton  # noqa: E402

from flash import kernels, launch  # noqa: E402

interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="looks into Triton's interpreter")
DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
INF, NAN = math.inf, math.nan
attention = functools.partial(flash_attention, backend="triton")
attention_varlen = functools.partial(flash_attention_varlen, backend="triton")


def tensors(*shapes, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def options_of(q, k, v, causal=False, window=None, p=0.0, seed=None, scale=None):
    return make_options(check("test", q, k, v, causal, scale, window, p, seed), q.shape[2], k.shape[2])


def blocks_of(rows, keys):
    """All kernels with these blocks; on a GPU the table's."""
    if not kernels.INTERPRETED:
        return contextlib.nullcontext()
    return mock.patch.object(launch, "choose", lambda *_: launch.Blocks(rows, keys, 4, 1))


# Accuracy.

shapes = st.sampled_from([(16, 16), (32, 64), (64, 32), (64, 64), (128, 128), (128, 64)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(lengths=(1, 2, 15, 16, 17, 64, 97, 130)), shapes)
def test_as_accurate_as_plain_attention(case, blocks):
    with blocks_of(*blocks):
        check_accuracy(case, attention, attention_varlen, DEVICE)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=500, deadline=None)
@given(cases(lengths=(*LENGTHS, 511)), shapes)
def test_as_accurate_as_plain_attention_for_long(case, blocks):
    with blocks_of(*blocks):
        check_accuracy(case, attention, attention_varlen, DEVICE)


@pytest.mark.parametrize("n", [1, 97, pytest.param(1025, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_length_and_dtype(n, dtype):
    options = (("causal", dtype != torch.float16), ("scale", None))
    case = Case(1, False, 1, ((n, n),), 1, 2, 40, dtype, "transposed", "normal", options)
    with blocks_of(128, 128):
        check_accuracy(case, attention, attention_varlen, DEVICE)


def test_results_have_the_strides_that_the_operator_promises():
    q, k, v = (x.transpose(1, 2) for x in tensors(*[(1, 5, 2, 8)] * 3, dtype=torch.bfloat16))
    options = options_of(q, k, v)
    out, lse = kernels.forward(q, k, v, options)
    gradients = kernels.backward(out, lse, q, k, v, out, lse, options)
    for result, like in zip((out, *gradients), (q, q, k, v)):
        assert result.stride() == torch.empty_like(like).stride() and result.dtype == like.dtype
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("p", [0.1, 0.75])
def test_the_dropout_mask_is_everybodys(p):
    """Equal weights, and values that are the identity: the output shows the mask."""
    q, k, v = torch.zeros(2, 2, 20, 16), torch.zeros(2, 2, 16, 16), torch.eye(16).expand(2, 2, 16, 16)
    with blocks_of(16, 16):
        q, k, v = (x.to(DEVICE) for x in (q, k, v))
        out = attention(q, k, v, dropout_p=p, dropout_seed=-(2**40) - 3)
    numbers = [torch.arange(n) for n in (2, 2, 20, 16)]
    keep = dropout_keep(torch.tensor(-(2**40) - 3), p, *numbers)
    assert 0 < keep.sum() < keep.numel()
    torch.testing.assert_close(out.cpu(), keep / 16 / (1 - p))


# Rows without keys, NaN, infinity.


def test_rows_that_see_nothing():
    """Bottom-right causal with more queries than keys, and a window that looks past the end."""
    q, k, v = (x.requires_grad_() for x in tensors((1, 1, 40, 16), (1, 1, 8, 16), (1, 1, 8, 16)))
    with blocks_of(16, 16):
        out, lse = attention(q, k, v, causal="bottom-right", return_lse=True)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert (out[:, :, :32] == 0).all() and (lse[:, :, :32] == -INF).all() and (gradients[0][:, :, :32] == 0).all()
    assert torch.isfinite(lse[:, :, 32:]).all() and all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("which", "qkv")
def test_nan_and_infinity_reach_the_rows_that_see_them_and_no_others(which, bad):
    """Key 20 is visible from row 20 on; rows of an earlier block never load it."""
    inputs = dict(zip("qkv", (x.abs() + 0.1 for x in tensors(*[(1, 1, 48, 16)] * 3))))
    inputs[which][0, 0, 20] = bad
    with blocks_of(16, 16):
        out, lse = attention(**inputs, causal=True, return_lse=True)
    rows = slice(20, 21) if which == "q" else slice(20, None)
    assert not torch.isfinite(out[0, 0, rows]).any()
    assert torch.isfinite(out[0, 0, :16]).all() and torch.isfinite(lse[0, 0, :16]).all()
    if which != "v":
        assert torch.isnan(out[0, 0, rows]).all() and torch.isnan(lse[0, 0, rows]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_of_minus_infinity_are_no_scores():
    q, k, v = tensors(*[(1, 1, 64, 16)] * 3)
    q, k, v = q.abs(), torch.full_like(k, -INF), v.requires_grad_()
    out, lse = attention(q, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()
    assert (torch.autograd.grad(out.sum(), v)[0] == 0).all()


# Memory that is not theirs.


def guarded(shape, dtype, value=None):
    """A tensor inside a band of NaN; its neighbours in memory; with numbers in it or NaN."""
    elements = math.prod(shape)
    memory = torch.full((elements + 512,), NAN, dtype=dtype, device=DEVICE)
    inside = memory[256 : 256 + elements].view(shape)
    if value is not None:
        inside.copy_(value)
    return inside, torch.cat([memory[:256], memory[256 + elements :]]), memory


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_bands_of_nan_around_every_buffer_stay_outside(head_dim, causal):
    """What is read beyond a tensor turns the answer into NaN, what is written there turns NaN into a number."""
    shapes = dict(q=(2, 2, 37, head_dim), k=(2, 1, 23, head_dim), v=(2, 1, 23, head_dim), do=(2, 2, 37, head_dim))
    values = dict(zip(shapes, tensors(*shapes.values())))
    options = options_of(values["q"], values["k"], values["v"], causal, p=0.2, seed=3)
    expected = kernels.forward(values["q"], values["k"], values["v"], options)
    dlse = tensors((2, 2, 37))[0]
    arguments = values["do"], dlse, values["q"], values["k"], values["v"], *expected
    expected += kernels.backward(*arguments, options)

    held = {name: guarded(shape, torch.float32, values[name]) for name, shape in shapes.items()}
    held["dlse"] = guarded(dlse.shape, torch.float32, dlse)
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        held[name] = guarded(shapes[like], torch.float32)
    held |= {name: guarded(dlse.shape, torch.float32) for name in ("lse", "delta")}
    q, k, v, do, dlse, out, dq, dk, dv, lse, delta = (x[0] for x in held.values())
    with blocks_of(16, 16):
        kernels.forward_launch(q, k, v, out, lse, options).run()
        for one in kernels.backward_launches(do, dlse, q, k, v, out, lse, delta, dq, dk, dv, options):
            one.run()
    for found, wanted in zip((out, lse, dq, dk, dv), expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for name, (inside, _, memory) in held.items():
        assert memory[:256].isnan().all() and memory[256 + inside.numel() :].isnan().all(), name


@pytest.mark.slow
def test_offsets_past_two_to_the_31():
    """Rows far apart: row 2 begins at element 2^31. The pages between are never touched."""
    far = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    x = far.as_strided((1, 1, 3, 16), (0, 0, 2**30, 1))
    near = tensors((1, 1, 3, 16), dtype=torch.float16)[0]
    x.copy_(near)
    options = options_of(x, x, x)
    out, lse = kernels.forward(x, x, x, options)
    torch.testing.assert_close(out, kernels.forward(near, near, near, options)[0])
    gradients = kernels.backward(x, lse, x, x, x, x, lse, options)
    for one, other in zip(gradients, kernels.backward(near, lse, near, near, near, near, lse, options)):
        torch.testing.assert_close(one, other)


# Bits and bytes.


@pytest.mark.slow
def test_fifty_backward_runs_give_the_same_bits():
    q, k, v, dout = tensors((1, 2, 40, 16), (1, 1, 50, 16), (1, 1, 50, 16), (1, 2, 40, 16), dtype=torch.float16)
    options = options_of(q, k, v, causal=True, p=0.1, seed=5)
    out, lse = kernels.forward(q, k, v, options)
    with blocks_of(32, 32):
        first = kernels.backward(dout, lse, q, k, v, out, lse, options)
        for _ in range(49):
            again = kernels.backward(dout, lse, q, k, v, out, lse, options)
            assert all(torch.equal(one, other) for one, other in zip(first, again))


@contextlib.contextmanager
def counted():
    """Bytes that kernels load and store under the interpreter, lanes that a mask turns off left out."""
    from triton.runtime.interpreter import InterpreterBuilder

    loads, stores = [], []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self, pointers, mask, *rest):
        loads.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        stores.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counting_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counting_store),
    ):
        yield loads, stores


def drawn(number):
    """Shapes and options of one case; the first has rows whose window begins exactly where the keys end."""
    if number == 0:
        return torch.float32, dict(n_q=60, n_k=27, head_dim=8, block_q=16, block_k=16, itemsize=4, window=(5, None))
    pick = random.Random(number)
    group, kv_heads = pick.choice([1, 1, 2]), pick.choice([1, 2])
    dtype = pick.choice([torch.float16, torch.float32])
    return dtype, dict(
        n_q=pick.randint(1, 150),
        head_dim=pick.choice([8, 16, 40]),
        block_q=pick.choice([16, 32, 64, 128]),
        block_k=pick.choice([16, 32, 64, 128]),
        n_k=pick.randint(1, 150),
        batch=pick.choice([1, 2]),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        itemsize=dtype.itemsize,
        causal=pick.choice([False, True, "bottom-right"]),
        window=pick.choice([None, None, (5, None), (None, 7), (40, 13), (0, 0)]),
    )


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_the_kernels_move_exactly_what_the_model_says(number):
    dtype, case = drawn(number)
    case = dict(batch=1, heads=1, kv_heads=1, causal=False) | case
    q, dout = tensors(*[(case["batch"], case["heads"], case["n_q"], case["head_dim"])] * 2, dtype=dtype)
    k, v = tensors(*[(case["batch"], case["kv_heads"], case["n_k"], case["head_dim"])] * 2, dtype=dtype)
    options = options_of(q, k, v, case["causal"], case["window"])
    with blocks_of(case["block_q"], case["block_k"]):
        with counted() as (loads, stores):
            out, lse = kernels.forward(q, k, v, options)
        assert Traffic(sum(loads), sum(stores)) == hbm_bytes(algorithm="kernels", **case)
        with counted() as (loads, stores):
            kernels.backward(dout, lse, q, k, v, out, lse, options)
        assert Traffic(sum(loads), sum(stores)) == hbm_bytes(algorithm="kernels", backward=True, **case)


@interpreted
@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize("window", [None, (40, 13), (70, None)])
def test_only_blocks_that_need_it_are_masked(causal, window):
    """Blocks of 16: those whose pairs are all visible go without a mask, in all three kernels."""
    n_q, n_k, block = 90, 110, 16
    q, k = tensors((1, 1, n_q, 16), (1, 1, n_k, 16))
    options = options_of(q, k, k, causal, window)

    def blocks(n):
        return [range(start, min(start + block, n)) for start in range(0, n, block)]

    need_rows, need_keys = 0, 0
    for rows in blocks(n_q):
        for keys in blocks(n_k):
            seen = all_visible(options, rows, keys, n_q, n_k)
            span, span_back = keys_of_rows(options, rows, n_q, n_k), rows_of_keys(options, keys, n_q, n_k)
            need_rows += keys.start < span.stop and keys.stop > span.start and not (seen and len(keys) == block)
            need_keys += rows.start < span_back.stop and rows.stop > span_back.start and not seen
    calls = []
    visible = kernels.visible
    with blocks_of(block, block), mock.patch.object(kernels, "visible", lambda *a: calls.append(1) or visible(*a)):
        out, lse = kernels.forward(q, k, k, options)
        assert len(calls) == need_rows
        kernels.backward(q, lse, q, k, k, out, lse, options)
    assert len(calls) - 2 * need_rows == need_keys


def test_too_little_shared_memory_is_an_error_that_says_so():
    class Kernel:
        def __getitem__(self, grid):
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    one = launch.Launch("forward", Kernel(), (torch.empty(1),), {}, 1)
    with (
        mock.patch.object(torch.cuda, "get_device_name", lambda _: "a small GPU"),
        pytest.raises(ValueError, match="shared memory of a small GPU: .*300,000, it has 232,448: use"),
    ):
        one.run()


def test_autotuning_takes_the_fastest_that_fits(monkeypatch):
    """Candidates by the stages they have: 1 takes long, 2 is best, 3 does not fit."""
    candidates = [launch.Blocks(16, 16, 4, stages) for stages in (1, 2, 3)]
    monkeypatch.setattr(launch, "CANDIDATES", candidates)
    monkeypatch.setattr(launch, "fastest", {})
    monkeypatch.setattr(triton.testing, "do_bench", lambda run: run())

    class Stub:
        def __init__(self, blocks):
            self.stages = blocks.stages

        def run(self):
            if self.stages == 3:
                raise ValueError("shared memory")
            return 1 / self.stages

    assert launch.tune("key", Stub) == candidates[1] == launch.fastest["key"]
    monkeypatch.setattr(launch, "CANDIDATES", [])
    assert launch.tune("key", Stub) == candidates[1], "remembered"
