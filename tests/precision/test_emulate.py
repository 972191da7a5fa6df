"""Emulated 16 bits: every value on the format's grid, half the bytes, and the failures that FP16 is known for."""

import contextlib
import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minizero import DDP, GPT, GPTConfig
from minizero.memory import Ledger
from minizero.models import images
from minizero.models.networks import NETWORKS
from precision import accumulate
from precision.emulate import emulate
from precision.exact import exact, is_exact
from precision.formats import BF16, FORMATS, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from precision.histogram import exponent_histogram
from tests.support.helpers import run

FORMATS_OF_16_BITS = [FP16, BF16, FP8_E4M3, FP8_E5M2, FloatFormat(4, 11), FloatFormat(5, 10, saturate=True)]


def on_grid(fmt, tensor):
    with exact():
        same = fmt.quantize(tensor) == tensor
        return bool((same | tensor.isnan()).all())


class Watch(TorchDispatchMode):
    """Notes of each operator inside whether what it gave or wrote was on the grid, and when."""

    def __init__(self, fmt):
        super().__init__()
        self.fmt, self.seen = fmt, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_exact():  # the emulation's own
            return result
        written = [a for a, s in zip(args, func._schema.arguments) if s.alias_info and s.alias_info.is_write]
        born = [r.alias_info is None for r in func._schema.returns]
        results = result if isinstance(result, tuple | list) else [result]
        for tensor in [*written, *(r for r, new in zip(results, born * len(results)) if new)]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and "empty" not in func.name():
                phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
                self.seen.append((func.name(), phase, on_grid(self.fmt, tensor)))
        return result

    def wrong(self, phase):
        return {name for name, when, right in self.seen if when == phase and not right}

    def count(self, phase):
        return len({name for name, when, _ in self.seen if when == phase})


class Everything(nn.Module):
    """Operators of many kinds: convolution, norms, pooling, dropout, attention, embedding, in-place, concatenation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.embedding, self.layer_norm = nn.Embedding(7, 12), nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.linear = nn.Linear(12 + 4 * 9, 5)

    def forward(self, x, tokens):
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        x = F.avg_pool2d(F.max_pool2d(x, 2), 3, 1, 1)[..., :3, :3].flatten(1)
        t = self.layer_norm(self.embedding(tokens))
        t = t + F.scaled_dot_product_attention(*self.qkv(t).chunk(3, -1), is_causal=True)
        t = F.dropout(F.gelu(t), 0.2, self.training).mean(1) * 0.3
        return self.linear(torch.cat([x, t.clamp_(-5, 5)], 1)).tanh()


def everything():
    torch.manual_seed(2)
    inputs = torch.randn(6, 1, 7, 7), torch.randint(7, (6, 5))
    return Everything(), inputs, torch.randint(5, (6,))


@pytest.mark.parametrize("fmt", FORMATS_OF_16_BITS, ids=lambda fmt: f"{fmt.exponent_bits}-{fmt.mantissa_bits}")
def test_every_operator_gives_values_of_the_format_forward_and_backward(fmt):
    model, inputs, labels = everything()
    with emulate(fmt), Watch(fmt) as watch:
        F.cross_entropy(model(*inputs), labels).backward()
    assert watch.count("forward") > 15 and watch.count("backward") > 15
    assert not watch.wrong("forward") and not watch.wrong("backward")
    gradients = [p.grad for p in model.parameters()]
    assert all(on_grid(fmt, gradient) for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) >= 8


def test_without_the_block_the_same_watch_finds_other_values():
    model, inputs, labels = everything()
    with Watch(FP16) as watch:
        F.cross_entropy(model(*inputs), labels).backward()
    assert len(watch.wrong("forward")) > 10 and len(watch.wrong("backward")) > 10


def test_one_operator_rounds_what_it_reads_and_what_it_gives():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 40, 40, generator=generator)
    qx, qw = FP16.quantize(x), FP16.quantize(w)
    with emulate(FP16):
        results = x * w, x @ w, x.exp(), x.sum(), torch.cat([x, w]), torch.where(x > 0, x, 0.1), x.add(w, alpha=0.1)
    expected = qx * qw, qx @ qw, qx.exp(), qx.sum(), torch.cat([qx, qw]), torch.where(qx > 0, qx, 0.1), qx + 0.1 * qw
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, FP16.quantize(other))
    assert not on_grid(FP16, x), "the input itself is left alone"


TORCHS = pytest.mark.parametrize(("fmt", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])


@TORCHS
def test_as_pytorchs_own_16_bit_kernels(fmt, dtype):
    """Which compute in FP32 and round once, too: forward and the gradients. IEEE 754 defines every bit of these."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator)

    def chain(x):
        y = (x * 1.7 - x.square()).relu() * x.abs().sqrt()
        return (y - 0.3 * x) / (1 + y.square())

    emulated, own = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    with emulate(fmt):
        out = chain(emulated)
        out.backward(torch.ones_like(out))
    chain(own).backward(torch.ones_like(own))
    assert torch.equal(out, chain(own).float())
    assert torch.equal(emulated.grad, own.grad.float())


@TORCHS
@pytest.mark.parametrize("function", [torch.tanh, torch.exp, F.gelu])
def test_functions_as_pytorchs_own_16_bit_kernels(function, fmt, dtype):
    """No two libraries agree on every bit of exp. Half an ulp of the format is lost by rounding once; before, in FP32,
    at most 16 u of the function and of x, u = 2^-24, for the few operations that a function takes.
    """
    x = fmt.quantize(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    wanted = function(x.double())
    with emulate(fmt):
        emulated = function(x)
    for found in (emulated, function(x.to(dtype))):
        bound = fmt.epsilon / 2 * wanted.abs() + 16 * 2**-24 * (wanted.abs() + x.abs())
        assert ((found - wanted).abs() <= bound).all()
    assert on_grid(fmt, emulated)


def test_a_network_as_in_pytorchs_float16():
    """Bit for bit, of whole numbers: every sum is exact in any order, also where a kernel adds some of it in FP16.

    Which it does for the samples of a batch, in the gradients of a convolution, on processors without float16.
    """
    generator = torch.Generator().manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AvgPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 5 * 5, 10))
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()
    x = torch.randint(-1, 2, (8, 1, 12, 12), generator=generator).float()
    results = []
    for one, dtype, context in (
        (copy.deepcopy(model), torch.float32, emulate(FP16)),
        (copy.deepcopy(model).half(), torch.float16, contextlib.nullcontext()),
        (copy.deepcopy(model).double(), torch.float64, contextlib.nullcontext()),
    ):
        with context:
            out = one(x.to(dtype))
            out.backward(torch.ones_like(out))
        results.append([out, *(p.grad for p in one.parameters())])
    for emulated, own, wanted in zip(*results, strict=True):
        assert wanted.any() and torch.equal(own.double(), wanted), "FP16 holds every number of this"
        assert torch.equal(emulated.double(), wanted)


def test_what_rounds_quickly_gives_the_numbers_of_quantize():
    """float16 and bfloat16 go through PyTorch's conversion: at each number of the format, each midpoint and beside."""
    for fmt, bits in ((FP16, torch.arange(2**16)), (BF16, torch.arange(2**16))):
        numbers = fmt.decode(bits.to(torch.int32))
        numbers = numbers[numbers.isfinite()].double().sort().values
        halfway = (numbers[1:] + numbers[:-1]) / 2
        x = torch.cat([numbers, halfway]).float()
        extremes = torch.tensor([65504.0, 65519.996, 65520.0, 3.4e38, 2**-25, 2**-24, 0.0, -0.0]).float()
        x = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(-torch.tensor(torch.inf)), extremes])
        x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
        with emulate(fmt):
            rounded = x.clone()
        assert len(x) > 3 * 2**16
        assert rounded[-1].isnan() and torch.equal(
            rounded[:-1].view(torch.int32), fmt.quantize(x)[:-1].view(torch.int32)
        )


def test_float64_becomes_fp32():
    with emulate(FP32):
        product = torch.tensor(0.1, dtype=torch.float64) * 3
    assert product == torch.tensor(0.1).double().mul(3).float() and product.dtype == torch.float64


def test_float64_is_rounded_once():
    x = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)  # by way of float32 it would be a tie, and go to 1
    with emulate(FP16):
        y = x.clone()
    assert y.dtype == torch.float64 and y.item() == 1 + 2**-10


def test_fp16_fails_as_it_should():
    one, large, small = torch.tensor([1.0]), torch.tensor([2048.0]), torch.tensor([2.0**-13])
    assert large + one == 2049 and small * small == 2**-26
    with emulate(FP16):
        assert large + one == 2048
        assert small * small == 0
        assert (large * large).isinf()
        assert (large * large - large * large).isnan()
    with emulate(BF16):
        assert large * large == 2**22 and small * small == 2**-26
        assert torch.tensor([256.0]) + one == 256
    with emulate(FloatFormat(5, 10, saturate=True)):
        assert large * large == 65504


def test_parameters_are_masters_when_the_step_is_outside():
    for inside in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(20, 20)
        before = layer.weight.detach().clone()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        with emulate(FP16):
            layer(torch.ones(4, 20)).square().mean().backward()
            assert torch.equal(layer.weight, before), "using a parameter does not change it"
            if inside:
                optimizer.step()
        if not inside:
            optimizer.step()
        assert on_grid(FP16, layer.weight) == inside
        if not inside:
            assert not torch.equal(layer.weight, before), "a master keeps the small update"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_inside_leaves_values_of_the_format(optimizer, foreach):
    torch.manual_seed(0)
    layer = nn.Linear(9, 9)
    optimizer = optimizer(layer.parameters(), lr=0.01, foreach=foreach)
    before = layer.weight.detach().clone()
    with emulate(FP16), Watch(FP16) as watch:
        for _ in range(3):
            layer(torch.ones(4, 9)).square().mean().backward()
            optimizer.step()
    assert not watch.wrong("forward") and on_grid(FP16, layer.weight)
    assert (layer.weight - before).abs().max() > 0.001


def test_views_integers_and_out():
    x = torch.full((4, 4), 0.1)
    with emulate(FP16):
        y = x * 1
        row, flat = y[1], y.view(16)
        y.add_(0.01)
        assert row.untyped_storage() is y.untyped_storage() is flat.untyped_storage()
        counted = torch.arange(3000) + torch.ones(3000, dtype=torch.long)
        out = torch.empty(4, 4)
        torch.mul(x, x, out=out)
        values, indices = x.max(1)
        same = x.view(-1)
    assert on_grid(FP16, y) and torch.equal(row, y[1])
    assert counted[-1] == 3000 and indices.dtype == torch.long
    assert on_grid(FP16, out) and out[0, 0] != 0
    assert on_grid(FP16, values)
    assert same.untyped_storage() is x.untyped_storage() and x[0, 0] == torch.tensor(0.1)


def test_outputs_that_share_a_storage_are_all_rounded():
    """unbind of a product, and what LAPACK returns in one piece."""
    torch.manual_seed(0)
    with emulate(FP16):
        a, b = (torch.randn(2, 5) * 0.3).unbind()
        q, r = torch.linalg.qr(torch.randn(5, 5))
    assert all(on_grid(FP16, tensor) for tensor in (a, b, q, r))


def test_inference_mode_computes_the_same():
    """There a whole loss may come as one operator, which is taken apart."""
    model, inputs, labels = everything()
    model.eval()
    p, q = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)).softmax(1)
    results = []
    with emulate(FP16):
        for context in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()):
            with context:
                logits = model(*inputs)
                results.append((logits, F.cross_entropy(logits, labels), F.kl_div(q, p, reduction="none")))
    for one, other, with_graph in zip(*results):
        assert torch.equal(one, other) and torch.equal(one, with_graph.detach())


def test_a_storage_that_is_taken_over_is_the_same_with_the_same_values():
    outside = torch.tensor([1.1])
    with emulate(FP16):
        taken = torch.empty(0).set_(outside)
    assert taken.data_ptr() == outside.data_ptr() and outside == torch.tensor([1.1])


def test_running_statistics_stay_fp32():
    norm = nn.BatchNorm1d(3)
    torch.manual_seed(0)
    x = FP16.quantize(torch.randn(50, 3))
    with emulate(FP16):
        norm(x)
    assert torch.allclose(norm.running_mean, 0.1 * x.mean(0), rtol=1e-6)
    assert not on_grid(FP16, norm.running_mean)
    mean, variance = torch.zeros(3), torch.ones(3)
    with emulate(FP16):  # the form of the operator that says it writes to them
        torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert torch.equal(mean, norm.running_mean) and torch.equal(variance, norm.running_var)


# Bytes.


def kept_bytes(forward, context):
    """Bytes that live after a forward because its graph keeps them; what it returns is not counted."""
    with context, Ledger() as ledger:
        out = forward()
        return ledger.current["total"] - out.untyped_storage().nbytes()


def test_python_finds_what_the_ledger_counts():
    x = torch.randn(4000, requires_grad=True)

    def half_tensors():
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.float16]
        return {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}

    gc.collect()
    before = half_tensors()
    with emulate(FP16):
        out = x.exp().sigmoid().tanh().sum()
    kept = half_tensors()
    assert sum(kept[key] for key in kept.keys() - before.keys()) == 3 * 2 * 4000
    del out
    assert half_tensors().keys() <= before.keys()


@pytest.mark.parametrize(
    ("fmt", "share"),
    [(FP16, 1 / 2), (BF16, 1 / 2), (FloatFormat(4, 11), 1 / 2), (FP8_E4M3, 1 / 4), (FP32, 1), (TF32, 1)],
)
def test_what_autograd_saves_takes_the_formats_bytes(fmt, share):
    x = torch.randn(4000, requires_grad=True)

    def forward():
        return x.exp().sigmoid().tanh().sum()

    assert kept_bytes(forward, contextlib.nullcontext()) == 3 * 4 * 4000
    assert kept_bytes(forward, emulate(fmt)) == 3 * 4 * 4000 * share


def test_what_several_operators_save_is_stored_once():
    """As PyTorch does: a tensor, its transpose, its slices are one storage; an input is saved as it comes."""
    x = torch.randn(3000)
    w = torch.randn(3000, requires_grad=True)

    def forward():
        a = (x * w).exp()  # saved by exp
        matrix = a.view(30, 100)
        product = matrix @ matrix.t()  # saves both
        return product.sum() + a.square().sum() + a[:50].square().sum()

    assert kept_bytes(forward, contextlib.nullcontext()) == 4 * 3000
    assert kept_bytes(forward, emulate(FP16)) == 2 * 3000 + 2 * 3000  # x as well, which was in FP32 before


def test_a_slice_of_a_large_input_is_saved_alone():
    dataset, w = torch.randn(1000, 100), torch.randn(100, requires_grad=True)
    assert kept_bytes(lambda: (dataset[:3] * w).sum(), emulate(FP16)) == 2 * 300


def test_parameters_are_kept_without_a_copy():
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    frozen = nn.Linear(200, 200, bias=False).requires_grad_(False)
    x = torch.randn(2, 200)
    assert kept_bytes(lambda: frozen(model(x)).sum(), emulate(FP16)) == 2 * 2 * 2 * 200  # the inputs of two layers


def test_what_was_saved_is_freed_with_the_graph():
    x = torch.randn(1000, requires_grad=True)
    with Ledger() as ledger, emulate(FP16):
        out = x.exp().sin().sum()
        held = ledger.current["total"]
        out.backward()
        del out
        gc.collect()
        assert held == 2 * 1000 + 4 and ledger.current["total"] == 4 * 1000  # the gradient


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("ledger_first", [True, False])
def test_the_ledger_sees_half_the_activations(name, ledger_first):
    x, y = images.load("train")[0][:8], images.load("train")[1][:8]
    measured = []
    for fmt in (FP32, FP16):
        torch.manual_seed(0)
        model, contexts = NETWORKS[name](), [emulate(fmt)]
        ledger = Ledger(model)
        contexts.insert(0 if ledger_first else 1, ledger)
        with contexts[0], contexts[1]:
            F.cross_entropy(model(x), y).backward()
        measured.append(ledger.peak)
    plain, half = measured
    assert 0.5 <= half["activations"] / plain["activations"] < 0.53
    assert half["parameters"] == plain["parameters"] and half["gradients"] == plain["gradients"]


# Blocks: nested, left by an error, in several threads.


def third():
    """1/3, computed: 0.33325195 in FP16, 0.333984375 in BF16, 0.34375 in E4M3."""
    return (torch.ones(1) / 3).item()


def test_the_innermost_block_counts():
    plain = third()
    with emulate(FP16):
        assert third() == 0.333251953125
        with emulate(FP8_E4M3):
            assert third() == 0.34375
        with emulate(FP32):
            assert third() == plain
            with emulate(BF16):
                assert third() == 0.333984375
            assert third() == plain
        assert third() == 0.333251953125
    assert third() == plain
    with emulate(FP8_E4M3), emulate(FloatFormat(4, 11)):  # whose 12 bits the block around it must not cut to 4
        assert third() == 0.3333740234375


@pytest.mark.parametrize("fmt", FORMATS_OF_16_BITS[:4], ids=lambda fmt: f"{fmt.exponent_bits}-{fmt.mantissa_bits}")
def test_conversions_and_histograms_are_exact_inside_of_a_block(fmt):
    torch.manual_seed(0)
    x = torch.randn(2000) * torch.randn(2000).mul(8).exp2()
    outside = fmt.quantize(x), fmt.encode(x).to(torch.int32), fmt.decode(fmt.encode(x)), exponent_histogram(x)
    with emulate(FP16):
        inside = fmt.quantize(x), fmt.encode(x).to(torch.int32), fmt.decode(fmt.encode(x)), exponent_histogram(x)
    for one, other in zip(inside[:3], outside[:3]):
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    assert inside[3] == outside[3]


def test_what_an_inner_block_writes_is_rounded_again():
    with emulate(FP16):
        for n, rounded_times_5 in ((3, 1.666015625), (7, 0.7138671875)):  # else 1.6669921875, 0.71435546875
            layer = nn.Linear(1, 1, bias=False)
            with torch.no_grad(), emulate(FP32):
                layer.weight.fill_(1 / n)
            assert layer.weight.item() == torch.tensor(1 / n).item()
            assert (layer.weight * 5).item() == rounded_times_5


def test_saved_tensors_follow_the_innermost_block():
    x = torch.full((1,), 1 / 3, requires_grad=True)
    with emulate(FP32):
        with emulate(FP8_E4M3):
            y = x * x
        y.backward()
    assert x.grad.item() == 2 * 0.34375  # saved in 8 bits; backward then was in FP32


def test_an_error_leaves_everything_as_it_was():
    with pytest.raises(ZeroDivisionError):
        with emulate(FP16):
            with emulate(BF16):
                1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with emulate(FP16):
            try:
                torch.ones(2, 3) @ torch.ones(2, 3)
            finally:
                assert third() == 0.333251953125
    assert third() == torch.tensor(1 / 3).item()
    x = torch.full((5,), 0.3, requires_grad=True)
    assert kept_bytes(lambda: x.exp().sum(), contextlib.nullcontext()) == 20


def test_each_thread_has_its_own():
    barrier, results = threading.Barrier(3, timeout=60), {}

    def work(fmt):
        with emulate(fmt) if fmt else contextlib.nullcontext():
            barrier.wait()
            x = torch.full((1,), 1 / 3, requires_grad=True)
            for _ in range(50):
                x.grad = None
                (x * x).backward()
            results[fmt] = third(), x.grad.item()
            barrier.wait()

    threads = [threading.Thread(target=work, args=(fmt,)) for fmt in (FP16, FP8_E4M3, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = torch.tensor(1 / 3).item()
    assert results == {
        FP16: (0.333251953125, 2 * 0.333251953125),
        FP8_E4M3: (0.34375, 2 * 0.34375),
        None: (one, 2 * one),
    }


def test_ranks_that_are_threads_train_in_it():
    config = GPTConfig(vocabulary=16, sequence_length=4, width=8, layers=1, heads=2)

    def train(comm):
        model = DDP(GPT(config), comm)
        tokens = torch.arange(8).view(2, 4)
        with emulate(FP16):
            model(tokens, tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    one, other = run(2, train)
    assert all(torch.equal(a, b) and on_grid(FP16, a) for a, b in zip(one, other, strict=True))
    assert sum(float(a.abs().sum()) for a in one) > 0


def test_as_a_decorator():
    @emulate(FP16)
    def divide():
        return third()

    assert divide() == divide() == 0.333251953125 and third() != divide()


# With the rest of autograd.


def test_a_graph_can_be_gone_through_after_the_block():
    x = torch.full((3,), 0.3, requires_grad=True)
    with emulate(FP16):
        y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, FP16.quantize(FP16.quantize(x.detach()).exp()))


def test_a_changed_parameter_is_an_error_as_in_pytorch():
    layer = nn.Linear(3, 3)
    x = torch.ones(1, 3, requires_grad=True)
    with emulate(FP16):
        loss = layer(x).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="changed in place.*call backward before optimizer.step"):
            loss.backward()


def test_what_was_saved_stays_when_the_tensor_is_changed():
    """The bits are a copy, so that backward finds each version; PyTorch, which keeps the tensor, refuses this."""
    x = torch.full((3,), 0.25, requires_grad=True)
    with emulate(FP16):
        a = x * 1
        before = a.square()
        a.add_(1)
        (before + a.square()).sum().backward()
    assert x.grad.tolist() == [2 * 0.25 + 2 * 1.25] * 3


def test_gradients_of_gradients():
    x = torch.tensor([0.7, -1.3], requires_grad=True)
    with emulate(FP16):
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.sum().backward()
    assert torch.allclose(first, 3 * x.detach() ** 2, rtol=2e-3) and on_grid(FP16, first)
    assert torch.allclose(x.grad, 6 * x.detach(), rtol=2e-3) and on_grid(FP16, x.grad)


def test_recomputation_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layers, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        with emulate(FP16):
            (checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)).square().mean().backward()
        gradients.append([p.grad for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_accumulate_in_the_format():
    w = torch.ones(1, requires_grad=True)
    with emulate(FP16):
        for factor in (2048.0, 1.0, 1.0):
            (w * factor).sum().backward()
    assert w.grad.item() == 2048


def test_tensors_that_are_float16_already():
    """Zero3(module, dtype=torch.float16), say, computes in them: PyTorch's kernels do, and nothing is copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10)).half()
    x = torch.randn(30, 50).half()
    model(x).float().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with emulate(FP16):
        model(x).float().sum().backward()
    assert all(torch.equal(p.grad, g) and p.grad.dtype == torch.float16 for p, g in zip(model.parameters(), own))
    plain = kept_bytes(lambda: model(x).sum(), contextlib.nullcontext())
    assert kept_bytes(lambda: model(x).sum(), emulate(FP16)) == plain
    with emulate(FP8_E4M3):
        assert on_grid(FP8_E4M3, model(x))


def test_training_in_it_comes_near_fp32():
    x, y = images.load("train")[0][:300].flatten(1), images.load("train")[1][:300]
    losses = {}
    for fmt in (FP32, FP16, FP8_E5M2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(40):
            optimizer.zero_grad()
            with emulate(fmt):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
        losses[fmt] = F.cross_entropy(model(x), y).item()
    assert losses[FP32] < 0.5
    assert 0 < abs(losses[FP16] / losses[FP32] - 1) < 0.02
    assert losses[FP8_E5M2] > 1.1 * losses[FP32]


# Accumulators.


def test_a_long_fp16_sum_stops_at_2048():
    ones, columns = torch.ones(2100), torch.ones(2100, 3)
    with emulate(FP16):
        assert ones.sum() == 2100 and ones.mean() == 1
    with emulate(FP16, accumulator=FP16):
        assert ones.sum() == 2048
        assert ones.mean() == 0.97509765625  # 2048 / 2100, rounded
        assert columns.sum(0).tolist() == [2048] * 3 and columns.sum(0, keepdim=True).shape == (1, 3)
        assert columns.mean((0, 1)).item() == pytest.approx(2048 / 6300, rel=2**-11)
        assert (torch.ones(1, 2100) @ columns).tolist() == [[2048] * 3]
        assert torch.bmm(torch.ones(2, 1, 2100), columns.expand(2, 2100, 3)).unique().tolist() == [2048]
        assert F.linear(torch.ones(1, 2100), columns.t(), torch.ones(3)).tolist() == [[2048] * 3]
        assert F.conv2d(torch.ones(1, 21, 10, 10), torch.ones(1, 21, 10, 10)).item() == 2048
        assert torch.ones(2100).half().sum() == 2048 and torch.arange(3000).sum() == 3000 * 2999 // 2
        layer = nn.Conv2d(1, 1, 1)
        layer(torch.ones(1, 1, 50, 50)).sum().backward()
        assert layer.weight.grad.item() == layer.bias.grad.item() == 2048
    with emulate(FP16, accumulator=BF16):
        assert ones.sum() == 256


def by_hand(products):
    """Numbers, rounded and added one by one in Python."""
    total = 0.0
    for product in products:
        total = rounded(total + rounded(product))
    return total


def rounded(number):
    return FP16.quantize(torch.tensor(number, dtype=torch.float64)).item()


@pytest.mark.parametrize("accumulator", [FP16, BF16, TF32])
def test_products_are_rounded_and_added_one_by_one(accumulator):
    torch.manual_seed(0)
    a, b, c = (FP16.quantize(torch.randn(*shape)) for shape in ((3, 50), (50, 2), (3, 2)))
    with emulate(FP16, accumulator):
        product, with_c, total = a @ b, torch.addmm(c, a, b), b.sum(0)
    assert torch.equal(product, accumulate.matmul(a, b, accumulator))
    assert torch.equal(total, accumulate.sum(b, 0, accumulator))
    assert torch.equal(with_c, FP16.quantize(c + product)) or accumulator == TF32  # whose sum has more bits
    assert not torch.equal(product, FP16.quantize(a @ b)) or accumulator == TF32
    if accumulator == FP16:
        assert product[1, 1] == by_hand((a[1].double() * b[:, 1]).tolist())


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), ((2, 1), (0, 1), 1)])
def test_convolutions_with_an_accumulator(stride, padding, dilation):
    """An accumulator of many bits must give PyTorch's convolution and gradients; FP16 gives nearly that, not quite."""
    torch.manual_seed(0)
    x, w, b = (FP16.quantize(torch.randn(*shape)) for shape in ((2, 3, 7, 6), (4, 3, 3, 2), (4,)))
    results = []
    for accumulator in (FP32, TF32, FP16):
        inputs = [each.clone().requires_grad_() for each in (x, w, b)]
        with emulate(FP16, accumulator):
            y = F.conv2d(*inputs, stride, padding, dilation)
            y.backward(torch.ones_like(y) / 4)
        results.append([y.detach(), *(each.grad for each in inputs)])
    exact, nearly, half = results
    for one, other, another in zip(exact, nearly, half, strict=True):
        assert one.shape == other.shape == another.shape
        size = one.abs().max()
        assert (one - other).abs().max() < 0.004 * size and (one - another).abs().max() < 0.004 * size
    assert not torch.equal(exact[0], half[0]) and not torch.equal(exact[2], half[2])


def test_a_convolution_sums_channels_in_order():
    torch.manual_seed(0)
    x, w = FP16.quantize(torch.randn(1, 20, 3, 3)), FP16.quantize(torch.randn(1, 20, 3, 3))
    with emulate(FP16, FP16):
        y = F.conv2d(x, w)
    assert y.item() == by_hand((x.double() * w).flatten().tolist())


def test_convolutions_that_are_not_simulated_say_so():
    grouped = nn.Conv2d(2, 2, 3, groups=2)
    with emulate(FP16, accumulator=FP16):
        with pytest.raises(NotImplementedError, match="one group.*leave the accumulator at FP32"):
            grouped(torch.ones(1, 2, 5, 5))
        with pytest.raises(NotImplementedError, match="2-d"):
            F.conv1d(torch.ones(1, 2, 5), torch.ones(1, 2, 3))


def test_training_with_fp16_accumulators():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 16, 3))
    x, y = torch.randn(5, 1, 6, 6), torch.arange(5) % 3
    with emulate(FP16, FP16), Watch(FP16) as watch:
        F.cross_entropy(model(x), y).backward()
    assert watch.count("backward") > 5 and not watch.wrong("forward") and not watch.wrong("backward")
    emulated = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p, gradient in zip(model.parameters(), emulated, strict=True):
        assert 0 < (p.grad - gradient).norm() < 0.01 * p.grad.norm()


# Bad input.


@pytest.mark.parametrize("wrong", [torch.float16, "FP16", None, 16])
def test_what_is_no_format(wrong):
    with pytest.raises(TypeError, match="emulate: fmt must be a FloatFormat such as FP16"):
        with emulate(wrong):
            pass
    with pytest.raises(TypeError, match="emulate: accumulator must be"):
        with emulate(FP16, wrong):
            pass


def test_all_named_formats_work():
    for name, fmt in FORMATS.items():
        x = torch.full((3,), 1.1, requires_grad=True)
        with emulate(fmt):
            y = x.square().sum()
            y.backward()
        assert on_grid(fmt, y.detach()) and on_grid(fmt, x.grad), name
        assert x.grad[0] == pytest.approx(2.2, rel=0.13)


# Islands: what a model computes in FP32 on its own.


class LlamaNorm(nn.Module):
    """As in transformers, line by line; T5's and Gemma's below."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden_states.to(input_dtype)


class T5Norm(LlamaNorm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaNorm(LlamaNorm):
    def forward(self, x):
        wide = x.float()
        output = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (output * (1.0 + self.weight.float())).type_as(x)


class Softmax(LlamaNorm):
    """Of large scores, so that most weights are below 2^-25, which is 0 in FP16."""

    def forward(self, x):
        weights = F.softmax(x / x.detach().abs().max() * 20, dim=-1, dtype=torch.float32)
        return self.weight * (weights + 1e-30).log().to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """PyTorch's own, which is an island inside: the squares are above 65504."""

    def forward(self, x):
        return super().forward(x * 2.0**20)


@pytest.mark.parametrize("island", [LlamaNorm, T5Norm, GemmaNorm, Softmax, RMSNorm])
def test_an_island_of_a_model_stays_fp32_as_in_a_half_model(island):
    torch.manual_seed(0)
    x = FP16.quantize(0.01 * torch.randn(4, 8))
    model = nn.Sequential(nn.Linear(8, 8), island(8), nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(FP16.quantize(parameter * (0.01 if parameter.dim() else 1)))
    emulated = x.clone().requires_grad_()
    with emulate(FP16):
        out = model(emulated)
        out.backward(torch.full_like(out, 64.0))
    found = [out, emulated.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    own = x.half().requires_grad_()
    model.half()
    expected = model(own)
    expected.backward(torch.full_like(expected, 64.0))
    wanted = [expected, own.grad, *(p.grad for p in model.parameters())]
    for one, other in zip(found, wanted, strict=True):
        assert other.isfinite().all() and on_grid(FP16, one)
        # The kernels sum in other orders, so that some numbers round the other way.
        assert (one - other.float()).norm() <= 2**-9 * other.float().norm()


def test_where_an_island_begins_and_ends():
    x = torch.tensor([1 / 3, 300.0])
    with emulate(FP16):
        wide = x.float() / 7
        assert not on_grid(FP16, wide) and (x.float() ** 2)[1] == 90_000
        for still_wide in (wide.float(), wide * x, x - wide, wide.sum(), torch.cat([x, wide]), wide[:1].exp()):
            assert not on_grid(FP16, still_wide)
        for narrow in (wide.to(torch.float32), wide.type_as(x), wide.to(x), x * wide.sum(), wide @ x, x.mul(0.3)):
            assert on_grid(FP16, narrow)
        x_and_more = x.clone()
        x_and_more += wide
        assert on_grid(FP16, x_and_more), "what is changed in place keeps its width"
        with emulate(FP32):
            assert (x.float() / 7)[0] == x[0] / 7
    assert x[0] == torch.tensor(1 / 3), "the input itself is left alone"


def test_integers_converted_to_float_are_wide():
    """The angles of a rotary embedding: position 2049 is no number of FP16, and neither are most angles."""
    frequencies, positions, mask = torch.tensor([1.0, 0.3]), torch.tensor([[2049], [3001]]), torch.tensor([True, False])

    def angles(frequencies):
        return [
            positions.float() * frequencies.float(),
            positions.float() @ frequencies[None, :].float(),
            torch.arange(3000, 3003, dtype=torch.float32),
            positions.half().float(),
        ]

    with emulate(FP16):
        found, narrow = angles(frequencies), mask.to(frequencies.dtype) * frequencies
        cosines = [angle.cos().to(torch.float32) for angle in found]
    for one, cosine, other in zip(found, cosines, angles(frequencies.half()), strict=True):
        assert other.dtype == torch.float32 and torch.equal(one, other)
        assert torch.equal(cosine, other.cos().half().float())
    assert on_grid(FP16, narrow)


def test_a_real_half_tensor_in_an_island_gets_a_narrow_gradient():
    x = torch.tensor([0.3, 300.0], requires_grad=True)
    with emulate(FP16):
        ((x * 0.3).half().float() ** 2 / 7).sum().backward()
    assert on_grid(FP16, x.grad)


def test_other_ways_to_write_where_an_island_begins():
    x = torch.tensor([1 / 3, 300.0])
    with emulate(FP16):
        for wide in (x.type(torch.FloatTensor), x.type("torch.FloatTensor"), x.type(torch.float32)):
            assert not on_grid(FP16, wide / 7)
        for wide in (torch.softmax(x, -1, torch.float32), x.softmax(0, torch.float32), x.log_softmax(0, torch.float32)):
            assert not on_grid(FP16, wide / 7)
        assert on_grid(FP16, (x * 1).view(torch.float32) / 7), "a view converts nothing"


@pytest.mark.parametrize("fmt, dtype", [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_the_smallest_number_of_a_dtype_is_the_formats_own(fmt, dtype):
    """As a mask's value it must be finite: the softmax of a row without any key would be NaN."""
    mask, island = torch.tensor([[True, True], [False, True]]), torch.ones(2, dtype=torch.int32)

    def masked(x):
        least = torch.finfo(x.dtype).min
        by_item = x * 1
        by_item[mask] = least
        return [
            x.masked_fill(mask, least).softmax(-1),
            torch.where(mask, torch.zeros((), dtype=x.dtype), least),
            torch.full((2,), fill_value=least, dtype=x.dtype),
            torch.tensor(least, dtype=x.dtype),
            x + mask.to(x.dtype) * least,
            x.clamp(max=-torch.inf).clamp(min=least),
            by_item,
            island.float().masked_fill(mask, torch.finfo(torch.float32).min),
        ]

    x = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    with emulate(fmt):
        found = masked(x)
    for one, other in zip(found, masked(x.to(dtype)), strict=True):
        assert torch.equal(one, other.float()) and one.isfinite().all()


def test_an_island_keeps_fp32_for_backward_and_no_more():
    x = torch.randn(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp().float().exp().to(x.dtype).exp().sum(), emulate(FP16)) == (2 + 4 + 2) * 1000


def test_gradients_of_gradients_through_an_island():
    x = torch.tensor([0.7, -1.3], requires_grad=True)
    with emulate(FP16):
        (first,) = torch.autograd.grad((x.float() ** 3).to(x.dtype).sum(), x, create_graph=True)
        first.sum().backward()
    assert torch.allclose(first, 3 * x.detach() ** 2, rtol=2e-3) and on_grid(FP16, first)
    assert torch.allclose(x.grad, 6 * x.detach(), rtol=2e-3) and on_grid(FP16, x.grad)
