"""The Triton kernels, under Triton's interpreter where there is no GPU: accuracy, edges, bits."""

import concurrent.futures
import functools
import importlib.util
import math
import types
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash import attention_reference, flash_attention, flash_attention_varlen
from flash.options import dropout_keep
from flash.reference import attention_reference_varlen
from tests.support.flash_cases import LENGTHS, Case, cases, check_accuracy, gamma, options_of
from tests.support.helpers import slow, soak

pytest.importorskip("triton", reason="Triton is not installed here")
import triton  # noqa: E402

from flash import kernels, launch  # noqa: E402
from tests.support.kernel_cases import DEVICE, blocks_of, tensors  # noqa: E402

INF, NAN = math.inf, math.nan
attention = functools.partial(flash_attention, backend="triton")
attention_varlen = functools.partial(flash_attention_varlen, backend="triton")


# Accuracy.


shapes = st.sampled_from([(16, 16), (32, 64), (64, 32), (64, 64), (128, 128), (128, 64)])


def check_case(case, *blocks):
    """The rule, with `over_columns`' sums: in float32 of 32 columns, and then of the parts."""
    terms = min(case.head_dim, 32 + -(-case.head_dim // 32)) if case.dtype == torch.float32 else case.head_dim
    with blocks_of(*blocks):
        check_accuracy(case, attention, attention_varlen, DEVICE, terms)


@pytest.mark.accuracy
@settings(max_examples=5, deadline=None, derandomize=True)
@given(cases(lengths=(1, 2, 15, 17, 40, 70)), shapes)
def test_as_accurate_as_plain_attention(case, blocks):
    check_case(case, *blocks)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=500, deadline=None)
@given(cases(lengths=(*LENGTHS, 511)), shapes)
def test_as_accurate_as_plain_attention_for_long(case, blocks):
    check_case(case, *blocks)


@pytest.mark.parametrize("n_k", [2, pytest.param(128, marks=pytest.mark.slow)])
def test_large_scores_of_a_single_row(n_k):
    """A weight is as far off as its score, and backward sums that once more, in an order of its own."""
    options = (("causal", False), ("scale", 0.3))
    check_case(Case(0, True, 1, ((1, n_k),), 3, 2, 256, torch.float32, "transposed", "1e4", options), 128, 64)


def test_a_long_head_dim_is_summed_in_parts():
    """1 and 255 numbers of which each is lost beside it: of one sum 255 u would be missing, of parts of 32 only 31 u.

    Whatever the order within a part and of the 8 parts, a score is off by gamma(32 + 8) of its size.
    """
    q, k = torch.full((1, 1, 16, 256), 2**-24 * 0.99), torch.ones(1, 1, 1, 256)
    q[..., 0] = 1
    _, lse = attention(
        q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), scale=1.0, return_lse=True
    )  # one key: lse is its score
    exact = q[0, 0, 0].double().sum()
    assert ((lse - exact).abs() <= gamma(32 + 8) * exact).all()


DTYPES = torch.float32, torch.float16, torch.bfloat16
ONE_KEY = [
    *(("tiled", d, torch.float32, n, n, dict(window=(0, 0))) for n in (20, 70) for d in (8, 256)),  # few: in float64
    *slow(*(("triton", d, torch.float32, 70, 70, dict(causal=True)) for d in (8, 256))),
    *slow(*(("triton", 40, dtype, 70, 70, dict(window=(0, 0))) for dtype in DTYPES)),
    *(
        pytest.param(backend, 40, torch.float32, *row, marks=pytest.mark.accuracy)
        for backend in ("triton", "tiled")
        for row in (
            (33, 1, dict()),
            (33, 1, dict(window=(3, 16))),
            (33, 17, dict(window=(15, None))),  # row 31 sees key 16, as all in its block of 16, but nothing else
            (33, 17, dict(causal="bottom-right")),  # row 16 sees key 0, those before it nothing
            (17, 33, dict(window=(0, 0), causal="bottom-right")),
            (40, 33, dict(window=(0, 5), dropout_p=0.1, dropout_seed=3)),  # row 32 sees key 32
        )
    ),
]


@pytest.mark.parametrize("backend, d, dtype, n_q, n_k, keywords", ONE_KEY)
def test_a_row_that_sees_one_key_gives_no_gradient_of_its_score(backend, d, dtype, n_q, n_k, keywords):
    """Its weight is 1 whatever the score, and wherever the key lies: what arrives at its out changes neither dQ nor dK
    by a rounding that large keys would make large; what arrives at its lse does.
    """
    q, k, v = (x.requires_grad_() for x in tensors((1, 1, n_q, d), (1, 1, n_k, d), (1, 1, n_k, d), dtype=dtype))
    band = {name: keywords[name] for name in ("causal", "window") if name in keywords}
    lonely = attention_reference(q.double() * 0, k.double(), v.double(), **band, return_lse=True)[1] == 0  # log 1
    dout, dlse = tensors((1, 1, n_q, d), (1, 1, n_q), seed=2)
    dout, dlse = dout.to(dtype) * lonely[..., None], dlse * lonely
    with blocks_of(16, 16):
        out, lse = flash_attention(q, k, v, **keywords, return_lse=True, backend=backend)
        *both, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
        alone = torch.autograd.grad(lse, (q, k), dlse)
    assert lonely.any() and dv.any() and all(x.any() for x in both)
    assert all(torch.equal(one, other) for one, other in zip(both, alone))


@pytest.mark.parametrize("n", [1, 97, *slow(300, mark=pytest.mark.slow), *soak(1025)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_length_and_dtype(n, dtype):
    options = (("causal", dtype != torch.float16), ("scale", None))
    case = Case(1, False, 1, ((n, n),), 1, 2, 40, dtype, "transposed", "normal", options)
    check_case(case, 128, 128)


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


def test_rows_that_see_nothing_in_their_first_block():
    """There the largest score so far, -3.4e38, is out of range once it is scaled by 1 log2 e."""
    q, k, v = tensors(*[(1, 1, 40, 16)] * 3)
    with blocks_of(16, 16):
        out = attention(q, k, v, window=(3, None), scale=1.0)
    torch.testing.assert_close(out, attention_reference(q, k, v, window=(3, None), scale=1.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(("which", "backend"), [*((x, "triton") for x in "qkv"), ("q", "tiled"), ("k", "tiled")])
def test_nan_and_infinity_reach_the_rows_that_see_them_and_no_others(which, bad, backend):
    """Key 140 is visible from row 140 on; rows of an earlier block, of 128 at most, never load it."""
    inputs = dict(zip("qkv", (x.abs() + 0.1 for x in tensors(*[(1, 1, 150, 16)] * 3))))
    inputs[which][0, 0, 140] = bad
    with blocks_of(128, 64):
        out, lse = flash_attention(**inputs, causal=True, return_lse=True, backend=backend)
    rows = slice(140, 141) if which == "q" else slice(140, None)
    assert not torch.isfinite(out[0, 0, rows]).any()
    assert torch.isfinite(out[0, 0, :128]).all() and torch.isfinite(lse[0, 0, :128]).all()
    assert which != "q" or torch.isfinite(out[0, 0, 141:]).all()
    if which != "v":
        assert torch.isnan(out[0, 0, rows]).all() and torch.isnan(lse[0, 0, rows]).all()


NOTHING_SEEN = [
    (40, 8, dict(causal="bottom-right")),
    (24, 20, dict(window=(3, 1))),  # the last row alone
    ((3, 20, 15), (20, 3, 0), dict(causal="bottom-right")),
    *slow(
        (40, 20, dict(window=(3, 1))),
        (40, 20, dict(window=(3, 1), window_diagonal="bottom-right", dropout_p=0.2, dropout_seed=1)),
        (40, 20, dict(causal=True, window=(None, 2), window_diagonal="bottom-right")),
        (8, 40, dict(causal=True, window=(2, None), window_diagonal="bottom-right")),  # where no row sees any
    ),
]


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize(("n_q", "n_k", "keywords"), NOTHING_SEEN)
def test_what_comes_in_for_rows_that_see_nothing_has_no_effect(n_q, n_k, keywords, backend):
    """As it does from a loss that has no derivative there, and leaves these rows out with `where`."""
    packed = isinstance(n_q, tuple)
    rows, keys = (sum(n_q) + 2, sum(n_k)) if packed else (n_q, n_k)  # two rows are in no sequence
    q, k, v, dout = tensors((1, 1, rows, 16), (1, 1, keys, 16), (1, 1, keys, 16), (1, 1, rows, 16))
    call = functools.partial(flash_attention, backend=backend)
    if packed:
        q, k, v, dout = (x[0].transpose(0, 1) for x in (q, k, v, dout))
        starts = [torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in (n_q, n_k)]
        call = lambda *inputs, **rest: flash_attention_varlen(*inputs, *starts, backend=backend, **rest)  # noqa: E731
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with blocks_of(16, 16):
        out, lse = call(q, k, v, return_lse=True, **keywords)
        nothing = lse == -INF
        where = nothing.mT[..., None] if packed else nothing[..., None]
        given = [(dout.masked_fill(where, x), (lse * 0 + 1).masked_fill(nothing, x)) for x in (0, NAN, INF)]
        found = [torch.autograd.grad((out, lse), (q, k, v), both, True) for both in given]
    assert nothing.any()
    for plain, *bad in zip(*found):
        assert torch.isfinite(plain).all() and all(torch.equal(plain, other) for other in bad)
    assert not any(x.masked_select(where).any() for x in (out, *(dq for dq, *_ in found)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("n, hidden", [(1, slice(1)), (63, slice(31, 32)), (63, slice(20)), (63, slice(63))])
@pytest.mark.parametrize("keywords", [{}, dict(causal=True), dict(window=(None, 3), dropout_p=0.1, dropout_seed=1)])
@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_a_key_of_minus_infinity_is_no_key(n, hidden, keywords, backend):
    """Also where rows end within a block: a row of zeros behind them would have 0 times infinity for a score.

    A row that sees no other key has out 0, lse -inf and gradients of 0, not 0 · -inf.
    """
    q, k, v, dout = tensors(*[(1, 1, n, 16)] * 4)
    q, k[:, :, hidden] = q.abs(), -INF
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    results = []
    for call in (functools.partial(flash_attention, backend=backend), attention_reference):
        out, lse = call(q, k, v, return_lse=True, **keywords)
        dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))
        results.append((out, lse, dk, dv))
        assert not any(x[:, :, hidden].any() for x in (dk, dv))
        assert not any(x[lse == -INF].any() for x in (out, dq)) and (n > 1 or lse == -INF)
    torch.testing.assert_close(*results)


@pytest.mark.accuracy
@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize("window", [(3, 1), (None, 20), (20, None), (None, None)])
def test_a_window_may_lie_bottom_right_whatever_causal_is(causal, window, backend):
    """Padded, fewer and more rows than keys, and both in one packed batch."""
    keywords = dict(causal=causal, window=window, window_diagonal="bottom-right", return_lse=True)
    starts = [torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in ((20, 37), (37, 20))]
    q, k, v = (x.requires_grad_() for x in tensors(*[(57, 1, 16)] * 3))
    with blocks_of(16, 32):
        packed = flash_attention_varlen(q, k, v, *starts, backend=backend, **keywords)
        grads = torch.autograd.grad(packed, (q, k, v), [torch.ones_like(x) for x in packed])
    expected = attention_reference_varlen(q, k, v, *starts, **keywords)
    exact = torch.autograd.grad(expected, (q, k, v), [torch.ones_like(x) for x in expected])
    torch.testing.assert_close((*packed, *grads), (*expected, *exact), atol=1e-4, rtol=1e-4)
    for number in (0, 1):
        rows, keys = (slice(*s[number : number + 2].tolist()) for s in starts)
        q_n, k_n, v_n = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        with blocks_of(16, 32):
            out, lse = flash_attention(q_n, k_n, v_n, backend=backend, **keywords)
        torch.testing.assert_close(out[0].transpose(0, 1), expected[0][rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[0], expected[1][:, rows], atol=1e-5, rtol=1e-5)


# Memory that is not theirs.


def guarded(shape, value=NAN):
    """A tensor inside a band of NaN, with these numbers in it; and all of its memory."""
    memory = torch.full((math.prod(shape) + 512,), NAN, device=DEVICE)
    inside = memory[256:-256].view(shape)
    return inside.copy_(torch.as_tensor(value)), memory


@pytest.mark.accuracy
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_bands_of_nan_around_every_buffer_stay_outside(causal):
    """What is read beyond a tensor turns the answer into NaN, what is written there turns NaN into a number."""
    shapes = dict(q=(1, 2, 37, 24), k=(1, 1, 23, 24), v=(1, 1, 23, 24), do=(1, 2, 37, 24))
    values = dict(zip(shapes, tensors(*shapes.values())))
    options = options_of(values["q"], values["k"], values["v"], causal=causal, dropout_p=0.2, dropout_seed=3)
    expected = kernels.forward(values["q"], values["k"], values["v"], options)
    dlse = tensors((1, 2, 37))[0]
    arguments = values["do"], dlse, values["q"], values["k"], values["v"], *expected
    expected += kernels.backward(*arguments, options)

    held = [guarded(x.shape, x) for x in (*values.values(), dlse)]
    held += [guarded(shapes[like]) for like in ("q", "q", "k", "v")] + [guarded(dlse.shape) for _ in range(2)]
    q, k, v, do, dlse, out, dq, dk, dv, lse, delta = (inside for inside, _ in held)
    with blocks_of(16, 16):
        kernels.forward_launch(q, k, v, out, lse, options).run()
        for one in kernels.backward_launches(do, dlse, q, k, v, out, lse, delta, dq, dk, dv, options):
            one.run()
    for found, wanted in zip((out, lse, dq, dk, dv), expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert all(memory[:256].isnan().all() and memory[-256:].isnan().all() for _, memory in held)


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
    torch.testing.assert_close(*(kernels.backward(y, lse, *[y] * 4, lse, options) for y in (x, near)))


# Bits, and launches.


def test_four_threads_at_once_give_the_same_bits():
    """Ranks may be threads. The interpreter keeps the number of the running program where all of them see it."""
    q, k, v = tensors(*[(1, 2, 40, 16)] * 3)
    expected = attention(q, k, v, causal=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = [pool.submit(attention, q, k, v, causal=True) for _ in range(4)]
        assert all(torch.equal(result.result(), expected) for result in results)


@pytest.mark.skipif(not kernels.INTERPRETED, reason="looks into Triton's interpreter")
@pytest.mark.parametrize(("version", "patched"), [("3.6.0", True), ("3.7.1", False), ("3.10.0", False)])
def test_the_interpreter_is_mended_where_it_is_old(version, patched, monkeypatch):
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", before)  # undone after the test
    monkeypatch.setattr(triton, "__version__", version)
    spec = importlib.util.find_spec("flash.launch")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # a second one, that nobody else sees
    assert (interpreter._patch_lang_tensor is not before) == patched


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
    candidates, seconds = [launch.Blocks(16, 16, 4, stages) for stages in (1, 2, 3)], {1: 2.0, 2: 1.0}
    monkeypatch.setattr(launch, "fastest", {})
    monkeypatch.setattr(triton.testing, "do_bench", lambda run: run())

    def run(blocks):
        if blocks.stages == 3:
            raise ValueError("shared memory")
        return seconds[blocks.stages]

    make = lambda blocks: types.SimpleNamespace(run=functools.partial(run, blocks))  # noqa: E731
    assert launch.tune("key", make, candidates) == candidates[1] == launch.fastest["key"]
    assert launch.tune("key", make, []) == candidates[1], "remembered"


def test_a_weight_of_1_is_1_in_backward_however_large_its_score():
    """One key: dV is the sum of dO. The difference of two large scores must not be taken in another base.

    Of whole numbers, so that products and sums are exact in any order.
    """
    q, k, v, dout = tensors((1, 2, 5, 16), (1, 2, 1, 16), (1, 2, 1, 16), (1, 2, 5, 16))
    q, k, v, dout = (100 * q).round().requires_grad_(), (100 * k).round(), v.requires_grad_(), (100 * dout).round()
    for scale in (0.3, 1.0, -2.0):
        dv = torch.autograd.grad(attention(q, k, v, scale=scale), v, dout)[0]
        assert torch.equal(dv, dout.sum(2, keepdim=True))
