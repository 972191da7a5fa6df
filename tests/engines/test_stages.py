"""The four stages compute the same numbers as each other, as one process, and as PyTorch's own engines."""

import functools

import pytest
import torch
from torch import nn

from minizero import DDP, GPT, Zero3
from tests.support.helpers import SMALL, STAGES, exactly, plain, relative_error, run, slow, train
from tests.support.small_models import SAME_BITS, Blocks, on_ranks, seeded, vectors, wrapped


@pytest.mark.parametrize("world_size, steps", [(2, 6), *slow((4, 20))])
def test_they_are_bit_identical_and_agree_with_one_process(world_size, steps):
    results = {stage: run(world_size, train, stage, steps, eps=1e-4) for stage in STAGES}
    state = results[DDP][0][1]
    for ranks in results.values():
        exactly([rank[:2] for rank in ranks], [(losses, state) for losses, *_ in results[DDP]])
    one_losses, one_state = plain(steps, eps=1e-4)
    mean = [sum(step) / world_size for step in zip(*(rank[0] for rank in results[DDP]))]
    assert mean == pytest.approx(one_losses, rel=1e-6) and relative_error(state, one_state) < 1e-6
    assert relative_error(state, GPT(SMALL).state_dict()) > 1e-2  # something was trained


@pytest.mark.parametrize("world_size", [3, *slow(7)])  # neither divides the units
def test_clipping_takes_the_norm_over_all_ranks_and_counts_every_number_once(world_size):
    """Each norm in turn, and each makes the gradients a third of what they were."""

    def clip(comm, engine, times):
        model, found = engine(seeded(Blocks)(), comm), []
        model(vectors(0)).sum().backward()
        for turn, (norm_type, norm) in enumerate(expected.items()):
            most = times * norm / 3**turn
            found.append(model.clip_grad_norm_(most, norm_type, error_if_nonfinite=True).item())
        return *found, model.clip_grad_norm_(1e9).item()

    module = seeded(Blocks)()
    module(vectors(0)).sum().backward()
    expected = {p: nn.utils.clip_grad_norm_(module.parameters(), 1e9, p).item() for p in (1.0, float("inf"), 2.0)}
    everywhere = [clipped for engine in SAME_BITS for clipped in run(world_size, clip, engine, 1 / 3)]
    assert len(set(everywhere)) == 1  # all stages, all ranks, bit for bit
    for factor in (1, 2):
        everywhere += run(4, clip, functools.partial(Zero3, sharding_factor=factor), 1 / 3)
    one, most, two = expected.values()
    for found in everywhere:
        assert found == pytest.approx((one, most / 3, two / 9, two / 27), rel=1e-4)
    untouched = run(2, clip, Zero3, 10)[0]
    assert untouched == pytest.approx((one, most, two, two), rel=1e-5)


@pytest.mark.parametrize("engine", [*STAGES, *(functools.partial(Zero3, sharding_factor=factor) for factor in (1, 2))])
def test_the_initial_parameters_and_buffers_are_rank_zeros(engine):
    def start(comm):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.fill_(comm.rank + 5)
        module.register_buffer("wide", torch.full((1,), comm.rank + 5.0).expand(7))
        with torch.inference_mode():
            module.register_buffer("table", torch.full((8,), comm.rank + 5.0)[4:])
        model = engine(module, comm)
        return [*model.gather_state_dict().values(), *model.module.buffers()]

    assert all((tensor == 5).all() for tensors in run(4, start) for tensor in tensors)


@on_ranks(make=lambda: nn.Linear(1, 1, bias=False), dtype=torch.bfloat16)
def test_no_sync_sends_nothing_and_adds_up_in_fp32(model, comm):
    """256 + 1 is 256 in bfloat16, however often one adds 1."""
    sent = comm.bytes_sent
    with model.no_sync():
        for x in [256.0] + 8 * [1.0]:
            model(torch.tensor([[x]])).sum().backward()
    assert (comm.bytes_sent > sent) == isinstance(model, Zero3)  # which has to gather parameters
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    model(torch.zeros(1, 1)).sum().backward()
    assert comm.rank or sum(p.grad.sum() for p in model.parameters()) == 264


@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_have_gradient_zero(stage, monkeypatch):
    def poisoned(*size, **options):
        return torch.full(size[0] if isinstance(size[0], tuple) else size, float("nan"), **options)

    monkeypatch.setattr("minizero.engines.any_model.gradient.torch.empty", poisoned)

    @wrapped(stage, lambda: Blocks(lambda net: setattr(net, "spare", nn.Linear(3, 5))))
    def _(model, comm):
        with model.no_sync():
            model(vectors(0)).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        model.zero_grad()
        model(vectors(0), order=(0, 2)).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(g.isfinite().all() for g in gradients) and any((g == 0).all() for g in gradients)
