"""Recomputation: the plain run's gradients bit for bit, no more bytes than PyTorch's, and what is refused."""

import collections
import contextlib
import copy
import dataclasses
import gc
import json
import pickle
import random
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as theirs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from minizero import GPT, GPTConfig, RankFailed, Zero3
from minizero import train as main_job
from minizero.memory import Ledger
from minizero.memory.estimate import estimate
from minizero.recompute import (
    Checkpointed,
    RecomputeMismatch,
    by_function,
    by_hooks,
    checkpoint,
    checkpoint_selective,
    is_recomputing,
    keep_matmuls,
    set_enabled,
)
from tests.support.helpers import SMALL, STAGES, batch, run


def plain(fn, *args, **kwargs):
    return fn(*args, **kwargs)


verified = partial(checkpoint, verify=True)
selective = partial(checkpoint_selective, keep_matmuls)


def nested(fn, x):
    return checkpoint(lambda a: checkpoint(fn, a), x)


WAYS = {
    "by_function": by_function,
    "by_hooks": by_hooks,
    "checkpoint": checkpoint,
    "verified": verified,
    "selective": selective,
    "everything kept": partial(checkpoint_selective, lambda operator: True),
    "nested": nested,
    "wrapped": lambda fn, x: Checkpointed(fn)(x),
}


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b))


def block(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), norm(16), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 8)
    )


def vectors(rows=5, width=8, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def everything(module, way, passes=2):
    """Output, gradients, buffers and the generator's next numbers after a few forwards and backwards."""
    torch.manual_seed(3)
    x, outputs = vectors().requires_grad_(), []
    for _ in range(passes):
        outputs.append(way(module, x * 2))
        outputs[-1].square().sum().backward()
    gradients = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
    return [y.detach() for y in outputs] + gradients + [b.clone() for b in module.buffers()] + [torch.rand(2)]


# The same numbers.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.BatchNorm1d, momentum=None), nn.LayerNorm])
def test_gradients_dropout_and_statistics_are_the_plain_runs_bit_for_bit(way, norm):
    assert equal(everything(block(norm), WAYS[way]), everything(block(norm), plain))


def test_instance_norm_and_convolutions_too():
    def network():
        torch.manual_seed(0)
        conv = nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3, affine=False)
        return nn.Sequential(nn.Unflatten(0, (-1, 1, 5)), *conv, nn.Flatten())

    assert equal(everything(network(), verified), everything(network(), plain))


def test_a_frozen_norm_counts_once_though_nothing_of_it_is_saved():
    module = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8))
    checkpoint(module, vectors()).sum().backward()
    assert module[0].num_batches_tracked == 1
    expected = nn.BatchNorm1d(8, affine=False)
    expected(vectors())
    assert torch.equal(module[0].running_var, expected.running_var)


def test_a_norm_that_is_used_twice_counts_twice():
    def statistics(way):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(8), vectors().requires_grad_()
        way(lambda x: norm(norm(x).sin() * 2).exp(), x * 1).sum().backward()
        return [*norm.buffers(), x.grad]

    for way in (by_function, by_hooks, checkpoint, verified, selective):
        assert equal(statistics(way), statistics(plain))


def test_an_input_without_gradient_has_none_in_the_second_run():
    seen = []

    def fn(x, y):
        seen.append((x.requires_grad, y.requires_grad))
        return (x * y).exp().sin()

    for way in (by_hooks, checkpoint, verified, selective):
        way(fn, vectors(), vectors().requires_grad_()).sum().backward()
    assert seen == [(False, True)] * 8


def test_other_threads_go_on_training():
    mine, others = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def fn(x):
        if is_recomputing():
            thread = threading.Thread(target=others, args=(vectors(),))
            thread.start()
            thread.join()
        return mine(x).exp().sin()

    checkpoint(fn, vectors().requires_grad_()).sum().backward()
    assert (mine.num_batches_tracked, others.num_batches_tracked) == (1, 1)


class Centred(nn.Module):
    """Takes its own running mean off, after it has updated that in one of several ways."""

    def __init__(self, update):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.update, self.inner = nn.Linear(8, 8), update, nn.Module()
        for module in (self, self.inner):
            module.register_buffer("mean", torch.zeros(8))
        self.register_buffer("late", None)

    def forward(self, x):
        self.update(self, x.detach().mean(0))
        return (self.linear(x) - self.mean - self.inner.mean - (0 if self.late is None else self.late)).sin()


def assigned(module, mean):
    module.mean = 0.9 * module.mean + 0.1 * mean


def made_late(module, mean):
    module.late = mean if module.late is None else module.late + mean


STATEFUL = {
    "in place": lambda: Centred(lambda module, mean: module.mean.mul_(0.9).add_(mean, alpha=0.1)),
    "assigned": lambda: Centred(assigned),
    "through .data": lambda: Centred(lambda module, mean: module.mean.data.mul_(0.9).add_(mean, alpha=0.1)),
    "data replaced": lambda: Centred(lambda module, mean: setattr(module.mean, "data", module.mean + mean)),
    "of a module inside": lambda: Centred(lambda module, mean: module.inner.mean.add_(mean)),
    "made late": lambda: Centred(made_late),
    "in evaluation too": lambda: Centred(lambda module, mean: module.mean.add_(mean)).eval(),
    "spectral norm": lambda: nn.utils.spectral_norm(Centred(lambda *_: None).linear),
    "spectral norm as a parametrization": lambda: nn.utils.parametrizations.spectral_norm(Centred(assigned).linear),
}
CALLS = {
    "a module": lambda module, way, x: way(module, x),
    "a function": lambda module, way, x: way(lambda x: module(x).exp(), x),
    "a partial": lambda module, way, x: way(partial(nn.Module.__call__, module), x),
    "a method": lambda module, way, x: way(module.forward if isinstance(module, Centred) else module.__call__, x),
}


@pytest.mark.parametrize("way", ["by_function", "by_hooks", "checkpoint", "verified", "everything kept", "nested"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", STATEFUL)
def test_a_module_that_changes_its_own_buffers(make, call, way):
    """Two forwards before the backwards, one of which goes through its graph again."""

    def results(way):
        module, x = STATEFUL[make](), vectors().requires_grad_()
        losses = [CALLS[call](module, way, x * factor).square().sum() for factor in (1, 2)]
        for number, retain in ((1, False), (0, True), (0, False)):
            losses[number].backward(retain_graph=retain)
        return [x.grad, *(p.grad for p in module.parameters()), *module.buffers(), *losses]

    assert equal(results(WAYS[way]), results(plain))


class Reaches(nn.Module):
    """Runs a module that it does not contain."""

    def __init__(self, norm):
        super().__init__()
        self.outside = [norm]

    def forward(self, x):
        return self.outside[0](x).exp()


REACHED = {
    "a method": lambda norm: norm.forward,
    "a partial of a method": lambda norm: partial(norm.forward),
    "a method in a closure": lambda norm: lambda x: norm.forward(x).exp(),
    "a bound method in a closure": lambda norm: (lambda forward: lambda x: forward(x).exp())(norm.forward),
    "a function in a closure": lambda norm: (lambda inner: lambda x: inner(x).exp())(lambda x: norm.forward(x)),
    "a default": lambda norm: lambda x, norm=norm: norm.forward(x).exp(),
    "a global": lambda norm: eval("lambda x: norm.forward(x).exp()", {"norm": norm}),
    "a module outside of a module": Reaches,
}


@pytest.mark.parametrize("how", REACHED)
def test_the_statistics_of_a_norm_however_it_is_reached(how):
    norm = nn.BatchNorm1d(8)
    checkpoint(REACHED[how](norm), vectors().requires_grad_()).sum().backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("way", ["by_function", "by_hooks", "checkpoint", "nested"])
@pytest.mark.parametrize("call", ["a module", "a method", "a function"])
def test_a_buffer_that_two_modules_share_is_one_buffer(call, way):
    """One module writes to it, the other reads it, which is seen for the first time after that write."""

    class Writer(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.register_buffer("shared", shared)

        def forward(self, x):
            self.shared.add_(1.0)
            return x * 1

    class Reader(Writer):
        def forward(self, x):
            return (x - self.shared).sin()

    def results(way):
        shared, x = torch.zeros(8), vectors().requires_grad_()
        network = nn.Sequential(Writer(shared), Reader(shared))
        fn = {"a module": network, "a method": network.forward}.get(call, lambda x: network[1](network[0](x)))
        for _ in range(2):
            way(fn, x).sum().backward()
        return [x.grad, shared]

    assert equal(results(WAYS[way]), results(plain))


def test_a_buffer_without_a_size_is_refused():
    norm = nn.LazyBatchNorm1d()
    with pytest.raises(RecomputeMismatch, match="running_mean of LazyBatchNorm1d has no size before the first"):
        checkpoint(norm, vectors().requires_grad_())
    norm(vectors())
    checkpoint(norm, vectors().requires_grad_()).sum().backward()
    assert norm.num_batches_tracked == 2


def test_of_buffers_only_those_that_change_are_kept():
    """A mask is none of them. While the block runs for the first time there is a copy."""
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())
    module.register_buffer("mask", torch.ones(1000, 1000))
    x = vectors().requires_grad_()
    with Ledger(module) as ledger:
        y = checkpoint(module, x * 1)
        held = ledger.current["total"]
        y.sum().backward()
    assert 4_000_000 < held < 4_002_000


def test_pytorchs_own_counts_twice():
    """If this fails, PyTorch has learned it: say so in the lesson."""
    module = nn.BatchNorm1d(8)
    theirs(module, vectors().requires_grad_(), use_reentrant=False).sum().backward()
    assert module.num_batches_tracked == 2


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_gpt(recompute):
    def gradients(**options):
        model = GPT(dataclasses.replace(SMALL, **options))
        loss = model(*batch(0))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert equal(gradients(recompute=recompute), gradients())


def test_an_unknown_way_of_a_gpt_is_refused():
    with pytest.raises(ValueError, match="recompute is 'most'; expected one of none, full, selective"):
        GPT(dataclasses.replace(SMALL, recompute="most"))


# What goes in and comes out.

Pair = collections.namedtuple("Pair", "left right")


def test_tensors_are_found_wherever_they_are():
    weight = nn.Parameter(torch.ones(8))
    calls = []

    def fn(pair, *rest, table, nothing=None, scale=1.0, name="", factors=None):
        calls.append((type(pair), type(table), nothing, scale, name, type(factors["list"]), weight is rest[1]))
        x = pair.left * table["w"] + pair.right[0] * scale + rest[0] * rest[1] + factors["list"][0] + table["n"]
        return {"y": torch.tanh(x), "more": [x.argmax(), (x * 2, None, "text")]}, x.detach()

    def go(way):
        x = vectors().requires_grad_()
        pair = Pair(x * 1, (x * 2, "b"))
        table = collections.OrderedDict(w=x * 3, n=4, c={"deep": (x,)})
        factors = collections.defaultdict(list, list=[x * 5])
        out, detached = way(fn, pair, x, weight, table=table, scale=0.5, name="fn", factors=factors)
        (out["y"].sum() + out["more"][1][0].square().sum()).backward()
        result = [x.grad, weight.grad.clone(), out["more"][0], detached]
        weight.grad = None
        return result

    expected = go(plain)
    for way in (checkpoint, verified, selective):
        calls.clear()
        assert equal(go(way), expected)
        assert len(calls) == 2 and calls[0] == calls[1]
        assert calls[0] == (Pair, collections.OrderedDict, None, 0.5, "fn", list, True)


def test_a_dict_that_keeps_its_items_as_attributes_too():
    """As Hugging Face's outputs, which refuse `update`."""

    class Output(dict):
        def update(self, *_):
            raise NotImplementedError

        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            setattr(self, key, value)

    def go(way):
        output, x = Output(), vectors().requires_grad_()
        output["hidden"] = x * 2
        way(lambda output: (output.hidden * output["hidden"]).sin(), output).sum().backward()
        return [x.grad, output.hidden]

    assert equal(go(checkpoint), go(plain))


def test_an_object_with_tensors_passes_as_it_is():
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    x = vectors().requires_grad_()
    checkpoint(lambda b: Batch(b.x.exp()), Batch(x)).x.sum().backward()
    assert torch.equal(x.grad, vectors().exp())
    opaque = checkpoint(lambda x: iter([x.exp()]), x)  # we cannot look inside, and do not complain
    next(opaque).sum().backward()
    assert torch.equal(x.grad, 2 * vectors().exp())


def test_a_tensor_that_comes_twice_is_one_tensor():
    """Attention takes another path where its queries, keys and values are one tensor."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def gradient(way):
        x = vectors()[None].requires_grad_()
        way(lambda *qkv: attention(*qkv)[0], x * 1, x, x).sum().backward()
        h = x * 1
        way(attention, h, h, value=h)[0].square().sum().backward()
        return [x.grad]

    for way in (checkpoint, verified, selective):
        assert equal(gradient(way), gradient(plain))


def test_a_tuple_that_is_made_in_a_way_of_its_own():
    torch.manual_seed(0)
    packed = nn.utils.rnn.pack_padded_sequence(vectors()[:, None].repeat(1, 2, 1), [5, 3])
    network = nn.GRU(8, 8)

    def gradient(way):
        network.zero_grad()
        way(network, packed)[0].data.square().sum().backward()
        return [p.grad for p in network.parameters()]

    for way in (checkpoint, verified, selective):  # a cell writes into a part of its product, which has its own version
        assert equal(gradient(way), gradient(plain))


def test_a_generator_among_the_arguments_is_set_back():
    def fn(x, options):
        return (x.exp() * torch.rand(8, generator=options["generator"])).sin()

    def go(way):
        generator, x = torch.Generator().manual_seed(1), vectors().requires_grad_()
        way(fn, x, {"generator": generator}).sum().backward()
        return [x.grad, generator.get_state()]

    for way in (checkpoint, verified, selective):
        assert equal(go(way), go(plain))
    assert not equal(go(partial(checkpoint, preserve_rng_state=False)), go(plain))


def test_the_wrapper_verifies():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), vectors()
    y = Checkpointed(module, verify=True)(x).sum()
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(RecomputeMismatch, match="aten::addmm, gave other values"):
        y.backward()


def test_the_wrapper_shows_the_blocks_attributes():
    block = nn.Linear(8, 4)
    block.kind = "full"
    wrapped = pickle.loads(pickle.dumps(copy.deepcopy(Checkpointed(block))))
    assert (wrapped.kind, wrapped.out_features, wrapped.verify) == ("full", 4, False)
    assert wrapped.weight is wrapped.module.weight and list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'downsample'"):
        wrapped.downsample  # noqa: B018


def test_names_of_options_belong_to_the_function_too():
    class Scale(nn.Module):
        def forward(self, x, verify=1.0, preserve_rng_state=1.0):
            return x * verify * preserve_rng_state

    x = vectors().requires_grad_()
    assert torch.equal(Checkpointed(Scale())(x, verify=2.0, preserve_rng_state=3.0), x * 6)
    assert torch.equal(checkpoint(lambda x, fn: x * fn, x, fn=2.0), x * 2)
    assert torch.equal(selective(lambda x, keep, fn: x * keep * fn, x, keep=2.0, fn=3.0), x * 6)


def test_several_outputs_some_used_some_without_gradient():
    def fn(x):
        h = x.exp()
        return h, h.sin(), h.argmax(-1), h.detach()

    for uses in ([0], [1], [0, 1]):
        gradients = []
        for way in (plain, checkpoint):
            x = vectors().requires_grad_()
            outputs = way(fn, x)
            assert [y.requires_grad for y in outputs] == [True, True, False, False]
            sum(outputs[i].sum() for i in uses).backward()
            gradients.append(x.grad)
        assert equal(gradients[:1], gradients[1:])


class Counted(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, x):
        self.calls += 1
        return self.module(x)


def test_what_is_frozen_is_not_run_again():
    prefix, trained = Counted(nn.Linear(8, 8)).requires_grad_(False), Counted(nn.Linear(8, 8))
    suffix = Counted(nn.Linear(8, 8)).requires_grad_(False)  # its backward needs its weight only
    x = checkpoint(prefix, vectors())
    checkpoint(suffix, checkpoint(trained, x)).sum().backward()
    assert (prefix.calls, trained.calls, suffix.calls) == (1, 2, 1)
    assert trained.module.weight.grad is not None and not x.requires_grad
    x = nested(lambda x: prefix(x), vectors())  # whose inputs the outer one holds for it, asks for no gradient
    assert prefix.calls == 2 and not x.requires_grad


def test_parameters_get_their_gradient_though_no_input_asks_for_one():
    def gradient(way):
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        way(module, vectors()).sum().backward()
        return [module.weight.grad]

    for way in (by_hooks, checkpoint, verified, selective):
        assert equal(gradient(way), gradient(plain))


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("way", "again"), [(checkpoint, 1), (by_hooks, 1), (by_function, 2), (selective, 0)])
def test_the_second_forward_stops_before_the_last_product(way, again):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    y = way(module, vectors().requires_grad_()).sum()
    with Operators() as operators:
        y.backward()
    assert operators.names.count("addmm") == again


# Backward in all its forms.


def test_autograd_grad_and_chosen_inputs():
    def gradients(way):
        module, x = block(nn.LayerNorm), vectors().requires_grad_()
        torch.manual_seed(0)
        y = way(module, x * 1)
        last, first = module[-1].weight, module[0].weight
        grad = torch.autograd.grad(y.sum(), [last, x], retain_graph=True)
        y.square().sum().backward(inputs=[first])
        return [*grad, first.grad]

    assert equal(gradients(checkpoint), gradients(plain))


def test_what_a_partial_backward_does_not_use_goes_with_it():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    with Ledger(module) as ledger:
        loss = checkpoint(module, vectors()).sum()
        before = ledger.current["total"]
        torch.autograd.grad(loss, module[-1].weight, retain_graph=True)
        assert ledger.current["total"] == before
        assert ledger.peak["total"] > before + 5 * 64 * 4


def test_a_graph_can_be_gone_through_twice_and_differentiated_twice():
    def gradients(way):
        module, x = block(nn.LayerNorm), vectors().requires_grad_()
        torch.manual_seed(0)
        y = way(module, x * 1).square().sum()
        y.backward(retain_graph=True)
        (once,) = torch.autograd.grad(y, x, create_graph=True)
        (once.square().sum() + y).backward()
        return [x.grad, once.detach(), *(p.grad for p in module.parameters())]

    for way in (by_hooks, checkpoint, verified, selective, nested):
        assert equal(gradients(way), gradients(plain))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradients(by_function)


def test_a_released_graph_is_refused_as_autograd_does():
    for way in (checkpoint, selective):
        y = way(block(nn.LayerNorm), vectors().requires_grad_()).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


def test_a_function_may_differentiate_inside():
    def penalty(x):
        h = x.exp().sin()
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h * slope.square()

    def gradient(way):
        x = vectors().requires_grad_()
        way(penalty, x * 1).sum().backward()
        return [x.grad]

    assert equal(gradient(checkpoint), gradient(plain))
    for way in (verified, selective):
        with pytest.raises(NotImplementedError, match="calls backward inside itself"):
            gradient(way)


def test_the_graph_can_be_looked_at_outside_of_a_backward():
    x = vectors().requires_grad_()
    for way in (checkpoint, verified, partial(checkpoint_selective, lambda operator: True)):
        x.grad = None
        y = way(lambda x: x.exp().sin(), x)
        assert torch.equal(y.grad_fn._saved_self, x.exp())
        y.sum().backward()
        assert torch.equal(x.grad, x.exp().cos() * x.exp())


def test_a_function_may_fetch_what_it_saved_twice():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    x = vectors().requires_grad_()
    checkpoint(lambda x: Cube.apply(x.exp()), x).sum().backward()
    assert torch.allclose(x.grad, 3 * (3 * x).exp())


def test_nesting_runs_each_level_again_once():
    inner, outer = Counted(nn.Tanh()), []

    def fn(x):
        outer.append(is_recomputing())
        return checkpoint(inner, checkpoint(inner, x)).exp()

    x = vectors().requires_grad_()
    checkpoint(fn, x).sum().backward()
    assert outer == [False, True]
    # Twice in the first forward; in the second up to what exp saved; and each once for its own backward.
    assert inner.calls == 2 + 2 + 2


def test_nesting_halves_again_what_is_held():
    """Two levels of √√: the inner inputs are dropped with the outer function."""

    def held(way):
        layers = [nn.Tanh() for _ in range(16)]

        def four(x, start):
            for layer in layers[start : start + 4]:
                x = way(layer, x)
            return x

        with Ledger() as ledger:
            x = torch.randn(1000, requires_grad=True)
            y = x
            for start in range(0, 16, 4):
                y = checkpoint(four, y, start)
            return ledger.current["total"] // 4000

    assert held(checkpoint) == held(plain) == 1 + 4  # x, three inputs and the output


def test_hooks_around_get_the_inputs_to_keep():
    """save_on_cpu moves what autograd saves off the GPU: here, what we keep."""
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    x = vectors().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(lambda x: x.exp().sin(), x * 1)
    assert packed == [(5, 8)]
    y.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


# The surroundings of the first run.


def test_the_generator_is_set_back_also_when_the_second_run_fails():
    def fn(x):
        x = F.dropout(x.exp()).sin()
        if is_recomputing():
            raise KeyError("second")
        return F.dropout(x)

    module = nn.BatchNorm1d(8)
    y = checkpoint(lambda x: fn(module(x)), vectors().requires_grad_()).sum()
    state, statistics = torch.get_rng_state(), module.running_mean.clone()
    with pytest.raises(KeyError, match="second"):
        y.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.running_mean, statistics) and module.num_batches_tracked == 1
    assert not is_recomputing()


def numbers(x):
    """Draws in every way: in place, new tensors, a permutation, inside other operators."""
    for p in (0.2, 0.5):
        x = F.dropout(x, p).sin() + torch.native_dropout(x, p, True)[0] + torch.rand(8) + torch.randn_like(x)
    x = x + torch.rand(8, generator=None) + torch.rand_like(x, generator=None) + torch.randint(9, (8,), generator=None)
    x = x + F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0] + torch.randint(1, 9, (8,))
    return (
        x[torch.randperm(5, generator=None)].exp() * torch.normal(0.0, 1.0, (8,))
        + x[torch.multinomial(torch.ones(5), 5)].exp()
    )


@pytest.mark.parametrize("inside", [plain, checkpoint])
def test_what_is_drawn_in_a_rank_is_drawn_again_whatever_other_threads_draw(inside):
    """`verify` compares all that the two runs compute."""

    def disturbed(x):
        for _ in range(2):
            thread = threading.Thread(target=lambda: torch.rand(1 + is_recomputing()))
            thread.start()
            thread.join()
            x = inside(numbers, x)
        return x

    def work(comm):
        x = vectors().requires_grad_()
        results = [checkpoint(disturbed, x * 1, verify=True) for _ in range(2)]
        sum(results).sum().backward()
        return not torch.equal(*results)  # each call draws anew

    assert run(2, work) == [True, True]


@pytest.mark.parametrize("way", ["by_hooks", "checkpoint", "selective", "nested"])
def test_the_mask_in_backward_is_the_one_of_forward_in_every_rank(way):
    def work(comm):
        wrong = 0
        for _ in range(40):
            x = torch.ones(20_000, requires_grad=True)
            y = WAYS[way](lambda x: F.dropout(x).sin(), x * 1)
            y.sum().backward()
            wrong += not torch.equal(x.grad != 0, y != 0)
        return wrong, (y != 0).tolist()

    results = run(4, work)
    assert [wrong for wrong, _ in results] == [0] * 4
    assert results[0][1] != results[1][1]


@pytest.mark.parametrize("p, train", [(0.5, False), (1.0, True)])
def test_dropout_in_a_rank_that_has_nothing_to_draw(p, train):
    def work(comm):
        x = vectors().requires_grad_()
        return [way(lambda x: torch.native_dropout(x, p, train)[0], x).detach() for way in (checkpoint, plain)]

    (results,) = run(1, work)
    assert torch.equal(*results)


def test_an_operator_that_takes_no_generator_is_refused_in_a_rank():
    x = vectors().requires_grad_()

    with torch.library._scoped_library("minizero_test", "DEF") as library:
        library.define("drawn(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
        library.impl("drawn", lambda x: x + torch.rand(1), "CompositeExplicitAutograd")
        with pytest.raises(RankFailed, match="minizero_test::drawn in a thread draws .* make the ranks processes"):
            run(1, lambda comm: checkpoint(torch.ops.minizero_test.drawn.default, x.detach()))


def test_under_fake_tensors():
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU())
        for way in (checkpoint, selective, by_function):
            way(module, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert module[0].weight.grad.shape == (8, 8)


def test_without_preserve_rng_state_the_generator_goes_on():
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x).exp(), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(x.grad > 1, y > 1)


def test_autocast_and_the_default_device_are_those_of_the_first_run():
    seen = []

    def gradients(way):
        def fn(x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_device()))
            return torch.tanh(module(torch.tanh(module(x))))

        module, x = nn.Linear(8, 8), vectors().requires_grad_()
        module.load_state_dict(nn_state)
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            y = way(fn, x)
        y.float().sum().backward()
        return [y.detach(), x.grad, module.weight.grad]

    nn_state = nn.Linear(8, 8).state_dict()
    expected = gradients(plain)
    assert expected[0].dtype == torch.bfloat16
    for way in (checkpoint, by_function, verified):
        seen.clear()
        assert equal(gradients(way), expected)
        assert seen == 2 * [(True, torch.bfloat16, torch.device("meta"))]


def test_autocast_that_is_off_in_forward_is_off_in_backward():
    def gradient(way):
        torch.manual_seed(0)
        x, module = vectors().requires_grad_(), nn.Linear(8, 8)
        y = way(lambda x: module(x).exp(), x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            y.backward()
        return [x.grad]

    assert equal(gradient(checkpoint), gradient(plain))


def test_grad_mode():
    counted = Counted(nn.Tanh())
    with torch.no_grad():
        assert not checkpoint(counted, vectors().requires_grad_()).requires_grad
    with torch.inference_mode():
        mask = checkpoint(counted, vectors())
    assert counted.calls == 2

    def fn(x, mask):
        with torch.no_grad():
            scale = x.norm()
        return (x / scale).exp() + mask

    gradients = []
    for way in (plain, checkpoint, nested_in_mask := lambda fn, x, m: checkpoint(lambda a: checkpoint(fn, a, m), x)):
        x = vectors().requires_grad_()
        way(fn, x * 1, mask).sum().backward()
        gradients.append(x.grad)
    assert equal(gradients[:1], gradients[1:2]) and equal(gradients[:1], gradients[2:])
    assert nested_in_mask


def test_the_switch_turns_all_of_it_off():
    counted = Counted(nn.Tanh())

    def calls(way):
        counted.calls = 0
        way(counted, vectors().requires_grad_()).sum().backward()
        return counted.calls

    for way in (checkpoint, selective, verified):
        with set_enabled(False):
            assert calls(way) == 1
        assert calls(way) == 2
    set_enabled(False)
    try:
        assert calls(checkpoint) == 1
    finally:
        set_enabled(True)
    assert calls(checkpoint) == 2


def test_the_flag_says_when_it_is_the_second_run():
    seen = []

    def fn(x):
        inner = checkpoint(lambda x: x.exp().sin(), x)
        (slope,) = torch.autograd.grad(inner.sum(), x)  # which is a second run inside a second run
        seen.append(is_recomputing())
        return (x * slope).exp().sin()

    y = checkpoint(fn, vectors().requires_grad_() * 1)
    assert not is_recomputing()
    y.sum().backward()
    assert seen == [False, True] and not is_recomputing()


# Memory.


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["by_function", "by_hooks", "checkpoint", "verified", "selective", "nested"])
@pytest.mark.parametrize("backward", [True, False])
def test_memory_returns_without_the_garbage_collector(way, backward):
    class Function:
        def __init__(self):
            self.module = block()

        def __call__(self, x):
            return self.module(x).exp()  # which saves its own result

    with no_collector():
        fn, x = Function(), vectors().requires_grad_()
        h = x * 1
        y = WAYS[way](fn, h)
        alive = [weakref.ref(thing) for thing in (fn, h, y, h.untyped_storage(), y.untyped_storage())]
        if backward:
            y.sum().backward()
        del fn, h, y
        assert [reference() for reference in alive] == [None] * 5


def mlp(way, blocks=16):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(blocks)]
    model = nn.ModuleList(layers)

    def loss():
        x = vectors(64, 32).requires_grad_()
        for layer in model:
            x = x + way(layer, x)
        return x.square().mean()

    return model, loss


def gpt(way, monkeypatch):
    monkeypatch.setitem(main_job.GPT.__init__.__globals__["RECOMPUTE"], "theirs", way)
    model = GPT(dataclasses.replace(SMALL, layers=8, recompute="theirs"))
    return model, lambda: model(*batch(0))


def peak(model, loss):
    with Ledger(model) as ledger:
        loss().backward()
    return ledger.peak["total"], ledger.peak["activations"] + ledger.peak["temporary"]


OPERATORS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]


@pytest.mark.parametrize("network", ["mlp", "gpt"])
def test_the_peak_is_at_most_pytorchs(network, monkeypatch):
    def measure(way):
        return peak(*(mlp(way) if network == "mlp" else gpt(way, monkeypatch)))

    ours = measure(checkpoint)
    for use_reentrant in (True, False):
        other = measure(partial(theirs, use_reentrant=use_reentrant))
        assert ours[0] <= other[0] and ours[1] <= other[1]
    assert ours[1] < 0.5 * measure(plain)[1]
    contexts = partial(create_selective_checkpoint_contexts, OPERATORS)
    middle = measure(selective)
    other = measure(partial(theirs, use_reentrant=False, context_fn=contexts))
    assert ours[1] < middle[1] < other[1] and middle[0] <= other[0]  # without what is not needed again


def test_the_generators_state_is_kept_only_where_something_was_drawn():
    """5,056 bytes for each call would add up, and setting it back takes time."""
    from minizero.recompute.replay import Replay

    for draw, kept in ((lambda: None, 0), (lambda: torch.rand(1), 1)):
        replay = Replay(None, [])
        with replay.first_run():
            draw()
        assert len(replay.generators.states) == kept


# A policy.


def test_what_is_kept_is_not_computed_again():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def fn(x):
        return F.gelu(attention(x, x, x, need_weights=False)[0]) + F.conv1d(x, torch.ones(5, 5, 3), padding=1)

    def again(keep):
        y = checkpoint_selective(keep, fn, vectors()[None].requires_grad_()).sum()
        with Operators() as operators:
            y.backward(retain_graph=True)
            y.backward()
        return {name for name in operators.names if "backward" not in name}

    expensive = {"addmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"}
    assert not again(keep_matmuls) & expensive
    assert again(lambda operator: False) >= {"addmm", "_scaled_dot_product_flash_attention_for_cpu"}
    assert "addmm" in again(lambda operator: operator == torch.ops.aten.convolution.default)


def test_a_list_of_operators_is_a_policy():
    def fn(x):
        return (x @ x.t()).sin().exp()

    def again(way):
        x = vectors().requires_grad_()
        y = way(fn, x).sum()
        with Operators() as operators:
            torch.autograd.grad(y, x)
        return operators.names.count("mm"), operators.names.count("sin")

    assert again(checkpoint) == (3, 1)  # two of them are backward's own
    assert again(partial(checkpoint_selective, [torch.ops.aten.mm.default])) == (2, 1)
    assert again(partial(checkpoint_selective, {torch.ops.aten.mm.default, torch.ops.aten.sin.default})) == (2, 0)
    x = vectors().requires_grad_()
    for wrong in ("mm", ["mm"], torch.ops.aten.mm, torch.ops.aten.mm.default, 3, [torch.mm]):
        with pytest.raises(TypeError, match="keep must be a function of an operator or a list of operators"):
            checkpoint_selective(wrong, fn, x)


def test_what_is_kept_goes_when_it_has_been_used():
    def most(way):
        column, row = torch.ones(1000, 1, requires_grad=True), torch.ones(1, 1000)
        y = way(lambda column: (column @ row).exp().sin(), column).sum()
        with Ledger() as ledger:
            y.backward()
        return ledger.peak["total"]

    contexts = partial(create_selective_checkpoint_contexts, OPERATORS)
    assert most(selective) <= most(partial(theirs, use_reentrant=False, context_fn=contexts))
    with Ledger() as ledger:
        column, row = torch.ones(1000, 1, requires_grad=True), torch.ones(1, 1000)
        y = selective(lambda column: (column @ row).exp().sin(), column).sum()
        column.register_hook(lambda _: held.append(ledger.current["total"]))
        held = [ledger.current["total"]]
        y.backward()
    assert held[1] < held[0], "the product is no longer there when the gradient of the input has been made"


def test_numbers_drawn_inside_a_kept_operator_are_drawn_again():
    """Were they not, the next dropout would get them."""

    def fn(x):
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) + torch.rand_like(x)
        return F.dropout(x).exp()

    def gradient(way):
        torch.manual_seed(0)
        x = vectors(16)[None, None].requires_grad_()
        way(fn, x * 1).sum().backward()
        return [x.grad]

    for way in (selective, partial(checkpoint_selective, lambda operator: True)):
        assert equal(gradient(way), gradient(plain))


def test_what_is_changed_in_place_is_not_kept():
    def inside(x):
        return (x @ x.t()).mul_(2).exp().sin()

    def gradient(way, change):
        x = vectors().requires_grad_()
        products = []

        def fn(x):
            products.append(x @ x.t())
            return products[-1].exp().sin()

        y = way(fn, x * 1)
        products[0].detach().mul_(change)
        y.sum().backward()
        way(inside, x * 1).sum().backward()
        return [x.grad]

    everything = partial(checkpoint_selective, lambda operator: True)
    for way in (selective, everything):
        assert equal(gradient(way, 1), gradient(checkpoint, 1))
        assert equal(gradient(way, 2), gradient(checkpoint, 1)), "changed after the first run"


def test_a_policy_notices_another_path():
    def fn(x, weight):
        return (torch.baddbmm(x, x, weight) if is_recomputing() else torch.bmm(x, weight)).exp().sin()

    x = torch.ones(2, 4, 4, requires_grad=True)
    y = selective(fn, x, torch.ones(2, 4, 4))
    with pytest.raises(RecomputeMismatch, match="came to aten::baddbmm where the first ran aten::bmm"):
        y.sum().backward()


# What cannot be done.


def test_verify_names_the_operator():
    scale = torch.ones(8)

    def fn(x):
        return ((x.exp() + 1) * scale).sin()

    for way in (checkpoint, verified):
        scale.fill_(1)
        x = vectors().requires_grad_()
        y = way(fn, x)
        scale.fill_(2)
        if way is checkpoint:  # notices a change of shape, as PyTorch's, but not of values
            y.sum().backward()
            assert not torch.equal(x.grad, (x.exp() + 1).cos() * x.exp())
        else:
            with pytest.raises(RecomputeMismatch, match=r"operator 2 .*aten::mul,.*gave other values"):
                y.sum().backward()


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, turn: x.exp() * np.random.default_rng(turn).random(), "aten::mul, gave other values"),
        (lambda x, turn: x.exp() * torch.tensor([1, 2])[turn], "aten::select|aten::mul, gave other values"),
        (lambda x, turn: torch.where(x > turn, x, 2 * x).exp(), "aten::gt, gave other values"),
        (lambda x, turn: (x.exp() if turn else x.sin()).exp(), "aten::exp, was not run by the first"),
        (lambda x, turn: (x + float(torch.ones(1) * turn)).exp(), "aten::mul, gave other values"),
    ],
)
def test_verify_sees_every_kind_of_value(fn, words):
    turns = iter(range(2))
    y = verified(lambda x: fn(x, next(turns)).sin(), vectors().requires_grad_())
    with pytest.raises(RecomputeMismatch, match=words):
        y.sum().backward()


def test_verify_accepts_a_weight_that_autocast_had_cast_before():
    layer, x = nn.Linear(8, 8), vectors().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = verified(lambda h: layer(layer(h).tanh()), layer(x))
    y.sum().backward()
    assert x.grad is not None


def test_verify_accepts_what_is_the_same():
    def fn(x):
        x = torch.where(x > 0, x, torch.full_like(x, float("nan"))).nan_to_num() + torch.empty(3, 8).fill_(2).sum()
        return F.dropout(x).to(torch.bfloat16).exp()[torch.randperm(5)]

    verified(fn, vectors().requires_grad_()).sum().backward()


def changes_its_input(x):
    return x.mul_(2).exp()


def draws_from_numpy(x):
    return x * float(np.random.rand())


def no_gradient(x):
    return x.detach()


@pytest.mark.parametrize("way", [checkpoint, verified, selective, nested])
@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (changes_its_input, RecomputeMismatch, "tensor 0 of its arguments in place.*out-of-place"),
        (draws_from_numpy, RecomputeMismatch, "NumPy's global generator.*draw them with torch"),
        (no_gradient, ValueError, "nothing with a gradient, though tensor 0 of its arguments asks.*without detach"),
        (lambda x: None, ValueError, "returns nothing with a gradient"),
        (lambda x: (x.argmax(), 3, "text"), ValueError, "returns nothing with a gradient"),
    ],
)
def test_bad_functions_are_refused_at_the_call(way, fn, error, words):
    with pytest.raises(error, match=words):
        way(fn, vectors().requires_grad_() * 1)


def test_a_parameter_that_no_gradient_can_reach():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(ValueError, match="Detached returns nothing with a gradient, though parameter weight asks"):
        checkpoint(Detached(8, 8), vectors())
    module = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="though something in it asks"):
        checkpoint(lambda x: module(x).detach(), vectors())
    checkpoint(module.requires_grad_(False), vectors())  # where nobody asks, nothing is wrong


def test_functional_transforms_are_refused():
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch.func's transforms .* call the function without"):
            transform(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3, requires_grad=True))
    with set_enabled(False):
        assert torch.equal(
            torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.ones(3)), torch.ones(3).cos()
        )
    x = torch.ones(3, requires_grad=True)  # a backward in a batch is none of them
    (rows,) = torch.autograd.grad(nested(torch.sin, x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, torch.diag(torch.ones(3).cos()))


def test_numpys_generator_is_watched_to_the_last_number():
    """Normal numbers are made in pairs: the second is drawn without a trace in the generator's words."""
    x = vectors().requires_grad_()
    np.random.seed(0)
    np.random.randn()
    for _ in range(3):
        with pytest.raises(RecomputeMismatch, match="NumPy"):
            checkpoint(lambda x: x * float(np.random.randn()), x)
    checkpoint(lambda x: x * float(np.random.default_rng(0).random()), x)  # made inside: the same each time
    checkpoint(draws_from_numpy, x, preserve_rng_state=False)


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), lambda: random.sample(range(9), 2)[0]])
def test_pythons_generator_is_watched_to_the_last_number(draw):
    """Here too the second normal number of a pair leaves the words as they are."""
    x = vectors().requires_grad_()
    for _ in range(3):
        with pytest.raises(RecomputeMismatch, match="Python's global generator"):
            checkpoint(lambda x: x * draw(), x)
    checkpoint(lambda x: x * random.Random(0).random(), x)
    checkpoint(lambda x: x * draw(), x, preserve_rng_state=False)


@pytest.mark.parametrize("way", [checkpoint, verified, selective])
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, n: x[:, : 3 + n].exp().sin(), r"was \(5, 3\) float32 on cpu in the first .*is \(5, 4\) float32"),
        (lambda x, n: x.to([torch.float32, torch.float64][n]).exp().sin(), "is .* float64 on cpu in the second"),
        (lambda x, n: x.exp().sin() if n == 0 else x.exp(), "saved 2 tensors .* first forward and 1 in the second"),
    ],
)
def test_a_function_that_changes_between_the_runs(way, fn, words):
    turns = iter(range(2))
    y = way(lambda x: fn(x, next(turns)), vectors().requires_grad_())
    with pytest.raises(RecomputeMismatch, match=words if way is checkpoint else "the second"):
        y.sum().backward()


def test_a_cache_that_grows_is_named():
    cache = []

    def fn(x):
        cache.append(x.detach())
        keys = torch.cat(cache)
        return (x @ keys.t()).softmax(-1) @ keys

    y = checkpoint(fn, vectors().requires_grad_())
    with pytest.raises(RecomputeMismatch, match="a cache that grows with each forward .* use_cache=False"):
        y.sum().backward()


def test_what_is_changed_between_forward_and_backward():
    module, x = nn.Linear(8, 8), vectors().requires_grad_()
    h = x * 1
    y = checkpoint(lambda h: h.exp().sin(), h)
    h.mul_(2)
    with pytest.raises(RecomputeMismatch, match="argument of .* was changed in place between forward and backward"):
        y.sum().backward()

    y = checkpoint(module, x * 1).sum()
    y.backward(retain_graph=True)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RecomputeMismatch, match=r"parameter of shape .* step the optimizer after backward"):
        y.backward()


def test_a_function_that_catches_exceptions_does_not_catch_the_stop():
    def fn(x):
        try:
            return x.exp().sin()
        except Exception:
            return x

    x = vectors().requires_grad_()
    checkpoint(fn, x).sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


# Inside the engines, and in the main job.


def train(comm, stage, recompute, dtype):
    model = stage(GPT(dataclasses.replace(SMALL, layers=6, recompute=recompute)), comm, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        x, y = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        with Ledger(model, optimizer) as ledger:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, comm.bytes_sent, ledger.peak["activations"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_every_stage_has_the_same_losses_and_traffic_with_less_activations(stage, dtype):
    results = {way: run(2, train, stage, way, dtype)[0] for way in ("none", "full", "selective")}
    losses, sent, activations = results["none"]
    for way, most in (("full", 0.15), ("selective", 0.75)):
        assert results[way][:2] == (losses, sent)
        assert 0 < results[way][2] < most * activations


def test_a_function_of_several_units_and_verify_under_stage_3():
    class Blocks(nn.Module):
        def __init__(self, way):
            super().__init__()
            torch.manual_seed(0)
            self.blocks, self.way = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), way

        def forward(self, x):
            first, second, third, fourth = self.blocks
            x = self.way(lambda x: torch.sin(second(first(x))), x)
            return self.way(lambda x: fourth(third(x)) + second(x), x).square().mean()

    def losses(comm, stage, model):
        import copy

        model = stage(copy.deepcopy(model), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        result = []
        for step in range(3):
            loss = model(vectors(4, 6, seed=10 * step + comm.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    expected = run(2, losses, Zero3, Blocks(plain))
    for way in (checkpoint, verified, nested, selective):
        assert run(2, losses, Zero3, Blocks(way)) == expected


@pytest.mark.slow
def test_the_main_job(tmp_path):
    shapes = ["--width", "16", "--layers", "4", "--heads", "2", "--sequence-length", "8", "--steps", "4"]
    runs = {}
    for way, options in {"none": [], "full": ["--recompute"], "selective": ["--recompute", "selective"]}.items():
        folder = tmp_path / way
        job = [*shapes, "--stage", "3", "--world-size", "2", "--device", "cpu", *options, "--output", str(folder)]
        assert main_job.main(job) == 0
        results = json.loads((folder / "results.json").read_text())
        assert results["config"]["recompute"] == way
        runs[way] = results["runs"][0]
    assert runs["none"]["losses"] == runs["full"]["losses"] == runs["selective"]["losses"]
    held = {way: one["ranks"][0]["peak"]["activations"] for way, one in runs.items()}
    assert held["full"] < held["selective"] < held["none"]


@pytest.mark.parametrize("way", ["none", "full", "selective"])
def test_the_estimate_is_near_what_a_step_holds(way):
    config = GPTConfig(layers=8, recompute=way)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8 * 64).view(8, 64) % 256
    with Ledger(model, optimizer) as ledger:
        model(tokens, tokens).backward()
        optimizer.step()
    assert 0.8 < estimate(config, 1, [0], 8, torch.float32) / ledger.peak["total"] < 2


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_dropout_repeats_and_the_generator_is_set_back(way):
    def results(way):
        module, x = block().cuda(), vectors().cuda().requires_grad_()
        torch.manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16):
            y = way(module, x * 1)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in module.parameters()), torch.rand(3, device="cuda")]

    assert equal(results(WAYS[way]), results(plain))
