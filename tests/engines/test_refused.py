"""What an engine refuses, and says so, since it would otherwise be silently wrong or hang."""

import inspect

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, RankFailed, Zero1, Zero3
from tests.support.helpers import SMALL, STAGES, run, train


def refused(kind, stage, make, step=None, **options):
    """What the error says that wrapping, or one step, ends in."""

    def work(comm):
        model = stage(make(), comm, **options)
        step(model)

    with pytest.raises(RankFailed) as failure:
        run(2, work)
    assert type(failure.value.__cause__) is kind, failure.value
    return str(failure.value.__cause__)


@pytest.mark.parametrize("stage", STAGES)
def test_modules(stage):
    def synchronised():
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))

    assert f"{stage.__name__}: 1 is a SyncBatchNorm" in refused(ValueError, stage, synchronised)

    def tied_by_data():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = nn.Parameter(module[0].weight.data)
        return module

    assert "1.weight and 0.weight are two parameters in one memory" in refused(ValueError, stage, tied_by_data)
    complex_numbers = refused(ValueError, stage, lambda: nn.Linear(2, 2, dtype=torch.complex64))
    assert f"{stage.__name__}: parameters must be float32, weight is torch.complex64" in complex_numbers


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(stage, kind):
    def sparse():
        return nn.Sequential(kind(10, 4, sparse=True), nn.Linear(4, 4))

    message = refused(ValueError, stage, sparse)
    assert f"{stage.__name__}: 0 gives sparse gradients, shards are dense: sparse=False" in message

    def backward(comm):
        module = sparse()
        module[0].requires_grad_(False)  # without a gradient it does no harm
        stage(module, comm)(torch.tensor([[3]])).sum().backward()

    run(2, backward)


class LooksUp(nn.Linear):
    def forward(self, x):
        return nn.functional.embedding(x, self.weight, sparse=True)


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_that_no_module_announces(stage):
    message = refused(RuntimeError, stage, lambda: LooksUp(4, 4), lambda m: m(torch.tensor([3])).sum().backward())
    assert "root: sparse gradients are not supported: use sparse=False" in message


# Optimizers. A shard is a piece of a flat buffer: it serves where every number is updated by itself.


def optimizers():
    kinds = (getattr(torch.optim, name) for name in dir(torch.optim))
    kinds = (kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer))
    return [kind for kind in kinds if kind is not torch.optim.Optimizer]


WHOLE = {"LBFGS", "Adafactor", "Muon"}


@pytest.mark.slow
@pytest.mark.accuracy
@pytest.mark.parametrize("kind", optimizers(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stage", [Zero1, Zero3])
def test_every_optimizer_of_torch_gives_ddps_bits_or_is_refused(stage, kind):
    if kind is torch.optim.SparseAdam:
        pytest.skip("for sparse gradients only")
    if kind.__name__ not in WHOLE:
        expected, got = run(2, train, DDP, 3, optimizer=kind), run(2, train, stage, 3, optimizer=kind)
        for (losses, state, _), (our_losses, our_state, _) in zip(expected, got, strict=True):
            assert our_losses == losses and all(torch.equal(our_state[name], p) for name, p in state.items())
    else:

        def step(model):
            optimizer = kind(model.parameters())
            optimizer.step(lambda: None) if kind is torch.optim.LBFGS else optimizer.step()

        kinds = ValueError if kind.__name__ == "Muon" else RuntimeError  # Muon itself wants matrices
        message = refused(kinds, stage, lambda: GPT(SMALL), step)
        assert kind.__name__ in message and ("whole tensors" in message or "2D parameters" in message)


def test_what_derives_from_a_refused_optimizer_is_refused_too():
    class Mine(torch.optim.Adafactor):
        pass

    message = refused(RuntimeError, Zero3, lambda: GPT(SMALL), lambda model: Mine(model.parameters()).step())
    assert "Mine needs whole tensors, Zero3 gives it flat shards: use DDP" in message


class Foreign(torch.optim.AdamW):
    """It may do anything in `step`: only its user knows."""


@pytest.mark.parametrize("stage, options", [(Zero1, {}), (Zero3, {}), (DDP, {"dtype": torch.bfloat16})])
def test_a_foreign_optimizer_is_asked_about_once(stage, options):
    def step(model):
        optimizer = Foreign(model.parameters())
        with pytest.raises(RuntimeError, match=f"{stage.__name__} gives Foreign flat shards.*elementwise = True"):
            optimizer.step()
        optimizer.elementwise = True
        optimizer.step()

    run(2, lambda comm: step(stage(GPT(SMALL), comm, **options)))
    run(2, lambda comm: Foreign(DDP(GPT(SMALL), comm).parameters()).step())  # DDP in FP32 gives whole tensors


class Around(nn.Module):
    def __init__(self, engine):
        super().__init__()
        self.engine, self.head = engine, nn.Linear(2, 2)


@pytest.mark.parametrize("around", [Around, lambda model: torch.compile(model, backend="eager")])
@pytest.mark.parametrize("stage", [Zero1, Zero3])
def test_an_optimizer_of_a_module_around_the_wrapped_model_is_told_so(stage, around):
    def step(model):
        torch.optim.SGD(around(model).parameters(), lr=0.1).step()

    message = refused(RuntimeError, stage, lambda: nn.Linear(2, 2), step)
    assert f"not {stage.__name__}'s shards" in message and "from a module around the wrapped model" in message
    assert f"from the parameters() of the {stage.__name__} itself" in message


@pytest.mark.parametrize("stage", STAGES)
def test_a_shard_that_was_given_other_memory(stage):
    def step(model):
        shards = list(model.parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(shards).detach().clone(), shards)
        torch.optim.SGD(shards, lr=0.1).step()

    message = refused(RuntimeError, stage, lambda: nn.Linear(4, 4), step)
    assert f"{stage.__name__}: a shard no longer lies in its unit's memory" in message
