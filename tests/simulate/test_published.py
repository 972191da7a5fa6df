"""The simulator against what others measured: what is fitted, and what is then predicted."""

import dataclasses

import numpy as np
import pytest

from minizero.simulate import CLUSTERS, Plan, fits, model, simulate
from minizero.simulate.fits import fit, least_squares, run
from minizero.simulate.published import PUBLICATIONS, TORCHTITAN_GIB
from minizero.simulate.report import ruler_errors

ROCE = PUBLICATIONS["PyTorch FSDP"].cluster


def test_least_squares_finds_known_constants():
    x = np.linspace(0, 3, 20)
    found = least_squares(lambda c: c[0] * np.exp(-c[1] * x) + c[2] - (2 * np.exp(-1.5 * x) + 0.3), [1.0, 1.0, 0.0])
    assert found == pytest.approx([2, 1.5, 0.3], abs=1e-4)


# MosaicML, llm-foundry.


def test_llm_foundry_at_512_gpus_is_predicted_from_128_and_256():
    one = fit("llm-foundry")
    assert len(one.efficiencies) == 6 and len(one.shared) <= 3
    assert all(row.fitted == (row.plan.ranks < 512) for row in one.publication.rows)
    errors = np.abs(one.errors(fitted=False))
    line, flat = (np.abs(of).mean() for of in ruler_errors(one))
    assert len(errors) == 6
    assert errors.mean() <= 0.018, "half of the error of no change since 256"
    assert errors.mean() < line < flat and flat == pytest.approx(0.0361, abs=1e-3)
    assert np.abs(one.errors(fitted=True)).max() < 0.005


@pytest.fixture
def changed(monkeypatch):
    """Fits a publication of which some rows say something else."""

    def refit(name, fitted, factor):
        one = PUBLICATIONS[name]
        rows = [dataclasses.replace(r, value=r.value * (factor if r.fitted == fitted else 1)) for r in one.rows]
        monkeypatch.setitem(fits.PUBLICATIONS, name, dataclasses.replace(one, rows=tuple(rows)))
        return fit.__wrapped__(name)  # past the cache

    return refit


def test_a_fit_looks_at_nothing_that_it_predicts(changed):
    name = "Megatron-LM, ZeRO-3"
    before = fit(name)
    assert changed(name, False, 2.0).shared == before.shared
    assert changed(name, True, 0.5).shared["network"] < before.shared["network"]


def test_constants_make_sense():
    for name in PUBLICATIONS:
        one = fit(name)
        assert all(0.05 < value < 0.8 for value in one.efficiencies.values()), one.efficiencies
        assert 0 < one.shared["interference"] < 1 and 0 <= one.shared.get("jitter", 0) < 0.02


# Megatron-LM's table of ZeRO-3.


def test_megatrons_second_model_is_predicted_from_the_first():
    one = fit("Megatron-LM, ZeRO-3")
    assert {row.model for row in one.publication.rows if row.fitted} == {"megatron-175b"}
    assert len(one.errors(fitted=False)) == 3 and np.abs(one.errors(fitted=False)).max() < 0.15
    large = [value for row, value in zip(one.publication.rows, one.values) if row.model == "megatron-530b"]
    assert large[0] > large[1] > large[2]


# PyTorch FSDP's paper.


def strategies(name, dtype, efficiency, shared, gpus=16):
    """Full sharding, hybrid, full replication and DDP."""
    kinds = ({}, {"sharding_factor": 8}, {"sharding_factor": 1}, {"stage": 0})
    plans = [Plan(gpus, batch_size=8, recompute="full", dtype=dtype, **kind) for kind in kinds]
    return [run(ROCE, name, plan, efficiency, shared) for plan in plans]


@pytest.mark.parametrize("name", ["t5-611m", "t5-2.28b"])
def test_small_t5_fits_under_every_strategy_and_all_are_similar(name):
    one = fit("PyTorch FSDP")
    steps = strategies(name, "float32", one.efficiencies[f"{name} float32"], one.shared)
    assert all(step.fits for step in steps)
    assert min(s.tflops for s in steps) > 0.9 * max(s.tflops for s in steps)


def test_t5_11b_runs_out_of_memory_under_ddp_and_is_faster_in_16_bits():
    one = fit("PyTorch FSDP")
    # In FP32 nothing is published for 11B: even at the share of the peak that 16 bits reach it would be slower.
    for dtype in ("float32", "bfloat16"):
        full, hybrid, replicated, ddp = strategies("t5-11b", dtype, one.efficiencies["t5-11b"], one.shared)
        assert full.fits and hybrid.fits and not replicated.fits and not ddp.fits
    slow = strategies("t5-11b", "float32", one.efficiencies["t5-11b"], one.shared)[0]
    assert full.tflops > 1.5 * slow.tflops


def test_t5_11b_loses_7_percent_from_8_to_512_gpus():
    one = fit("PyTorch FSDP")
    drops = {}
    for row, value in zip(one.publication.rows, one.values):
        if row.model == "t5-11b" and row.against is not None:
            drops[row.plan.batch_size] = 1 - value
            assert row.fitted == (row.plan.batch_size == 8)
    assert drops == pytest.approx({8: 0.07, 16: 0.07}, abs=0.03)


def test_gpt_175b_scales_linearly_from_128_to_512():
    one = fit("PyTorch FSDP")
    for batch in (1, 2):
        few, many = (one.run("gpt-175b", Plan(n, batch_size=batch, recompute="full")) for n in (128, 512))
        assert many.tflops / few.tflops == pytest.approx(1, abs=0.05)
        assert many.exposed_seconds < 0.02 * many.seconds
    with pytest.raises(ValueError, match="has no efficiency for gpt2-xl"):
        one.run("gpt2-xl", Plan(8))


def test_ddp_and_hybrid_are_predicted_within_10_percent():
    one = fit("PyTorch FSDP")
    rows = [(row, value) for row, value in zip(one.publication.rows, one.values) if not row.fitted and row.about]
    assert len(rows) == 3  # DDP twice, and hybrid sharding
    assert all(value == pytest.approx(row.value, rel=0.1) for row, value in rows)


# torchtitan.


def test_torchtitans_memory_falls_as_published_from_8_to_128_gpus():
    one = fit("torchtitan")
    few, many = (run(one.publication.cluster, row.model, row.plan, 0.4, {}) for row in one.publication.rows)
    predicted = (few.memory["total"] - many.memory["total"]) / 2**30
    assert predicted == pytest.approx(TORCHTITAN_GIB[8] - TORCHTITAN_GIB[128], rel=0.15)
    assert np.abs(one.errors(fitted=False)).max() < 0.05


def test_out_of_memory_is_where_the_states_do_not_fit():
    """16 bytes for a parameter on 80 GiB."""
    fitting = [
        simulate(model(name), CLUSTERS["a100-80"], Plan(1, stage=0, dtype="float32", recompute="full")).fits
        for name in ("t5-611m", "t5-2.28b", "mpt-7b", "t5-11b")
    ]
    assert fitting == [True, True, False, False]
