"""What the lesson on mixed precision measures: dropped gradients, FP16 sums, bytes that move; and its pictures."""

import math

import torch
from torch import nn

from minizero.mixed_precision import experiments
from minizero.pictures import mixed


def test_gradients_of_one_range_are_dropped_and_no_others():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1, bias=False))
    experiments.drop_gradients(model, 0.5, 2.0)
    x = torch.tensor([[0.125, 0.5, -1.0, 2.0]])
    (3 * model(x)).sum().backward()  # the output's gradient, 3, stays; the weights' are 3 x
    assert model[1].weight.grad.tolist() == [[0.375, 0, -3, 6]]
    model[1].weight.grad = None
    model(x).sum().backward()  # here the output's, 1, is dropped, and all with it
    assert not model[1].weight.grad.any()


def test_bytes_moved_are_counted_by_operator_and_views_are_free():
    x, y = torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)
    with experiments._Traffic() as traffic:
        x.view(4).add(1)
    assert traffic.bytes == 2 * 16, "four numbers in, four out"
    wide, narrow = (experiments.bytes_moved(nn.Linear(4, 3).to(t), x.to(t), y) for t in (torch.float32, torch.float16))
    assert wide > narrow > wide / 3


# The pictures.


def words(axes):
    return " ".join(text.get_text() for text in axes.texts)


def test_a_run_is_drawn_up_to_its_nan():
    axes = mixed.plot_runs({"lives": [3.0, 2.0, 1.0], "dies": [3.0, math.nan, math.nan]}, window=2)
    lives, dies, cross = axes.lines
    assert list(lives.get_ydata()) == [3, 2.5, 1.5] and list(dies.get_ydata()) == [3]
    assert list(cross.get_xdata()) == [0] and "NaN from step 1 on" in words(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lives", "dies"]
    assert cross.get_label() == "dies" and dies.get_label() != "dies", "a line of one point cannot be seen"


def test_the_scale_and_its_skipped_steps():
    axes = mixed.plot_scale([16.0, 8.0, 8.0, 16.0], [0])
    assert list(axes.lines[0].get_ydata()) == [4, 3, 3, 4]
    assert list(axes.lines[1].get_xdata()) == [0] and list(axes.lines[1].get_ydata()) == [4]


def test_columns_of_bytes_add_up_and_have_the_colours_of_all_pictures():
    axes = mixed.plot_bytes({"one": {"weight, FP16": 2, "gradient": 4, "master": 4}, "two": {"weight": 4}})
    assert "10 bytes" in words(axes) and "4 bytes" in words(axes) and "weight, FP16: 2" in words(axes)
    heights = [(bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert heights == [(0, 2), (2, 4), (6, 4), (0, 4)]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3


def test_curves_have_the_numbers_that_were_given():
    assert list(mixed.plot_lost([1024, 4096], {"FP16": [0, 0.5]}).lines[0].get_ydata()) == [0, 50]
    assert list(mixed.plot_sums([2, 4], {"FP16": [0.1, 0.2]}).lines[0].get_ydata()) == [0.1, 0.2]
    axes = mixed.plot_peaks([1, 2], {"FP32": [2**20, 2**21], "mixed precision": [2**20, 2**20]})
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 2], [1, 1]]


def test_a_step_shows_bits_and_bytes():
    axes = mixed.draw_step({"weight": (16, 2048), "master": (32, 4096)})
    assert "weight\nFP16, 2 KiB" in words(axes) and "master weight\nFP32, 4 KiB" in words(axes)
    assert sum(hasattr(arrow, "get_arrowstyle") for arrow in axes.patches) == len(mixed._ARROWS)
    order = [mixed._BOXES[name][0] for name in ("master", "moments", "FP32 gradient")]
    assert order == sorted(order), "the moments lie between the gradient and the master"
    edges = {bool(box.get_linewidth() > 2) for box in axes.patches if hasattr(box, "get_height")}
    assert edges == {True, False}, "FP32 has a thick edge"
