"""What lessons 07 and 07b measure on a card has the form of what is recorded. Here it is small, and on a CPU."""

from functools import partial

import pytest
import torch

from notebooks.tools import card, card_attention
from notebooks.tools.attention_pictures import draw_rates

RECORDED = card.recorded("flash, first blocks", "h200")


def test_measured_here_it_has_the_form_of_the_recorded_part(monkeypatch):
    monkeypatch.setattr(card_attention, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(card_attention, "measure", partial(card_attention.measure, tokens=64, width=128))
    monkeypatch.setattr(card_attention, "matmul_rate", lambda dtype: 3e12)
    monkeypatch.setattr(card_attention, "copy_bandwidth", lambda elements: 2e12)
    monkeypatch.delitem(card_attention.LABELS, "flex")  # which would be compiled for seconds
    run = card.Run("a CPU", card_attention.against_length())
    assert {"d 64, full, N 16", "d 64, full, N 32", "d 64, full, N 64", "matmul"} <= run.figures.keys()
    for which in ("forward", "backward", "memory"):
        found = card_attention.by_length(run, which)
        assert {"our kernels", "plain, in two lines", "MATH, plain in FP32"} <= found.keys()
        assert all(list(its) == [16, 32, 64] for its in found.values())
    assert card_attention.ceilings(run) == (2e12, 3e12, 3e12) and run.figures["rows"] > 0


def test_an_old_card_is_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(card, "CUDA", True)
    monkeypatch.setattr(card_attention, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert card.figures("flash, first blocks", card_attention.against_length) == RECORDED
    assert "on this GPU: our kernels need" in capsys.readouterr().out


def test_milliseconds_are_those_of_the_recorded_rates():
    rates = card_attention.by_length(RECORDED, "backward")
    rows = {label: its for label, *its in card_attention.milliseconds(rates, products=5)}
    heads, texts = 2048 // 64, 16384 // 4096
    assert rows["our kernels"][1] == pytest.approx(2.5 * 4 * 4096**2 * 64 * heads * texts / 211.5e12 * 1e3)
    assert rows["MATH, plain in FP32"][2] == "–"  # it is not there, and neither is a point
    assert draw_rates("a card", 774, rates).axes[0].lines


def test_ceilings_are_of_the_same_card_or_none():
    copy, matmul, in_fp32 = card_attention.ceilings(RECORDED)
    assert 4e12 < copy < 4.8e12 and 770e12 < matmul < 989e12 and 50e12 < in_fp32 < 67e12
    assert card_attention.ceilings(RECORDED._replace(card="another")) is None
