"""The simulator against what others measured: what is fitted, and what is then predicted. Lesson 08 tells the rest."""

import dataclasses

import numpy as np
import pytest

from minizero.simulate import Strategy, fits
from minizero.simulate.fits import fit, least_squares
from minizero.simulate.published import PUBLICATIONS


def test_least_squares_finds_known_constants():
    x = np.linspace(0, 3, 20)
    found = least_squares(lambda c: c[0] * np.exp(-c[1] * x) + c[2] - (2 * np.exp(-1.5 * x) + 0.3), [1.0, 1.0, 0.0])
    assert found == pytest.approx([2, 1.5, 0.3], abs=1e-4)


# How many rows are predicted, and the largest errors of these and of the fitted ones.
LARGEST = {
    "llm-foundry": (6, 0.03, 0.005),
    "Megatron-LM, ZeRO-3": (3, 0.15, 0.01),
    "PyTorch FSDP": (6, 0.1, 1e-3),
    "torchtitan": (1, 0.05, 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLICATIONS)
def test_what_was_not_fitted_is_predicted_with_constants_that_make_sense(name):
    one = fit(name)
    predicted, fitted = (np.abs(one.errors(fitted=which)) for which in (False, True))
    count, most, most_fitted = LARGEST[name]
    assert len(predicted) == count and predicted.max() < most and fitted.max() < most_fitted
    assert all(0.05 < value < 0.8 for value in one.efficiencies.values()), one.efficiencies
    assert 0 < one.shared["interference"] < 1 and 0 <= one.shared.get("jitter", 0) < 0.02


def test_a_model_of_no_row_has_no_efficiency():
    with pytest.raises(ValueError, match="has no efficiency for gpt2-xl"):
        fit("PyTorch FSDP").run("gpt2-xl", Strategy(8))


def test_a_fit_looks_at_nothing_that_it_predicts(monkeypatch):
    name = "Megatron-LM, ZeRO-3"

    def changed(fitted, factor):
        """Of the publication, some of whose rows say something else."""
        one = PUBLICATIONS[name]
        rows = [dataclasses.replace(r, value=r.value * (factor if r.fitted == fitted else 1)) for r in one.rows]
        monkeypatch.setattr(fits, "PUBLICATIONS", PUBLICATIONS | {name: dataclasses.replace(one, rows=tuple(rows))})
        return fit.__wrapped__(name)  # past the cache

    before = fit(name)
    assert changed(False, 2.0).shared == before.shared
    assert changed(True, 0.5).shared["network"] < before.shared["network"]
