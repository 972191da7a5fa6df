"""The pictures of bytes and seconds show the numbers that they are given."""

import pytest

from minizero.pictures import draw_bound, draw_busiest, draw_message_times, draw_predicted_times


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_busiest_rank_of_each_way():
    loads = {"a": {2: 1.0, 8: 7.0}, "b": {2: 1.0, 8: 7.0}, "c": {2: 1.0, 8: 1.75}}
    axes = draw_busiest(loads)
    assert labels(axes) == ["a", "b", "c"]
    assert [dict(zip(*line.get_data())) for line in axes.lines] == list(loads.values())
    assert len({line.get_linewidth() for line in axes.lines[:2]}) == 2  # one shows behind the other
    assert [text.get_text() for text in axes.texts] == ["7", "7", "1.75"]


def test_bars_stand_on_each_other_and_the_bound_is_its_own_formula():
    axes = draw_bound({2: (0.5, 0.5), 4: (0.75, 0.5)})  # the second all-gather sends too little
    below, above = axes.containers
    assert [bar.get_height() for bar in below] == [0.5, 0.75]
    assert [(bar.get_y(), bar.get_height()) for bar in above] == [(0.5, 0.5), (0.75, 0.5)]
    bounds = [line.get_ydata()[0] for line in axes.lines[:2]]
    assert bounds == [1.0, 1.5]


def test_points_are_measured_and_lines_are_fitted():
    found = {1024: 2e-4, 2**20: 1e-3, 2**22: 4e-3}
    axes = draw_message_times({"ours": found}, {"ours": (1e-4, 1e9)})
    points, line = axes.lines
    assert dict(zip(*points.get_data())) == pytest.approx({n: 1e3 * t for n, t in found.items()})
    assert line.get_ydata()[-1] == pytest.approx(1e3 * (1e-4 + 2**22 / 1e9))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 KiB", "1 MiB", "4 MiB"]
    assert axes.get_ylim() == (0.1, 10)
    assert labels(axes) == ["ours: measured", "ours: fitted"]


def test_predictions_in_seconds_with_marked_sizes():
    axes = draw_predicted_times([2**10, 2**30], {"ring": [1e-3, 1.0]}, {1e9: "one"})
    assert list(axes.lines[0].get_ydata()) == [1e-3, 1.0]
    assert axes.lines[1].get_xdata()[0] == 1e9 and "one" in [text.get_text() for text in axes.texts]
    assert "predicted" in axes.get_ylabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.001", "0.01", "0.1", "1"]
