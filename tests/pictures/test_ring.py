"""The pictures of the ring: stripes under the ones, thick frames around what is complete, an arrow for each message."""

import re

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, PathPatch

from minizero.pictures import animate_ring, draw_ring
from minizero.pictures.ring import CHUNKS, draw_frame, title_of

# What four ranks hold before and after each step, and which chunk each of them sends.
STATES = [[[10 ** (3 - rank)] * 4 for rank in range(4)]]
SENT = []
for step in range(6):
    SENT.append([(rank - (step < 3) - step % 3) % 4 for rank in range(4)])
    after = [list(row) for row in STATES[-1]]
    for rank, chunk in enumerate(SENT[-1]):
        after[(rank + 1) % 4][chunk] = STATES[-1][rank][chunk] + (after[(rank + 1) % 4][chunk] if step < 3 else 0)
    STATES.append(after)


@pytest.fixture(scope="module")
def panels():
    draw_ring(STATES, SENT)
    yield pyplot.gcf().axes
    pyplot.close("all")


def digits(ax):
    """Each digit with its place: four are a text as wide as a box."""
    for text in ax.texts:
        if text.get_family() == ["monospace"]:
            x, y = text.get_position()
            for place, digit in enumerate(text.get_text()):
                yield digit, (x + (place - 1.5) / 4, y)


def stripes(ax):
    return [patch for patch in ax.patches if isinstance(patch, PathPatch) and to_hex(patch.get_facecolor()) in colors]


def coloured(ax, x, y):
    """Whether there is a stripe at the left end, in the middle and at the right end of a digit's quarter."""
    places = [(x + shift, y) for shift in (-0.11, 0, 0.11)]
    return [any(patch.get_path().contains_point(place) for patch in stripes(ax)) for place in places]


colors = [color.lower() for color in CHUNKS]


def test_a_stripe_lies_under_each_one_and_under_no_zero(panels):
    for ax, state in zip(panels, STATES):
        seen = list(digits(ax))
        assert "".join(digit for digit, _ in seen) == "".join(f"{value:04}" for row in state for value in row)
        for digit, (x, y) in seen:
            assert coloured(ax, x, y) == [digit == "1"] * 3


def test_thick_frames_are_around_complete_sums_only(panels):
    for ax, state in zip(panels, STATES):
        thick = [patch for patch in ax.patches if isinstance(patch, PathPatch) and patch.get_linewidth() > 3]
        boxes = sum(len(patch.get_path().vertices) // 5 for patch in thick)
        assert boxes == sum(row.count(1111) for row in state)


def test_an_arrow_for_each_message_and_one_that_closes_the_ring(panels):
    patches = [[getattr(text, "arrow_patch", None) for text in ax.texts] for ax in panels[:7]]
    arrows = [sum(isinstance(patch, FancyArrowPatch) for patch in its) for its in patches]
    assert arrows == [1] + [5] * 6
    assert not panels[7].axison  # the key


def test_digits_can_be_read_from_the_back_of_a_hall(panels):
    assert min(text.get_fontsize() for ax in panels for text in ax.texts if text.get_text()) >= 13


@pytest.mark.slow
def test_the_player_has_three_frames_for_each_step_and_fetches_nothing():
    player = animate_ring(STATES, SENT)
    assert len(re.findall(r"frames\[\d+\] = ", player)) == 19
    assert "<link" not in player and '<i class="fa' not in player
    assert "image/svg+xml" in player and len(player) < 2**19


def test_a_frame_shows_what_travels_beside_what_is_held():
    ax = pyplot.figure().add_subplot()
    words = {0: "what each rank brings", 1: "they leave", 2: "they arrive", 3: "added", 18: "kept"}
    for number, said in words.items():
        ax.clear()
        draw_frame(ax, STATES, SENT, number, 66)
        assert ax.texts and any(said in text.get_text() for text in ax.texts)
        assert min(text.get_fontsize() for text in ax.texts if text.get_family() == ["monospace"]) >= 24
        assert len(list(digits(ax))) == 64 + (16 if number in (1, 2) else 0)
        for digit, (x, y) in digits(ax):
            assert coloured(ax, x, y) == [digit == "1"] * 3


def test_the_steps_have_names():
    halves = [f"{half} {number} of 3" for half in ("reduce-scatter", "all-gather") for number in (1, 3)]
    assert [title_of(step, 7) for step in (0, 1, 3, 4, 6)] == ["before", *halves]
