"""A rank's piece stands at its own place; what it does not hold is an outline."""

import pytest
from matplotlib.figure import Figure

from minizero.pictures import COLORS, draw_board, draw_boards, draw_numbers
from minizero.pictures.shards import STATES


def pieces(axes, state):
    """(left, bottom, width, height) of what is drawn in the state's colour."""
    color = Figure().add_subplot().bar([0], [1], color=COLORS[state])[0].get_facecolor()
    boxes = [patch.get_bbox() for patch in axes.patches if patch.get_facecolor() == color]
    return [(box.x0, box.y0, box.width, abs(box.height)) for box in boxes]


def test_on_a_board_a_quarter_stands_at_the_ranks_height():
    quarter = dict.fromkeys(STATES, 0.25) | {"parameters": 1.0, "gradients": 0.0}
    axes = draw_board([{"root": quarter}] * 4, Figure().subplots())
    heights = [0.84 * share for share in (1, 0.25)]
    assert [h for *_, h in pieces(axes, "parameters")] == pytest.approx([heights[0]] * 4)
    assert [h for *_, h in pieces(axes, "optimizer")] == pytest.approx([heights[1]] * 4)
    assert not pieces(axes, "gradients")
    above_the_floor = [row + 0.93 - bottom for row, (_, bottom, *_) in enumerate(pieces(axes, "optimizer"))]
    assert above_the_floor == pytest.approx([0.84 * rank / 4 for rank in range(4)])


def test_numbers_are_drawn_at_their_places():
    ranks = [{"parameters w": range(4), "optimizer m": range(2 * r, 2 * r + 2)} for r in range(2)]
    figure = draw_numbers({"some stage": ranks}, 4)
    (axes,) = figure.axes
    assert [int(left) for left, *_ in pieces(axes, "parameters")] == [0, 1, 2, 3] * 2
    assert [int(left) for left, *_ in pieces(axes, "optimizer")] == [0, 1, 2, 3]
    assert axes.get_title() == "some stage\n6 numbers a rank"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "parameters (w)" in words and "optimizer (m)" in words


def test_there_is_a_board_for_each_moment():
    board = [{"root": dict.fromkeys(STATES, 0.5)}] * 2
    figure = draw_boards({"before": board, "after": board})
    assert [axes.get_title() for axes in figure.axes] == ["before", "after"]
