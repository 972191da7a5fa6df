"""flash_attention as PyTorch sees it: an operator with gradients, seeds, packed sequences."""

import math

import pytest
import torch

import flash.attention
from flash import attention_reference, attention_tiled, flash_attention, flash_attention_varlen
from flash.checks import check
from flash.reference import attention_reference_varlen
from tests.support.flash_cases import cu, tensors

INF = math.inf


# An operator.

OPERATOR_CASES = {
    "plain": ([(2, 4, 20, 8)] * 3, {}),
    "grouped, dropout": ([(2, 4, 20, 8), (2, 2, 9, 8), (2, 2, 9, 8)], dict(seed=5, dropout_p=0.2, bottom_right=True)),
    "packed": ([(1, 4, 30, 8), (1, 2, 30, 8), (1, 2, 30, 8)], dict(starts=([0, 3, 3, 20], [0, 3, 13, 30]))),
    "empty": ([(0, 4, 20, 8)] * 3, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPERATOR_CASES)
def test_opcheck(case):
    """Of tensors that lie otherwise in memory, where there is an option."""
    shapes, rest = OPERATOR_CASES[case]
    q, k, v = tensors(*shapes)
    if rest:
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    starts = [torch.tensor(x, dtype=torch.int32) for x in rest.get("starts", ())] or [None, None]
    seed = torch.tensor(rest["seed"]) if "seed" in rest else None
    numbers = 0.3, 4, 0, rest.get("bottom_right", False), False, rest.get("dropout_p", 0.0), None, None, "tiled"
    torch.library.opcheck(flash.attention._attention, (q, k, v, seed, *starts, *numbers))
    out, lse = flash.attention._attention(q, k, v, seed, *starts, *numbers)
    arguments = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, seed, *starts, *numbers)
    torch.library.opcheck(flash.attention._attention_backward, arguments)


@pytest.mark.slow
def test_under_torch_compile():
    """In one graph, at other lengths and seeds too, with the eager call's numbers."""

    def loss(q, k, v, seed):
        options = {"causal": "bottom-right", "window": (9, None), "dropout_p": 0.3, "dropout_seed": seed}
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
        return out.square().sum() + lse.logsumexp(-1).sum()

    def packed_loss(q, k, v, starts):
        return flash_attention_varlen(q, k, v, starts, starts, causal=True).square().sum()

    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    compiled, packed = (torch.compile(f, fullgraph=True, backend=backend) for f in (loss, packed_loss))
    for n in (20, 33, 47):
        q, k, v = (x.requires_grad_() for x in tensors((2, 4, n, 8), (2, 2, n, 8), (2, 2, n, 8)))
        rows = [x.requires_grad_() for x in tensors((n, 4, 8), (n, 2, 8), (n, 2, 8))]
        for pair, inputs, last in (((compiled, loss), (q, k, v), n), ((packed, packed_loss), rows, cu(3, n))):
            ours, eager = (function(*inputs, last) for function in pair)
            torch.testing.assert_close(ours, eager)
            torch.testing.assert_close(*(torch.autograd.grad(result, inputs) for result in (ours, eager)))
    assert len(graphs) <= 4, "each once with fixed and once with dynamic shapes"
    drawn = torch.compile(lambda q: flash_attention(q, q, q, dropout_p=0.5), fullgraph=True, backend=backend)
    assert not torch.equal(drawn(q), drawn(q)), "every call draws a seed"


@pytest.mark.parametrize("attention", [attention_tiled, flash_attention])
def test_no_second_derivative_is_said_not_guessed(attention):
    """Also where q is in the second loss itself, so that a derivative without the rest would pass unseen."""
    (q,) = (x.requires_grad_() for x in tensors((1, 1, 4, 2)))
    (first,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    assert torch.equal(first, torch.autograd.grad(attention(q, q, q).sum(), q)[0])
    for loss in (first.sum(), (q * first).sum()):
        with pytest.raises(NotImplementedError, match="flash_attention, attention_tiled: no second derivative"):
            torch.autograd.grad(loss, q, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("attention", [attention_tiled, flash_attention])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda q: torch.func.vjp(f, q)])
def test_torch_func_is_refused_by_name_and_the_reference_has_it(attention, transform):
    q, k = tensors((1, 2, 5, 4), (1, 2, 7, 4))
    with pytest.raises(NotImplementedError, match=f"^{attention.__name__}: no transforms of torch.func .*: use"):
        transform(lambda q: attention(q, k, k).sum())(q)
    transform(lambda q: attention_reference(q, k, k).sum())(q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_goes_through_the_operators_and_not_through_tiles():
    """Forward, and backward for many gradients at once."""
    (q,), (k,) = tensors((3, 1, 2, 5, 4)), tensors((1, 2, 7, 4))
    one_by_one = torch.stack([flash_attention(x, k, k, causal=True) for x in q])
    torch.testing.assert_close(torch.vmap(lambda x: flash_attention(x, k, k, causal=True))(q), one_by_one)
    expected = torch.autograd.functional.jacobian(lambda x: attention_reference(x, k, k), q[0])
    at_once = torch.autograd.functional.jacobian(lambda x: flash_attention(x, k, k), q[0], vectorize=True)
    torch.testing.assert_close(at_once, expected)
    asks = k.clone().requires_grad_()
    with torch.no_grad():  # nothing is differentiated, whatever asks for a gradient
        torch.vmap(lambda x: flash_attention(x, asks, k))(q)
    for call in (
        lambda: torch.vmap(lambda x: attention_tiled(x, k, k))(q),
        lambda: torch.autograd.functional.jacobian(lambda x: attention_tiled(x, k, k), q[0], vectorize=True),
    ):
        with pytest.raises(NotImplementedError, match="^attention_tiled: no transforms of torch.func"):
            call()


@pytest.mark.slow  # PyTorch loads its forward-mode formulas
def test_no_forward_derivative_is_said_not_zero():
    (q,) = tensors((1, 1, 4, 2))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="^flash_attention: no forward-mode derivative"):
            flash_attention(q, q, dual)
        with pytest.raises(NotImplementedError, match="^flash_attention_varlen: no forward-mode derivative"):
            flash_attention_varlen(dual[0].mT, q[0].mT, q[0].mT, cu(2), cu(2))
        with pytest.raises(NotImplementedError, match="^attention_tiled: no forward-mode derivative"):
            attention_tiled(dual, q, q)
        derivative = torch.autograd.forward_ad.unpack_dual(attention_reference(dual, q, q)).tangent
    assert derivative.abs().sum() > 0


def test_autocast_leaves_the_computation_alone():
    """16-bit products inside would cost a gradient its digits."""
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8)))
    for attention in (flash_attention, attention_tiled):
        expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v)
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert out.dtype == torch.float32
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected))


@pytest.mark.parametrize("only", "qkv")
def test_gradients_of_one_input_and_of_the_lse_alone(only):
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 7, 4), (1, 2, 7, 4), dtype=torch.float64)
    wanted = dict(q=q, k=k, v=v)[only].requires_grad_()
    for attention in (flash_attention, attention_tiled):
        got = [f(q, k, v, causal=True, return_lse=True) for f in (attention, attention_reference)]
        for which in (0, 1)[: 1 + (only != "v")]:  # the lse does not depend on v
            torch.testing.assert_close(*(torch.autograd.grad(x[which].sum(), wanted, retain_graph=True) for x in got))


def test_inference_mode_and_no_grad():
    q, k, v = tensors(*[(1, 2, 6, 4)] * 3)
    expected = flash_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(flash_attention(q, k, v), expected)
    with torch.no_grad():
        assert not flash_attention(q.requires_grad_(), k, v).requires_grad


def test_memory_that_nobody_wrote_does_not_show():
    """New tensors are filled with NaN here, instead of with whatever was there."""
    q, k, v = (x.requires_grad_() for x in tensors((2, 4, 30, 8), (2, 2, 20, 8), (2, 2, 20, 8)))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.isnan(torch.empty(1)).all()
        for keywords in ({}, dict(causal="bottom-right"), dict(window=(3, 0), dropout_p=0.5)):
            out, lse = flash_attention(q, k, v, return_lse=True, **keywords)
            gradients = torch.autograd.grad((out, lse), (q, k, v), (out, lse.masked_fill(lse == -INF, 1)))
            assert torch.isfinite(out).all() and not torch.isnan(lse).any()
            assert all(torch.isfinite(gradient).all() for gradient in gradients)
    finally:
        torch.use_deterministic_algorithms(False)


# Dropout's seed.


def test_a_seed_is_drawn_from_torchs_generator():
    q, k, v = tensors(*[(1, 2, 50, 4)] * 3)
    for attention in (attention_reference, attention_tiled, flash_attention):
        torch.manual_seed(1)
        first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(attention(q, k, v, dropout_p=0.5), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    flash_attention(q, k, v), flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where nothing is needed"
    seeds = [check("test", q, k, v, dropout_p=0.5).seed.item() for _ in range(40)]
    assert len(set(seeds)) == 40 and min(seeds) >= 0 and max(seeds) > 2**61, "of 63 bits"


# What is empty.


@pytest.mark.parametrize("shape", [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0)])
@pytest.mark.parametrize("attention", [attention_reference, attention_tiled, flash_attention])
def test_empty_batches_heads_and_sequences(attention, shape):
    batch, heads, kv_heads, n_q, n_k = shape
    shapes = (heads, n_q), (kv_heads, n_k), (kv_heads, n_k)
    q, k, v = (torch.randn(batch, *shape, 8).requires_grad_() for shape in shapes)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and (out == 0).all() and (lse == -INF).all()
    gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert all((gradient == 0).all() for gradient in gradients)


# Packed sequences.


def test_packed_sequences_are_the_references_and_rows_of_nobody_are_nothing():
    """Four sequences, of which one has no query and one no key; and two rows more, of NaN."""
    q, k, v = tensors((19, 6, 8), (22, 3, 8), (22, 3, 8), dtype=torch.float64)
    q[17:], k[20:], v[20:] = math.nan, math.nan, math.nan
    packed, starts = [x.requires_grad_() for x in (q, k, v)], (cu(5, 5, 14, 17), cu(7, 11, 20, 20))
    keywords = dict(causal="bottom-right", window=(4, None), dropout_p=0.4, dropout_seed=3, return_lse=True)
    results = []
    for attention in (flash_attention_varlen, attention_reference_varlen):
        out, lse = attention(*packed, *starts, **keywords)
        gradients = torch.autograd.grad((out, lse), packed, (torch.ones_like(out), torch.ones_like(lse)))
        results.append((out, lse, *gradients))
        assert out.shape == (19, 6, 8) and lse.shape == (6, 19)
        assert (out[14:] == 0).all() and (lse[:, 14:] == -INF).all()
        assert not any(x[total:].any() for x, total in zip(gradients, (17, 20, 20)))
    torch.testing.assert_close(*results)


def test_no_sequence_at_all():
    q, k, v = (x.requires_grad_() for x in tensors(*[(3, 2, 4)] * 3))
    out, lse = flash_attention_varlen(q, k, v, cu(), cu(), return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
