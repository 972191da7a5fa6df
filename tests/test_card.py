"""Recorded runs of cards: they lie side by side, a broken one is a sentence, and no figure is without its card."""

import json
from functools import partial

import pytest
import torch
from matplotlib.colors import to_rgba

from minizero.pictures.shards import STATES
from minizero.pictures.style import COLORS
from notebooks.tools import card, card_attention, card_memory, recompute


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where runs are recorded: two cards, of which the T4's is newer and has less."""
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    monkeypatch.setattr(card, "CUDA", False)
    for name, date, parts in (
        ("h200", "2026-11-27", {"train": {"figures": {"a": 1}}, "memory": {"figures": {"b": 2}}}),
        ("t4", "2026-12-01", {"train": {"figures": {"a": 3}}}),
        ("demo", "2027-01-01", None),  # no run of `make gpu`
    ):
        data = {"machine": {"card": name.upper(), "date": date}} | ({} if parts is None else {"parts": parts})
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(data))
    return tmp_path


def test_runs_of_several_cards_lie_side_by_side(folder, capsys):
    assert card.recorded("train") == ("T4, recorded 2026-12-01", {"a": 3})  # the newest that has the part
    assert card.recorded("memory") == ("H200, recorded 2026-11-27", {"b": 2})
    assert card.recorded("train", "h200") == ("H200, recorded 2026-11-27", {"a": 1})
    assert capsys.readouterr().out == ""


def test_a_run_that_was_cut_off_or_measured_less_hides_no_other(folder):
    for figures in ({}, {"b": 7}):
        data = {"machine": {"card": "MINE", "date": "2027-02-01"}, "parts": {"memory": {"figures": figures}}}
        (folder / "t4" / "results.json").write_text(json.dumps(data))
        needed = card.recorded("memory", needs=["b", "c"] if figures else [])
        assert needed == (None if figures else ("H200, recorded 2026-11-27", {"b": 2}))
    assert card.recorded("memory", needs=["b"]).card == "MINE, recorded 2027-02-01"


@pytest.mark.parametrize(
    "broken",
    ['{"machine": {"card": "H200", "da', "", "[]", '{"parts": {"memory": 0}}', '{"parts": 5, "machine": {"card": 1}}']
    + ['{"machine": {"card": "H200"}, "parts": {"memory": {"figures": {"b": 2}}}}', "[" * 100_000]
    + ['{"machine": {"card": "H200", "date": "x"}, "parts": {"memory": {"figures": 5}}}'],
)
def test_a_file_that_is_cut_is_a_sentence(folder, broken, capsys):
    (folder / "h200" / "results.json").write_text(broken)
    assert card.recorded("memory") is None and card.recorded("train") is not None
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("No run recorded on a GPU has what is asked for of 'memory'") for line in said)
    assert all(len(line) < 250 for line in said)


def test_a_card_that_fails_is_a_sentence_and_the_recorded_run_stands_in(folder, monkeypatch, capsys):
    def vanish():
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(card, "CUDA", True)
    monkeypatch.setattr(card, "card", lambda: "GONE")
    assert card.figures("memory", vanish) == ("H200, recorded 2026-11-27", {"b": 2})
    assert "memory on this GPU: CUDA error: unspecified launch failure\n" in capsys.readouterr().out
    assert card.figures("memory", lambda: {"b": 5}) == ("GONE, measured now", {"b": 5})


def test_the_allocators_events_become_curves():
    """A block is a multiple of 512 bytes; what is no block, such as an error, changes nothing."""
    actions = [("alloc", 1), ("free_completed", 1), ("free_requested", 1), ("oom", 99), ("segment_alloc", 2**21)]
    events = [{"action": action, "size": size} for action, size in actions]
    assert card_memory.levels(1024, events, "alloc", "free_requested") == [1024, 1536, 1536, 1024, 1024, 1024]
    assert card_memory.levels(0, events, "segment_alloc", "segment_free")[-1] == 2**21
    assert card_memory.thinned(list(range(601))) == [*range(2, 601, 3), 600]


def test_a_timeline_is_drawn_with_its_card(monkeypatch):
    lines = {name: dict.fromkeys(card_memory.PHASES, [1, 2]) for name in ("allocated", "reserved")}
    curve = {name: [1, 2, 3] for name in (*card_memory.CATEGORIES, "total")} | {"phase": list(card_memory.PHASES)}
    run = card.Run("A100, recorded", {"timeline": lines | {"ledger": curve, "what": "a GPT"}})
    monkeypatch.setattr(card_memory, "figures", lambda *_: run)
    (axes,) = card_memory.draw_timeline().axes
    assert axes.get_title() == "A100, recorded: a GPT" and len(axes.get_lines()) == 2 + 2


def test_a_recorded_run_is_drawn_by_the_ledger_and_the_allocator():
    """Each colour belongs to its word: in the legend and in the picture. The line is a quarter of four ranks' bytes."""
    names, colors = ("Zero3", "Zero3, recompute"), {name: to_rgba(COLORS[name]) for name in STATES}
    figure, run = card_memory.draw_runs(*names), card.recorded("memory", "h200")
    assert "H200, recorded 2026" in figure.get_suptitle()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    legend = dict(zip(words, (patch.get_facecolor() for patch in figure.legends[0].get_patches())))
    assert legend | colors == legend
    for axes, name in zip(figure.axes, names):
        drawn = [tuple(band.get_facecolor()[0]) for band in axes.collections[:3]]
        assert axes.get_title() == name and drawn == list(colors.values())
        line = next(line for line in axes.lines if line.get_linewidth() == 2.5).get_ydata()[0]
        assert line == run.figures[name]["allocated"] / 4 / 2**30
        assert f"peak {run.figures[name]['peak']['total'] / 2**30:.2f} GiB" in [text.get_text() for text in axes.texts]


@pytest.mark.slow
def test_a_card_without_room_for_a_step_is_told():
    with pytest.raises(MemoryError, match="0.5 GiB may be used; the smallest step that this shows takes"):
        card_memory.filling(2**29)


# Attention on a card, small, and on a CPU.


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


# The limit of a card's memory, which lesson 05 sets.


@pytest.mark.parametrize("most", [0, 1, 2, 3, 12, 37, 64])
def test_the_greatest_that_fits(most):
    asked = []
    assert recompute.greatest(lambda n: asked.append(n) or n <= most) == most
    assert len(asked) < 16 and max(asked) <= max(1, 2 * most)


@pytest.mark.parametrize(
    "free, limit, error, words", [(30, 26, torch.OutOfMemoryError, None), (20, 31, RuntimeError, "2.0 GiB")]
)
def test_the_cards_limit_is_given_back_and_a_card_without_so_much_says_so(free, limit, error, words, monkeypatch):
    """A card of 1 GiB, of which 1 MiB is taken, as far as `at_most` asks it."""
    fractions = [0.9]
    answers = {"empty_cache": lambda: None, "memory_reserved": lambda: 2**20, "mem_get_info": lambda: (2**free, 2**30)}
    answers |= {"get_per_process_memory_fraction": lambda: 0.9, "set_per_process_memory_fraction": fractions.append}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with pytest.raises(error, match=words), recompute.at_most(2**limit):
        assert fractions[-1] == 65 / 1024  # the limit, and what is there
        raise torch.OutOfMemoryError
    assert fractions[-1] == 0.9
