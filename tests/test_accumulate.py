"""Accumulation: the gradient of the whole window, whatever the micro-batches; sent once; in the memory of one."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero import DDP, GPT, GPTConfig, RankFailed, Zero3
from minizero.accumulate import accumulate
from minizero.memory import Ledger, predict_sent
from tests.support.helpers import STAGES, batch, relative_error, run, same

IGNORED = -100


# Models, and their windows.


class OwnMean(nn.Module):
    """A loss that divides by its count: 0/0 without a target, in the gradient as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, x, y):
        there = y != IGNORED
        losses = -F.log_softmax(self.layers(x), -1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        return (losses * there).sum() / there.sum()


def numbers(counts, seed=0):
    """For each count a micro-batch of 6 samples, of which so many have a target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(counts), 6, 8, generator=generator)
    y = torch.randint(8, (len(counts), 6), generator=generator)
    for row, count in zip(y, counts):
        row[count:] = IGNORED
    return list(zip(x, y))


class ClassWeights(OwnMean):
    """Its mean is over the sum of the weights of the targets' classes."""

    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1, 0.0, 7.25, 1e-3])

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y, self.weights.to(x.dtype))


def weights_in(pair):
    """The sum of the weights: a float, a tensor, or one of NumPy's numbers."""
    targets = pair[1][pair[1] != IGNORED]
    kind = (float, torch.Tensor.double, lambda total: total.numpy()[()])[len(targets) % 3]
    return kind(ClassWeights.weights[targets].sum())


class Causal(OwnMean):
    """As Hugging Face's causal models: keyword arguments, labels that it shifts inside, an output with `.loss`."""

    def forward(self, inputs, labels):
        h = self.layers(inputs)
        return SimpleNamespace(loss=F.cross_entropy(h[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def shifted(micro_batch):
    return (micro_batch["labels"][:, 1:] != IGNORED).sum()


def rows(lengths, seed=0):
    """A window of dicts, each of two rows of 6 places, of which the first so many have a label."""
    generator = torch.Generator().manual_seed(seed)
    window = []
    for length in lengths:
        labels = torch.randint(8, (2, 6), generator=generator)
        labels[:, length:] = IGNORED
        window.append({"inputs": torch.randn(2, 6, 8, generator=generator), "labels": labels})
    return window


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def whole(window, make=OwnMean):
    """Loss and gradients of all micro-batches as one batch."""
    model = make()
    if isinstance(window[0], dict):
        loss = model(**{key: torch.cat([part[key] for part in window]) for key in window[0]}).loss
    else:
        loss = model(*map(torch.cat, zip(*window)))
    loss.backward()
    return loss.item(), gradients(model)


def assert_whole(loss, gradient, window, make):
    expected_loss, expected = whole(window, make)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradient, expected) < 1e-5


def test_ragged_micro_batches_are_the_full_batch_and_gradients_that_were_there_stay():
    window, model = numbers([6, 5, 0, 1, 3]), OwnMean()
    measured = accumulate(model, (pair for pair in window))  # a generator will do
    assert not measured.requires_grad
    once = gradients(model)
    assert_whole(measured.item(), once, window, OwnMean)
    accumulate(model, window)
    assert relative_error(gradients(model), {name: 2 * gradient for name, gradient in once.items()}) < 1e-5


# Of each kind: three windows of micro-batches, some without a target, in the third all.
KINDS = {
    "pairs": (OwnMean, numbers, [[4, 1, 0], [6], [0, 0]], {}),
    "class weights": (ClassWeights, numbers, [[4, 2, 0], [6], [0, 0]], {"count": weights_in}),
    "dicts": (Causal, rows, [[4, 2, 1], [6], [1, 0]], {"count": shifted}),  # a row's first label is not predicted
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_counts_other_numbers_of_micro_batches_and_none_with_a_target(kind):
    """The gradient of all as one batch, and in every stage the same bits."""
    make, draw, counts, options = KINDS[kind]
    mine = [draw(each, seed) for seed, each in enumerate(counts)]

    def work(comm, stage):
        model = stage(make(), comm)
        loss = accumulate(model, mine[comm.rank], **options).item()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return loss, model.gather_state_dict()

    start, results = make().state_dict(), [result for stage in STAGES for result in run(3, work, stage)]
    for loss, state in results:
        assert_whole(loss, {name: start[name] - state[name] for name in start}, [*mine[0], *mine[1], *mine[2]], make)
        assert same(state, results[0][1])


def test_without_a_function_all_labels_count_and_with_one_y_may_be_anything():
    window = rows([6, 2, 4])
    loss, expected = whole(window, Causal)
    model = Causal()
    assert abs(accumulate(model, window).item() - loss) > 1e-3 and relative_error(gradients(model), expected) > 1e-2

    model = Causal()
    model.forward = lambda x, y: Causal.forward(model, **y).loss
    pairs = [(part["inputs"], part) for part in window]
    assert accumulate(model, pairs, count=lambda pair: int(shifted(pair[1]))).item() == pytest.approx(loss, rel=1e-6)
    assert relative_error(gradients(model), expected) < 1e-5


def test_a_stand_in_without_a_finite_loss_is_refused():
    """Its labels are made up where they can be found; here they are not."""

    class Renamed(Causal):
        def forward(self, inputs, targets):
            return super().forward(inputs, targets)

    def work(comm):
        window = [{"inputs": part["inputs"], "targets": part["labels"]} for part in rows([comm.rank * 5])]
        accumulate(DDP(Renamed(), comm), window, count=lambda part: (part["targets"][:, 1:] != IGNORED).sum())

    with pytest.raises(RankFailed, match="loss is nan for what stands in.*give each rank a micro-batch that has"):
        run(2, work)


# On ranks.


def test_gradients_are_sent_once():
    """Counts and loss are scalars beside them. Stage 3 also gathers parameters for each micro-batch."""
    config = GPTConfig(vocabulary=64, sequence_length=16, width=64, layers=2, heads=2)
    total = sum(p.numel() for p in GPT(config).parameters())
    block = sum(p.numel() for p in GPT(config).blocks[0].parameters())
    root, scalars = total - 2 * block, 100

    def work(comm, stage, pieces):
        model = stage(GPT(config), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(comm.rank, size=8)
        for _ in range(2):
            sent = comm.bytes_sent
            accumulate(model, zip(x.chunk(pieces), y.chunk(pieces)))
            optimizer.step()
            optimizer.zero_grad()
        return comm.bytes_sent - sent

    for number, stage in enumerate(STAGES):
        formula = predict_sent(total, 2, number, n_root=root)
        once, four = (run(2, work, stage, pieces)[0] for pieces in (1, 4))
        gathers = 0 if stage is not Zero3 else 3 * (2 * (total - root) + root) * 4 / 2
        assert 0 < once - formula <= scalars, stage.__name__
        assert 0 < four - formula - gathers <= scalars, stage.__name__


def test_no_sync_around_a_window_holds_its_gradients_back():
    windows = [numbers([5, 2], seed) for seed in (6, 7)]
    first, second = (whole(window)[1] for window in windows)

    def work(comm):
        model = DDP(OwnMean(), comm)
        sent = comm.bytes_sent
        with model.no_sync():
            accumulate(model, windows[0])
        sent = comm.bytes_sent - sent
        accumulate(model, windows[1])
        return gradients(model.module), sent

    (gradient, sent), _ = run(2, work)
    assert relative_error(gradient, {name: first[name] + second[name] for name in first}) < 1e-5
    assert 0 < sent < 100  # counts and the loss


# 16 bits.


class Constant(nn.Module):
    """Its gradient is 1, whatever the data."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x, y):
        return self.weight.sum()


def test_many_small_gradients_add_up_in_fp32():
    """Each adds 1/many. A 16-bit sum stands still long before it is 1."""
    dtype, many = torch.bfloat16, 512
    window = [(None, torch.zeros(1, dtype=torch.long))] * many
    model = Constant(dtype)
    accumulate(model, window)
    assert model.weight.grad.dtype == dtype and model.weight.grad.tolist() == [1, 1, 1]
    accumulate(model, window[:2])
    assert model.weight.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("many", [7, 11])
def test_a_weight_is_not_rounded_to_16_bits(dtype, many):
    """So often the same micro-batch is that micro-batch. In 16 bits 1/11 is another number."""
    ((x, y),) = numbers([6])
    x = x.to(dtype).requires_grad_()  # what somebody else's module has made

    def gradient(window):
        model, x.grad = OwnMean().to(dtype), None
        accumulate(model, window)
        return {name: parameter.grad.double() for name, parameter in model.named_parameters()} | {"x": x.grad.double()}

    one, more = gradient([(x, y)]), gradient([(x, y)] * many)
    for name, expected in one.items():
        assert (more[name] - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    del one["x"], more["x"]
    norms = [torch.cat([part.flatten() for part in found.values()]).norm() for found in (one, more)]
    assert abs(norms[1] / norms[0] - 1) < torch.finfo(dtype).eps / 8


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_is_not_rounded_to_16_bits_on_ranks(stage):
    def work(comm, many):
        model = stage(OwnMean(), comm, dtype=torch.bfloat16)
        accumulate(model, numbers([6]) * many)
        return model.clip_grad_norm_(1e9).item()

    one, many = (run(2, work, many)[0] for many in (1, 11))
    assert abs(many / one - 1) < 1e-3


def test_a_window_that_breaks_off_leaves_what_was_there():
    class Breaks(Constant):
        def forward(self, x, y):
            if x == "break":
                raise KeyError("stop")
            return super().forward(x, y)

    y = torch.zeros(1, dtype=torch.long)
    model = Breaks(torch.bfloat16)
    with pytest.raises(KeyError):
        accumulate(model, [(1, y), ("break", y)])
    assert model.weight.grad is None
    accumulate(model, [(1, y), (2, y)])
    with pytest.raises(KeyError):
        accumulate(model, [(1, y), ("break", y)])
    assert model.weight.grad.tolist() == [1, 1, 1]
    accumulate(model, [(1, y)])  # and its hooks are gone
    assert model.weight.grad.tolist() == [2, 2, 2]


# Memory.


def test_activations_fall_by_the_number_of_micro_batches_and_by_recompute_times_that():
    config = GPTConfig(vocabulary=64, sequence_length=32, width=64, layers=4, heads=2)

    def activations(pieces, recompute):
        model = GPT(dataclasses.replace(config, recompute=recompute))
        x, y = batch(0, size=8, config=config)
        with Ledger(model) as ledger:
            accumulate(model, zip(x.chunk(pieces), y.chunk(pieces)))
        return ledger.peak["activations"]

    for recompute in ("none", "full"):
        once, two, four = (activations(pieces, recompute) for pieces in (1, 2, 4))
        assert once - two == 2 * (two - four)  # a straight line over the batch, to the byte
        fixed = 2 * two - once
        assert fixed <= 4 * 32 * 32 + 64  # the mask, that recompute holds, and scalars
    assert once < 0.5 * activations(1, "none")


def test_the_fp32_sums_are_gradients():
    model = nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
    model.forward = lambda x, y: F.linear(x, model.weight).sum()
    pair = torch.ones(5, 100, dtype=torch.bfloat16), torch.ones(5, dtype=torch.long)
    with Ledger(model) as ledger:
        accumulate(model, [pair, pair])
        assert ledger.current["gradients"] == 2 * 10_000
    # Each micro-batch's gradient, or in the end the rounded sum, beside the sum in FP32.
    assert ledger.peak["gradients"] == (2 + 4) * 10_000


# What is refused.


class Logits(OwnMean):
    def forward(self, x, y):
        return self.layers(x)


class Foreign(OwnMean):
    def no_sync(self):
        raise NotImplementedError


class NoLoss(Causal):
    def forward(self, **rest):
        return None


ROW, PAIRS = rows([4])[0], numbers([3])
REFUSED = [
    (OwnMean(), numbers([0, 0]), {}, ValueError, "no target in the window"),
    (OwnMean(), [], {}, ValueError, "no micro-batch: give"),
    (OwnMean(), PAIRS[0], {}, TypeError, r"pairs \(x, y\)"),  # a pair, not a list of pairs
    *[(OwnMean(), [wrong], {}, TypeError, r"pairs \(x, y\)") for wrong in ((1, 2), (1, torch.zeros(1), 3), 5)],
    (OwnMean(), None, {}, TypeError, "micro_batches must be a list, .* not NoneType"),
    (OwnMean(), 5, {}, TypeError, "micro_batches must be a list, .* not int"),
    (nn.MSELoss(), PAIRS, {}, TypeError, "an engine or a module with parameters, .* not MSELoss"),
    (F.mse_loss, PAIRS, {}, TypeError, "with parameters, .* not mse_loss"),
    (None, PAIRS, {}, TypeError, "with parameters, .* not None"),
    (Logits(), PAIRS, {}, ValueError, r"one number, the mean loss, not shape \(6, 8\)"),
    (Foreign(), PAIRS, {}, TypeError, "Foreign averages over ranks by itself"),
    (Causal(), [ROW], {"count": 3}, TypeError, "count must be a function of a micro-batch, not int"),
    (Causal(), [{"inputs": 1}], {}, TypeError, r"a tensor at 'labels' \(or else count=.*, not dict"),
    (Causal(), ROW, {}, TypeError, "not str: a single one goes into a list"),
    (Causal(), [ROW | {"num_items_in_batch": 4}], {}, ValueError, "num_items_in_batch .* leave it out"),
    (NoLoss(), [ROW], {}, ValueError, r"model\(\*\*micro_batch\).loss must be one number, .* not NoneType"),
    *[
        (Causal(), [ROW], {"count": lambda _, number=number: number}, ValueError, "a number of at least 0, not ")
        for number in (-1, -0.5, float("nan"), float("inf"), "3", None, torch.ones(2), 1j)
    ],
]


@pytest.mark.parametrize("wrap", [lambda model, comm: model, *STAGES])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_loss_without_a_gradient_is_refused(wrap, context):
    def validate(comm):
        model = wrap(OwnMean(), comm)
        with context(), pytest.raises(RuntimeError, match="accumulate: the loss has no gradient, as under no_grad"):
            accumulate(model, PAIRS)

    run(2, validate)


@pytest.mark.parametrize("model, window, options, error, words", REFUSED)
def test_what_is_refused(model, window, options, error, words):
    with pytest.raises(error, match=words):
        accumulate(model, window, **options)


def test_a_window_without_any_target_is_refused_on_every_rank():
    def work(comm, counts):
        with pytest.raises(ValueError) as caught:
            accumulate(DDP(OwnMean(), comm), numbers(counts[comm.rank]))
        return str(caught.value)

    assert all("no target in the window" in message for message in run(2, work, [[0], [0, 0]]))
    assert all("no micro-batch on rank 1; others have up to 3" in m for m in run(2, work, [[1, 2, 3], []]))
