"""Sharding factor, resharding, offload: the same training, other bytes and another traffic, as the formulas say."""

import functools

import pytest
import torch

from minizero import GPT, Zero3
from minizero.accumulate import accumulate
from minizero.memory import Ledger, predict, predict_sent
from tests.support.helpers import SMALL, STAGES, batch, exactly, plain, relative_error, run, same, slow, soak, train
from tests.support.small_models import Blocks, fit, fit_plain, held_back, seeded
from tests.support.stage_bytes import BLOCK, CONFIG, ROOT, TOTAL, measure, most


def factored(factor, **options):
    """Zero3 with a sharding factor, as a stage for `helpers.train`."""
    return lambda module, comm, **more: Zero3(module, comm, sharding_factor=factor, **options, **more)


MORE = slow((2, 2, None), (4, 1, None), (4, 2, 0.5), (6, 2, None), (6, 3, None))


@pytest.mark.parametrize("size, factor, clip", [(4, 2, None), *MORE])
def test_the_training_is_the_same(size, factor, clip):
    """Without clipping, which would hide a gradient that is too large."""
    results = run(size, train, factored(factor), 4, eps=1e-4, clip=clip)
    losses, expected = plain(4, eps=1e-4, clip=clip)
    assert torch.tensor([r[0] for r in results]).mean(0).tolist() == pytest.approx(losses, rel=1e-5)
    for _, state, _ in results:
        assert same(state, results[0][1]) and relative_error(state, expected) < 1e-5


BF16 = torch.bfloat16
FORMULAS = [(0, 3, None, None), (1, 3, None, BF16), (2, 3, None, None), (3, 3, None, BF16), (3, 4, 2, None)]


@pytest.mark.parametrize(
    "stage, size, factor, dtype", [*FORMULAS, *slow((3, 4, 1, None), (3, 4, 4, None), (3, 8, 4, None))]
)
def test_bytes_and_traffic_are_the_formulas(stage, size, factor, dtype):
    """But for padding, and Adam's counts of steps."""
    held, _, sent, across = run(size, measure, factored(factor) if stage == 3 else STAGES[stage], dtype)[-1]
    for category, expected in predict(TOTAL, size, stage, dtype=dtype or torch.float32, sharding_factor=factor).items():
        if category != "total":
            assert held[category] == pytest.approx(expected, rel=5e-3), category
    options = {"bytes_each": 2 if dtype else 4, "sharding_factor": factor}
    assert sent == pytest.approx(predict_sent(TOTAL, size, stage, n_root=ROOT, **options), rel=1e-3)
    if factor and factor < size:  # 2 M (W - G) / (G W), Zhao et al., 2023
        assert across == pytest.approx(4 * 2 * TOTAL * (size - factor) / (factor * size), rel=1e-3)


def test_without_resharding_parameters_are_gathered_once_and_kept_until_backward():
    kept, one = factored(None, reshard_after_forward=False, prefetch=0), factored(None, prefetch=0)
    (held, curve, sent, _), (held3, curve3, sent3, _) = (run(2, measure, stage)[0] for stage in (kept, one))
    assert sent == predict_sent(TOTAL, 2, 3, n_root=ROOT, reshard_after_forward=False)
    assert sent == pytest.approx(sent3 * 2 / 3, rel=0.03)
    assert held == held3
    peak, peak3 = (most(each, "parameters", "forward") for each in (curve, curve3))
    assert peak - peak3 == pytest.approx(4 * 3 * BLOCK, rel=0.01)  # all four blocks at once, not one

    def evaluate(comm):
        model = Zero3(GPT(CONFIG), comm, reshard_after_forward=False)
        with Ledger(model) as ledger, torch.no_grad():
            model(*batch(0, size=2, config=CONFIG))
        return ledger.peak["parameters"]

    assert run(2, evaluate)[0] < peak3 + 1000  # no backward will come: nothing is kept


@pytest.mark.parametrize("factor", [1, 2])
def test_what_no_sync_holds_back_is_the_same(factor):
    expected = fit_plain(seeded(Blocks), forward=held_back)
    for state in run(4, fit, Zero3, seeded(Blocks), forward=held_back, sharding_factor=factor):
        assert relative_error(state, expected) < 1e-5


def test_a_factor_that_does_not_divide_the_ranks_and_what_is_no_number_of_units_are_refused():
    def work(comm):
        for factor in (0, -1, 3, 5, 2.0, 4.0, "2"):
            with pytest.raises(ValueError, match="does not divide 4 ranks: use 1, 2, 4"):
                Zero3(GPT(SMALL), comm, sharding_factor=factor)
        for prefetch in (-1, 1.5, "2"):
            with pytest.raises(ValueError, match="prefetch: .* whole number of units"):
                Zero3(GPT(SMALL), comm, prefetch=prefetch)
        model = Zero3(GPT(SMALL), comm, sharding_factor=2)
        return model.inside.size, model.across.size

    assert run(4, work) == [(2, 2)] * 4


@pytest.mark.parametrize("dtype", [None, *slow(BF16)])
def test_states_under_offload_are_on_the_host_and_no_total_contains_them(dtype):
    (held, curve, *_), (without, device, *_) = (
        run(2, measure, functools.partial(Zero3, **options), dtype)[0] for options in ({"offload": True}, {})
    )
    states = predict(TOTAL, 2, 3, dtype=dtype or torch.float32)["total"]
    assert held["host"] == pytest.approx(states, rel=0.01) and without["host"] == 0 and held["total"] <= 8
    assert all(held[category] == 0 for category in ("parameters", "gradients", "optimizer"))
    assert max(s["optimizer"] for s in curve) == 0 < max(s["optimizer"] for s in device)
    before = states - predict(TOTAL, 2, 3)["gradients"]  # of which few are there when the device holds most
    assert max(s["total"] for s in curve) <= max(s["total"] for s in device) - 0.95 * before


OPTIONS = [*soak({"sharding_factor": 2}), {"offload": True}, {"offload": True, "sharding_factor": 2}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.slow
def test_accumulation_reduces_once_or_with_every_micro_batch(options):
    """One gradient to rounding; the full one is held, or it is not."""

    def gradient(comm, no_sync, **options):
        model = Zero3(GPT(CONFIG), comm, **options)
        with Ledger(model) as ledger:
            accumulate(model, [batch(10 * comm.rank + i, 2, CONFIG) for i in range(3)], no_sync=no_sync)
        return torch.cat([shard.grad for shard in model.parameters()]), ledger.peak["gradients"]

    size = options.get("sharding_factor", 1) * 2
    (once, most_of_once), (each, most_of_each) = (
        run(size, gradient, no_sync, **options)[0] for no_sync in (True, False)
    )
    if "sharding_factor" not in options:
        exactly(once, run(size, gradient, True)[0][0])
    torch.testing.assert_close(each, once, rtol=1e-4, atol=1e-6)
    assert most_of_each < 0.9 * 4 * TOTAL <= 0.9 * most_of_once
