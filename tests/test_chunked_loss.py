"""The loss in chunks: the values and gradients of plain cross-entropy, in the bytes of a chunk's logits."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import GPT, cross_entropy_in_chunks
from minizero.memory import Ledger
from minizero.recompute import checkpoint
from tests.support.helpers import SMALL, STAGES, plain, relative_error, run, slow, train
from tests.support.recompute_ways import no_collector

TOKENS, WIDTH, WORDS = 13, 8, 37


def numbers(dtype=torch.float64, tokens=TOKENS, ignored=(1, 4, 12), scale=1.0):
    """hidden, weight, bias, targets; `ignored` tokens have none."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, WIDTH), (WORDS, WIDTH), (WORDS,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors = [numbers.mul(scale).to(dtype).requires_grad_() for numbers in drawn]
    targets = torch.randint(WORDS, (tokens,), generator=generator)
    targets[list(ignored)] = -100
    return *tensors, targets


def at_once(hidden, weight, targets, bias=None, **options):
    """Plain cross-entropy, as models write it: logits in FP32 or more."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def both(tensors, targets, loss_of, **options):
    """The loss and the gradients of hidden, weight and bias. What the loss is multiplied by must arrive in them."""
    hidden, weight, bias = tensors
    loss = loss_of(hidden, weight, targets, bias=bias, **options)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    return loss, torch.autograd.grad(3 * loss, wanted, retain_graph=True)


def difference(found, expected):
    """The largest ‖Δ‖/‖expected‖ of a loss and its gradients."""
    pairs = zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True)
    pairs = [(a.double(), b.double()) for a, b in pairs]
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk, mark", [*((n, -100) for n in (1, 4, 5, 12, 13, 100)), (4, -1), (4, 0), (4, 5)])
def test_value_and_gradients_are_those_of_plain_cross_entropy(chunk, mark, reduction):
    """Whatever marks a token without a target, be it a word."""
    *tensors, targets = numbers()
    targets[targets == -100] = mark
    options = {"reduction": reduction, "ignore_index": mark}
    expected = both(tensors, targets, at_once, **options)
    with torch.no_grad():
        tensors[0][targets == mark] = torch.nan  # which nobody looks at
    found = both(tensors, targets, cross_entropy_in_chunks, chunk=chunk, **options)
    assert difference(found, expected) < 1e-13
    assert found[0].dtype == torch.float64 and found[0].shape == ()


@pytest.mark.parametrize("trained", [t for t in itertools.product([False, True], repeat=3) if any(t)])
def test_what_is_frozen_gets_no_gradient_and_costs_none(trained):
    """A bias may be left out, and hidden vectors may have any number of dimensions."""
    hidden, weight, bias, targets = numbers(tokens=12, ignored=(3,))
    for with_bias in (True, False)[: 1 + any(trained[:2])]:
        given = (hidden.view(3, 4, WIDTH), weight, bias)
        tensors = [t.detach().requires_grad_(on) for t, on in zip(given, trained)]
        tensors[2] = tensors[2] if with_bias else None
        found = both(tensors, targets.view(3, 4), cross_entropy_in_chunks, chunk=5)
        assert difference(found, both(tensors, targets.view(3, 4), at_once)) < 1e-13
        made = found[0].grad_fn.next_functions[0][0].saved_tensors
        assert [t is not None for t in made] == [t is not None and t.requires_grad for t in tensors]


def test_large_logits_do_not_overflow():
    *tensors, targets = numbers(torch.float32, scale=30.0)
    expected = both(tensors, targets, at_once)
    assert (tensors[0] @ tensors[1].T).max() > 1000
    assert difference(both(tensors, targets, cross_entropy_in_chunks, chunk=4), expected) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_any_target_the_loss_and_its_gradients_are_zero(reduction):
    """As what `accumulate` adds for such a micro-batch. PyTorch's mean is 0/0."""
    *tensors, targets = numbers(ignored=range(TOKENS))
    loss, gradients = both(tensors, targets, cross_entropy_in_chunks, chunk=4, reduction=reduction)
    assert loss == 0 and all((gradient == 0).all() for gradient in gradients)
    assert at_once(*tensors[:2], targets, reduction=reduction).isnan() == (reduction == "mean")
    empty = cross_entropy_in_chunks(tensors[0][:0], tensors[1], targets[:0], chunk=4, reduction=reduction)
    assert empty == 0
    no_width = cross_entropy_in_chunks(tensors[0][:, :0], tensors[1][:, :0], targets.abs() % WORDS, chunk=4)
    assert no_width.item() == pytest.approx(math.log(WORDS))


# 16 bits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_error_is_that_of_plain_cross_entropy(dtype):
    *tensors, targets = numbers(dtype, tokens=300, ignored=range(0, 300, 7))
    exact = both([t.detach().double().requires_grad_() for t in tensors], targets, at_once)
    found = both(tensors, targets, cross_entropy_in_chunks, chunk=32)
    assert found[0].dtype == torch.float32 and {g.dtype for g in found[1]} == {dtype}
    assert difference(found, exact) < 1.5 * difference(both(tensors, targets, at_once), exact) < 0.02


def test_the_weights_gradient_adds_up_in_fp32():
    """1,024 chunks add the same small matrix. A sum in bfloat16 stands still at 256 of them."""
    many = 1024
    hidden = torch.ones(many, 1, dtype=torch.bfloat16)
    weight, bias = (torch.zeros(2, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in [(1,), ()])
    targets = torch.zeros(many, dtype=torch.long)
    cross_entropy_in_chunks(hidden, weight, targets, bias=bias, chunk=1, reduction="sum").backward()
    assert weight.grad.tolist() == [[-many / 2], [many / 2]] and bias.grad.tolist() == [-many / 2, many / 2]


def test_a_loss_scale_saves_what_fp16_would_lose():
    """Of 2**18 targets each adds 2**-18 to the mean: with an eighth of it FP16 ends. The scale takes 1/n back."""
    many, scale = 2**18, 2.0**16
    hidden = torch.full((many, 1), 2.0**-8, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(many, dtype=torch.long)
    loss = cross_entropy_in_chunks(hidden, weight, targets, chunk=many // 4)
    found = torch.autograd.grad(loss * scale, (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = torch.autograd.grad(at_once(*exact, targets) * scale, exact)
    assert all(relative_error({"g": a.double()}, {"g": b}) < 1e-3 for a, b in zip(found, expected))


def test_under_autocast_it_is_what_a_linear_layer_and_cross_entropy_are():
    *tensors, targets = numbers(torch.float32, tokens=100, ignored=(3,))
    with torch.autocast("cpu", torch.bfloat16):
        expected = both(tensors, targets, at_once)
        found = both(tensors, targets, cross_entropy_in_chunks, chunk=32)
        other = F.linear(*tensors[:2]).float().sum()
    assert torch.autograd.grad(other, tensors[1])[0].any(), "a layer with the same weight still learns"
    assert {g.dtype for g in found[1]} == {torch.float32} and found[0].dtype == torch.float32
    assert difference(found, expected) < 5e-3
    in_fp32 = both(tensors, targets, at_once)
    assert difference(found, in_fp32) > 1e-4  # the products were made in bfloat16
    halves = [t.detach().bfloat16().requires_grad_() for t in tensors]
    in_bf16 = both(halves, targets, cross_entropy_in_chunks, chunk=32)
    assert torch.equal(found[0], in_bf16[0])
    assert all(torch.equal(gradient.bfloat16(), other) for gradient, other in zip(found[1], in_bf16[1]))


# Graphs.


def test_without_a_graph_there_are_no_gradients():
    *tensors, targets = numbers()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Ledger() as ledger:
            loss = cross_entropy_in_chunks(*tensors[:2], targets, chunk=1)
        assert not loss.requires_grad and torch.allclose(loss, at_once(*tensors[:2], targets))
        assert ledger.peak["gradients"] == 0 and ledger.peak["total"] < tensors[1].nbytes


def test_a_graph_that_is_kept_serves_again():
    *tensors, targets = numbers()
    loss = cross_entropy_in_chunks(*tensors[:2], targets, chunk=4)
    first = torch.autograd.grad(loss, tensors[:2], retain_graph=True)
    loss.backward(retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(2 * loss, tensors[:2])
    assert all(torch.equal(2 * a, b) and torch.equal(a, c) for a, b, c in zip(first, second, kept))
    assert torch.equal(first[1], tensors[1].grad)


def test_a_second_derivative_is_refused_in_words():
    *tensors, targets = numbers()
    loss = cross_entropy_in_chunks(*tensors[:2], targets, chunk=4)
    with pytest.raises(RuntimeError, match="no second derivative.*F.cross_entropy"):
        torch.autograd.grad(loss, tensors[1], create_graph=True)


def test_a_checkpoint_around_it_changes_nothing():
    *tensors, targets = numbers()
    expected = both(tensors, targets, cross_entropy_in_chunks, chunk=4)
    again = both(tensors, targets, lambda *a, **k: checkpoint(cross_entropy_in_chunks, *a, **k), chunk=4)
    assert all(torch.equal(a, b) for a, b in zip([expected[0], *expected[1]], [again[0], *again[1]]))


def test_nothing_is_left_when_the_loss_is_gone():
    *tensors, targets = numbers()
    with no_collector(), Ledger() as ledger:
        loss = cross_entropy_in_chunks(*tensors[:2], targets, chunk=4)
        del loss
        assert ledger.current["total"] == 0


# Bytes.


def bytes_of(loss_of, tokens=512, width=16, words=4096, dtype=torch.float32, **options):
    """What one forward and backward holds beside hidden vectors and weight: a ledger."""
    hidden, weight = (nn.Parameter(torch.randn(n, width, dtype=dtype)) for n in (tokens, words))
    targets = torch.randint(words, (tokens,))
    with Ledger() as ledger:
        loss_of(hidden, weight, targets, **options).backward()
    return ledger


def test_the_logits_at_the_peak_are_those_of_a_chunk():
    tokens, width, words, four = 512, 16, 4096, 4
    all_logits = tokens * words * four
    assert bytes_of(at_once).peak["total"] > 2 * all_logits  # theirs, and their gradient
    made = (tokens + words) * width * four
    for chunk in (8, 32, 128):
        one = chunk * words * four
        ledger = bytes_of(cross_entropy_in_chunks, chunk=chunk)
        small = chunk * (2 * width * four + 64) + 1000  # vectors and columns of a chunk, and scalars
        assert one + made <= ledger.peak["total"] <= max(one, made) + made + small, chunk
        kept = max(sample["total"] for sample in ledger.curve if sample.phase == "backward")
        assert kept <= made + small  # from forward to backward: no logits at all
        assert ledger.peak["gradients"] >= words * width * four


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_there_is_no_other_matrix_of_the_weights_size(dtype):
    """But the gradient in FP32, and what is rounded of it at the end."""
    tokens, width, words, chunk = 32, 64, 4096, 4
    ledger = bytes_of(cross_entropy_in_chunks, tokens, width, words, dtype, chunk=chunk)
    made, small = tokens * width * 2 + words * width * 4, 8 * chunk * width * 4 + 1000
    in_backward = max(sample["total"] for sample in ledger.curve if sample.phase == "backward")
    assert ledger.peak["total"] <= made + max(chunk * words * 6, words * width * 2) + small
    assert in_backward <= made + words * width * 2 + small


# In a model, and on ranks.


class ChunkedGPT(GPT):
    """The GPT whose loss never sees all logits. Its last matrix is its first: the embedding."""

    def __init__(self, config, chunk=24):
        super().__init__(config)
        self.chunk, self.read = chunk, self.head
        self.head = nn.Identity()

    def forward(self, x, y=None):
        if y is None:
            return self.read(super().forward(x))
        hidden = super().forward(x)
        return cross_entropy_in_chunks(hidden, self.read.weight, y, chunk=self.chunk)


@pytest.mark.parametrize("dtype", [None, *slow(torch.bfloat16)])
def test_every_stage_trains_it_with_the_same_bits(dtype):
    """They are the plain model's, too. The weight is tied to the embedding, and belongs to the root unit, which stage 3
    gathers and frees.
    """
    make, steps = lambda: ChunkedGPT(SMALL), 2
    losses, state = plain(steps, eps=1e-4)
    state["read.weight"] = state.pop("head.weight")
    expected = losses, state
    results = [run(2, train, stage, steps, make, dtype=dtype, eps=1e-4) for stage in STAGES]
    for ranks in results:
        mean = [sum(losses) / 2 for losses in zip(*(losses for losses, _, _ in ranks))]
        assert mean == pytest.approx(expected[0], rel=1e-5 if dtype is None else 2e-2)
        assert relative_error(ranks[0][1], expected[1]) < (1e-4 if dtype is None else 5e-2)
        if dtype is None:
            assert all(torch.equal(ranks[0][1][name], results[0][0][1][name]) for name in expected[1])


# Misuse.


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(4, 7)}, ValueError, r"\(4, 7\), \(37, 8\), \(4,\)"),
        ({"weight": torch.zeros(8, 37)}, ValueError, r"weight \(vocabulary, width\)"),
        ({"weight": torch.zeros(8)}, ValueError, "weight"),
        ({"hidden": torch.tensor(0.0)}, ValueError, "hidden must be"),
        ({"targets": torch.zeros(5, dtype=torch.long)}, ValueError, r"targets \(…\)"),
        ({"targets": torch.zeros(1, dtype=torch.long)}, ValueError, "targets"),
        ({"bias": torch.zeros(1)}, ValueError, "bias"),
        ({"targets": torch.zeros(4)}, TypeError, "must be int64"),
        ({"targets": torch.full((4,), 37)}, RuntimeError, "out of bounds"),
        ({"targets": torch.full((4,), -1)}, RuntimeError, "out of bounds"),
        ({"weight": torch.zeros(37, 8, dtype=torch.bfloat16)}, RuntimeError, "same dtype"),
        ({"hidden": torch.zeros(4, 8).long(), "weight": torch.zeros(37, 8).long()}, TypeError, "not torch.int64"),
        ({"hidden": torch.zeros(4, 8).cfloat()}, TypeError, "not torch.complex64"),
        ({"weight": np.zeros((37, 8))}, TypeError, "floating-point tensors, and targets, not ndarray"),
        ({"targets": [0, 1, 2, 3]}, TypeError, "not list"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "at least one word"),
        *[({"ignore_index": mark}, TypeError, f"whole number, not {mark}") for mark in (2.5, None, True)],
        ({"chunk": 0}, ValueError, "chunk must be"),
        ({"chunk": 2.0}, ValueError, "chunk must be"),
        ({"chunk": None}, ValueError, "chunk must be"),
        ({"reduction": "none"}, ValueError, 'must be "mean" or "sum"'),
    ],
)
def test_misuse_is_refused(change, error, words):
    given = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(37, 8), "targets": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=words):
        cross_entropy_in_chunks(**{**given, "chunk": 2} | change)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_a_transform_is_refused_by_name(transform):
    def loss(hidden):
        return cross_entropy_in_chunks(hidden, torch.zeros(5, 8), torch.zeros(4, dtype=torch.long), chunk=2)

    with pytest.raises(RuntimeError, match="cross_entropy_in_chunks: torch.func's transforms"):
        transform(loss)(torch.zeros((3, 4, 8) if transform is torch.func.vmap else (4, 8)))
