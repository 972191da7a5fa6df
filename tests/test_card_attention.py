"""What lessons 07 and 07b measure on a card has the form of what is recorded. Here it is small, and on a CPU."""

from functools import partial

import torch

from notebooks.tools import card, card_attention


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
    recorded = card.recorded("flash, first blocks", "h200")
    monkeypatch.setattr(card, "CUDA", True)
    monkeypatch.setattr(card_attention, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert card.figures("flash, first blocks", card_attention.against_length) == recorded
    assert "on this GPU: our kernels need" in capsys.readouterr().out
