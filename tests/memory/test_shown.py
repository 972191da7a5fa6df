"""A ledger's data and its picture say the same."""

import json

import pytest
import torch

from minizero import GPT
from minizero.memory import Ledger
from tests.support.ledger_gpt import CONFIG, TOKENS


def test_a_summary_is_plain_data():
    model = GPT(CONFIG)
    with Ledger(model) as ledger:
        model(TOKENS, TOKENS).backward()
    summary = ledger.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["peak"] == ledger.peak and summary["holders"] == ledger.holders
    curve = summary["curve"]
    assert curve["total"] == [sample["total"] for sample in ledger.curve]
    assert len(set(map(len, curve.values()))) == 1 and curve["number"] == sorted(curve["number"])
    moment = curve["total"].index(ledger.peak["total"])
    assert curve["phase"][moment] == "backward" and curve["operator"][moment].startswith("aten.")


def test_a_picture_says_what_it_cannot_see():
    with Ledger() as ledger:
        for _ in range(3):
            torch.ones(1000) + 1
    axes = ledger.plot()
    assert "operators" in axes.get_xlabel() and "not seen" in axes.get_xlabel()
    assert "12 bytes" in ledger.plot(axes, "12 bytes").get_xlabel()
    peak = next(line for line in axes.lines if line.get_marker() == "o")
    assert peak.get_ydata()[0] * 2**20 == pytest.approx(ledger.peak["total"])
    assert ledger.curve[-1].number == 6  # operators
    assert 1 <= peak.get_xdata()[0] <= axes.get_xlim()[1] == 7
