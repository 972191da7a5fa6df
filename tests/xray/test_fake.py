"""A step on fake tensors holds, byte for byte and category by category, what the real step does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero.ranks.one_of_many import one_of_many
from minizero.xray.case import Case, NotPossible, case_of
from minizero.xray.fake import Pretend, build, pretend
from minizero.xray.plan import Plan
from minizero.xray.step import measure
from tests.support.xray_cases import OWN, adamw, allocated, fake, real

IN_MAKE_TEST = ("GPT", "LSTM", "UNet", "resnet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.real] * (name not in IN_MAKE_TEST)) for name in OWN]
)
def test_fake_is_real(name):
    assert fake(OWN[name], Plan()) == real(OWN[name], Plan())


class Activation(nn.Module):
    """Two layers, each with an activation of its own."""

    def __init__(self, function):
        super().__init__()
        self.layers, self.function = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), function

    def forward(self, x):
        for layer in self.layers:
            x = self.function(layer(x))
        return x.mean()


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, lambda x: F.glu(torch.cat([x, x], 1))])
def test_the_allocator_hands_out_as_many_bytes(function):
    def make():
        return Activation(function), (torch.randn(512, 64),)

    assert fake(make, Plan()).peak["total"] == allocated(make)


@pytest.mark.parametrize("name", ["GPT", "UNet"])
def test_every_moment_of_the_curve_is_real(name):
    module, inputs = OWN[name]()
    with pretend() as mode:
        without = measure(mode.copy(module), mode.copy(inputs), Plan(), adamw, one_of_many(1))
    numbers = measure(copy.deepcopy(module), inputs, Plan(), adamw, one_of_many(1))
    assert without.ledger.curve == numbers.ledger.curve


def optimizers():
    optim = torch.optim
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adamax, optim.NAdam):
        yield kind.__name__, lambda parameters, kind=kind: kind(parameters, lr=1e-3)
    yield "AdamW, foreach", lambda parameters: optim.AdamW(parameters, foreach=True)
    yield "AdamW, fused", lambda parameters: optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize(
    "make", [pytest.param(m, id=name, marks=[pytest.mark.slow] * ("," not in name)) for name, m in optimizers()]
)
def test_optimizers(make):
    assert fake(OWN["GPT"], Plan(), make) == real(OWN["GPT"], Plan(), make)


def test_a_parameter_that_is_not_used_has_no_states():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 64)

        def forward(self, x):
            return self.used(x).sum()

    def make():
        return Half(), (torch.ones(2, 8),)

    for plan in (Plan(), Plan(micro_batches=2), Plan(stage=1, ranks=2), Plan(stage=0, ranks=2)):
        assert fake(make, plan) == real(make, plan), plan


class Beside(TorchDispatchMode):
    """Runs each operator on real tensors, and on fake ones; notes those whose results own other bytes."""

    def __init__(self):
        super().__init__()
        self.different = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        mode = Pretend()
        converted = tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t.detach(), static_shapes=True), (args, kwargs or {})
        )
        result = func(*args, **kwargs or {})
        with mode:
            faked = func(*converted[0], **converted[1])
        for a, b in zip(tree_leaves(result), tree_leaves(faked)):
            if isinstance(a, torch.Tensor) and a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
                self.different.add(str(func))
        return result


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


X = (8, 16)
CASES = {
    "mse_loss": lambda: F.mse_loss(leaf(*X), torch.rand(X)),
    "mse_loss, unreduced": lambda: F.mse_loss(leaf(*X), torch.rand(X), reduction="none"),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(leaf(*X), torch.rand(X)),
    "soft_margin_loss": lambda: F.soft_margin_loss(leaf(*X), torch.rand(X)),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(leaf(*X).sigmoid(), torch.rand(X)),
    "l1_loss": lambda: F.l1_loss(leaf(*X), torch.rand(X)),
    "huber_loss": lambda: F.huber_loss(leaf(*X), torch.rand(X)),
    "kl_div": lambda: F.kl_div(leaf(*X).log_softmax(1), torch.rand(X).softmax(1), reduction="batchmean"),
    "cross_entropy": lambda: F.cross_entropy(leaf(*X), torch.randint(16, (8,)), label_smoothing=0.1),
    "LSTM": lambda: nn.LSTM(16, 16, 2, batch_first=True)(leaf(4, 9, 16))[0],
    "convolutions": lambda: (nn.Conv1d(4, 8, 3)(leaf(2, 4, 9)), nn.ConvTranspose2d(4, 8, 3)(leaf(2, 4, 9, 9))),
    "pools": lambda: (F.max_pool2d(leaf(2, 4, 8, 8), 2), F.adaptive_avg_pool2d(leaf(2, 4, 9, 9), 4)),
    "norms": lambda: (
        nn.BatchNorm2d(4)(leaf(2, 4, 8, 8)),
        nn.GroupNorm(2, 4)(leaf(2, 4, 8, 8)),
        nn.LayerNorm(8)(leaf(2, 8)),
    ),
    "activations": lambda: tuple(f(leaf(4, 8)) for f in (F.gelu, F.silu, F.relu, F.mish, F.softplus, F.glu, F.dropout)),
    "attention": lambda: F.scaled_dot_product_attention(*(leaf(2, 4, 64, 16) for _ in range(3)), is_causal=True),
    "attention, dropout": lambda: F.scaled_dot_product_attention(
        *(leaf(2, 4, 64, 16) for _ in range(3)), dropout_p=0.1
    ),
    "interpolate": lambda: F.interpolate(leaf(2, 4, 8, 8), scale_factor=2, mode="bilinear"),
    "einsum": lambda: torch.einsum("bij,bjk->bik", leaf(2, 3, 4), leaf(2, 4, 5)),
    "indices": lambda: (leaf(5, 4)[torch.tensor([1, 2])], leaf(5, 4).gather(0, torch.zeros(2, 4, dtype=torch.long))),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_owns_the_bytes_that_its_fake_says(name):
    """New releases of PyTorch are watched by this."""
    with Beside() as beside:
        results = [tensor for tensor in tree_leaves(CASES[name]()) if tensor.requires_grad]
        sum(tensor.sum() for tensor in results).backward()
    assert beside.different == set()


def test_what_shares_memory_shares_it_again_and_nothing_with_the_original():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    model.register_buffer("part", model.table[5:])
    with pretend() as mode:
        copied = mode.copy(model)
        assert copied[1].weight is copied[0].weight
        storages = [tensor.untyped_storage() for tensor in (copied.table, copied.part, model.table)]
        assert storages[0] is storages[1] and storages[0] is not storages[2]
        assert copied.part.storage_offset() == 5
        assert isinstance(copied[0].weight, nn.Parameter) and copied[0].weight.device.type == "cpu"
    assert model[0].weight.abs().sum() > 0  # the original has its numbers


def test_what_looks_at_a_number_while_it_is_built_is_built_for_real():
    built = []

    def make():
        built.append(float(torch.ones(()).sum()))
        return nn.Linear(1, 1), (torch.ones(1, 1),)

    assert not build(make)[0].weight.is_meta and len(built) == 1  # on meta it raised
    assert build(lambda: nn.Linear(1, 1)).weight.is_meta


class Looks(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(self.how(x)).mean()


@pytest.mark.parametrize(
    "how, words",
    [
        (lambda x: x * x.sum().item(), "looks at a tensor's value"),
        (lambda x: x if x.sum() > 0 else -x, "looks at a tensor's value"),
        (lambda x: x[x.sum(1) > 0], "a shape depends on a tensor's values"),
    ],
)
def test_code_that_needs_a_number_is_refused_with_its_line(how, words):
    case = Case(Looks(how), (torch.ones(2, 4),))
    with pytest.raises(NotPossible, match=rf"{words}.*test_fake\.py:\d+"):
        case.run(Plan())


@pytest.mark.slow  # it loads PyTorch's compiler
def test_what_is_compiled_runs_uncompiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    compiled = torch.compile(model)

    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).mean()

    x = (torch.ones(2, 4),)
    assert Case(Around(compiled), x).run(Plan()).peak == Case(Around(model), x).run(Plan()).peak


@pytest.mark.parametrize("made", [nn.Linear(1, 1), (nn.Linear(1, 1),), ("model", torch.ones(1))])
def test_make_must_return_a_model_and_its_inputs(made):
    with pytest.raises(ValueError, match="must return a model and its inputs|must be a torch.nn.Module"):
        case_of(lambda: made)


def test_a_make_that_fails_is_told_with_its_line():
    def make():
        return nn.Linear(1, 1).to("xpu:7"), ()

    with pytest.raises(NotPossible, match=r"make\(\) failed: .*\(test_fake\.py:\d+\): it runs on the CPU"):
        case_of(make)


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(NotPossible, match=r"returned a tensor of shape \(2, 3\), which has no loss"):
        Case(nn.Linear(4, 3), (torch.ones(2, 4),)).run(Plan())


def test_a_default_device_of_the_caller_is_for_the_model_alone():
    """Under `with torch.device("meta")` an optimizer makes its counters there, and PyTorch 2.11 reads them."""
    plans = [Plan(), Plan(micro_batches=2)]  # side by side, after a step that has run here
    expected = [fake(OWN["GPT"], plan).peak["total"] for plan in plans]
    with torch.device("meta"):
        case = Case(*OWN["GPT"]())
        case.run_all(plans)
    assert [getattr(case.found[plan], "peak", {}).get("total") for plan in plans] == expected
