"""Bars of parts add up; beside a step stands the bar of its peak, and not of each part's own maximum."""

from matplotlib import pyplot

from minizero.pictures import COLORS, draw_parts, draw_steps

MIB = 2**20


class Sample(dict):
    pass


def make_step(*moments):
    """A step of one operator a moment. moments: phase, and MiB of parameters, gradients, activations."""
    samples = []
    for number, (phase, *held) in enumerate(moments):
        parts = dict(zip(("parameters", "gradients", "activations"), (MIB * part for part in held)))
        samples.append(Sample(parts | {"total": sum(parts.values())}))
        samples[-1].phase, samples[-1].number = phase, number
    return samples


def drawn(axes):
    """By the name of each part: where its pieces begin and how high they are, from left to right."""
    found = {}
    for bars in axes.containers:
        found.setdefault(bars.get_label(), []).extend((bar.get_y(), bar.get_height()) for bar in bars)
    return found


def test_the_pieces_of_a_bar_stand_on_each_other_and_are_numbered():
    bars = {"small": {"gradients": 2 * MIB, "parameters": 4 * MIB}, "large": {"parameters": 10 * MIB, "total": 0}}
    axes = draw_parts(bars)
    assert drawn(axes) == {"parameters": [(0, 4), (0, 10)], "gradients": [(4, 2), (10, 0)]}
    assert [text.get_text() for text in axes.texts] == ["4.0", "2.0", "6.0", "10.0", "10.0"]  # parts, then their sum
    assert [label.get_text() for label in axes.get_xticklabels()] == ["small", "large"]
    assert axes.get_ylabel() == "memory (MiB)"
    keys = axes.get_legend().legend_handles
    assert [key.get_label() for key in keys] == ["gradients", "parameters"]  # from top to bottom, as in the bars
    assert all(pyplot.matplotlib.colors.to_hex(key.get_facecolor()).upper() == COLORS[key.get_label()] for key in keys)


def test_a_small_part_has_a_number_if_asked_for():
    bars = {"one": {"parameters": 10 * MIB, "gradients": 0.5 * MIB}}
    assert [text.get_text() for text in draw_parts(bars).texts] == ["10.0", "10.5"]
    assert [text.get_text() for text in draw_parts(bars, smallest=0.04).texts] == ["10.0", "0.5", "10.5"]


def test_the_legend_tells_the_optimizers_states_from_its_step():
    legend = draw_parts({"optimizer.step()": {"parameters": 4 * MIB, "optimizer": 8 * MIB}}).get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["optimizer states", "parameters"]


def test_a_limit_is_drawn_in_the_axis_own_unit_and_stays_visible():
    axes = draw_parts({"one": {"parameters": 3e9}}, unit=(1e9, "memory (GB)"), limit=80e9, limit_name="the card")
    (line,) = axes.lines
    assert list(line.get_ydata()) == [80, 80] and axes.get_ylim()[1] > 80
    assert "the card" in {text.get_text() for text in axes.texts} and axes.get_ylabel() == "memory (GB)"


def test_beside_a_step_stands_its_peak_and_the_parts_add_up_to_it():
    first = make_step(("forward", 4, 0, 2), ("backward", 4, 1, 6), ("optimizer", 4, 4, 0))
    second = make_step(("forward", 3, 0, 1), ("forward", 3, 0, 0))
    one, other, bars = draw_steps({"first": first, "second": second})
    expected = {"parameters": [(0, 4), (0, 3)], "gradients": [(4, 1), (3, 0)], "activations": [(5, 6), (3, 1)]}
    assert drawn(bars) == expected
    words = {text.get_text().strip(" ▸◂"): text for text in one.texts}
    assert words.keys() == {"forward", "backward", "optimizer step", "peak 11.0 MiB"}
    assert "peak 4.0 MiB" in {text.get_text() for text in other.texts}
    assert len({axes.get_ylim() for axes in (one, other, bars)}) == 1 and one.get_ylim()[1] > 11
    assert one.get_title() == "first" and "not time" in one.get_xlabel() and not other.get_ylabel()
