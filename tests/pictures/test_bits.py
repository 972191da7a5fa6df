"""Bits and numbers as pictures: each box is a bit, each line a number, and buttons that say what the package says."""

import json
import math
import re

import pytest
from matplotlib.colors import to_hex

from minizero.pictures.bits import (
    EXPONENT,
    MANTISSA,
    SIGN,
    addition_table,
    draw_bits,
    draw_formats,
    draw_ranges,
    explain,
)
from minizero.pictures.clickable import clickable_bits
from minizero.pictures.numbers import draw_bytes, draw_number_line, draw_rounding, draw_spacing, draw_sums
from notebooks.tools.slides import browser, opened
from precision import BF16, FP16
from precision.one_number import decode_one

TENTH = 0b0_01011_1001100110


def texts(axes):
    return [text.get_text() for text in axes.texts]


def colors(axes):
    return [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]


@pytest.mark.parametrize(
    "bits, words",
    [
        (TENTH, "+ 1.599609375 × 2⁻⁴ = 0.0999755859375"),
        (0xC000, "− 1 × 2¹ = −2"),
        (0x0001, "+ 0.0009765625 × 2⁻¹⁴ ≈ 5.9605 × 10⁻⁸"),
        (0x0000, "+ 0 × 2⁻¹⁴ = 0"),
        (0xFC00, "− infinity"),
        (0x7E00, "NaN: not a number"),
    ],
)
def test_words_say_how_the_value_follows(bits, words):
    assert explain(bits, decode_one(bits, FP16)) == words


def test_a_box_for_each_bit_in_the_colour_of_its_field():
    axes = draw_bits([("a tenth", TENTH, 0.0999755859375), ("two", 0x4000, 2.0)])
    assert colors(axes) == 2 * ([SIGN] + 5 * [EXPONENT] + 10 * [MANTISSA])
    digits = "".join(text for text in texts(axes) if text in ("0", "1"))
    assert digits == f"{TENTH:016b}{0x4000:016b}"
    assert {"a tenth", "sign", "exponent", "mantissa", explain(0x4000, 2.0)} <= set(texts(axes))


def test_the_bits_of_a_format_can_be_counted():
    axes = draw_formats({"FP32": (8, 23), "FP8": (4, 3)})
    legend = [SIGN, EXPONENT, MANTISSA]
    assert colors(axes) == [SIGN] + 8 * [EXPONENT] + 23 * [MANTISSA] + [SIGN] + 4 * [EXPONENT] + 3 * [MANTISSA] + legend
    assert {"1 + 8 + 23 = 32", "1 + 4 + 3 = 8"} <= set(texts(axes))
    boxes = [patch.get_x() for patch in axes.patches[:32]]
    assert boxes == list(range(32)) and all(patch.get_width() == 1 for patch in axes.patches)


def test_ranges_reach_from_the_smallest_number_to_the_largest():
    axes = draw_ranges({"FP16": (2.0**-24, 2.0**-14, 65504.0)})
    normal, subnormal = axes.patches
    assert (subnormal.get_x(), subnormal.get_width(), normal.get_x()) == (-24, 10, -14)
    assert normal.get_x() + normal.get_width() == pytest.approx(math.log2(65504))
    assert texts(axes) == ["smallest 2⁻²⁴", "largest 65504"]


def test_digits_of_one_worth_stand_below_each_other():
    lines = addition_table([("unpack", 0b1_1111010000_000, 9), ("", 0b1_0011001101_000, -2), ("operate", 2**14, 0)])
    header, *rows = lines.split("\n")
    assert {row.index(".") for row in rows} == {header.index("mantissa") - 1}
    assert {row[header.index("grs") :][:3] for row in rows} == {"000"}
    assert rows[0].endswith("1.1111010000 000  × 2⁹") and "10.0000000000 000  × 2⁰" in rows[2]


def test_a_line_for_each_number_as_far_as_the_axis_goes():
    (axes,) = draw_number_line({"toy": ([1, 1.5, 2, 3, 4], [0, 0.5], 3)})
    found = [sorted(segment[0][0] for segment in lines.get_segments()) for lines in axes.collections]
    assert found == [[1, 1.5, 2, 3], [0, 0.5]]


def test_spacing_marks_the_distance_to_the_next_number():
    numbers = [decode_one(bits, FP16) for bits in range(1, FP16.max_bits + 1)]
    axes = draw_spacing(numbers, mark=2048, turn=FP16.smallest_normal)
    dot = next(line for line in axes.lines if line.get_marker() == "o")
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (2048, 2)
    assert "2048: the next number\nis 2 away" in texts(axes)
    flat = axes.lines[1]
    assert set(flat.get_ydata()) == {2.0**-24} and max(flat.get_xdata()) == 2.0**-14


def test_ties_are_the_dots_of_the_staircase():
    x = [2048, 2048.5, 2049, 2049.5, 2050]
    rounded = {"even": [2048, 2048, 2048, 2050, 2050], "away": [2048, 2048, 2050, 2050, 2050]}
    panels = draw_rounding(x, rounded, {"even": {2049: 2048}, "away": {2049: 2050}}, {2048: "2048", 2050: "2050"})
    dots = [next(line for line in axes.lines if line.get_marker() == "o") for axes in panels]
    assert [(list(dot.get_xdata()), list(dot.get_ydata())) for dot in dots] == [([2049], [2048]), ([2049], [2050])]
    assert [axes.get_title() for axes in panels] == ["even", "away"]


def test_bars_and_sums_show_what_they_are_given():
    bars = draw_bytes({"FP32": 4 * 2**20, "FP16": 2 * 2**20})
    assert [bar.get_width() for bar in bars.patches] == [4, 2] and texts(bars) == ["4 MiB", "2 MiB"]
    lines = draw_sums([1, 2, 3], {"FP16": [1, 2, 2], "stochastic": [1, 2, 4]}).lines
    assert [list(line.get_ydata()) for line in lines] == [[1, 2, 3], [1, 2, 2], [1, 2, 4]]
    assert len({line.get_color() for line in lines}) == 3


# Bits that can be clicked.


def test_without_scripts_a_table_decodes_the_number():
    text = re.sub(r"<script>.*?</script>", "", clickable_bits(TENTH), flags=re.DOTALL)
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells[3:6] == ["0", "01011", "1001100110"]
    assert cells[6:] == ["+", "11 − 15 = −4: × 2⁻⁴", "1 + 614/1024 = 1.599609375"]
    assert "Value: 0.0999755859375." in text
    with pytest.raises(ValueError, match="no normal number"):
        clickable_bits(FP16.infinity_bits)


# Sets many patterns by a button of its own, reads each value; then clicks every bit, and both steps.
PROBE = """setTimeout(() => {
  const [half, brain] = document.querySelectorAll(".clickable-bits");
  const value = root => root.querySelector(".value").dataset.value;
  function set(root, bits) {
    const button = document.createElement("button");
    button.dataset.bits = bits; root.append(button); button.click();
    return value(root);
  }
  const press = (root, what) => { root.querySelector(what).click(); return value(root); };
  const found = {half: {}, brain: {}, bits: [], steps: []};
  for (const bits of PATTERNS) { found.half[bits] = set(half, bits); found.brain[bits] = set(brain, bits); }
  set(half, 0);
  for (let place = 0; place < 16; place++) found.bits.push(press(half, `[data-place="${place}"]`));
  for (const bits of [26624, 59392, 31743, 31744])
    for (const step of [1, -1]) { set(half, bits); found.steps.push(press(half, `[data-step="${step}"]`)); }
  found.said = document.body.innerText;
  document.documentElement.dataset.probe = JSON.stringify(found);
}, 200)"""


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine: it clicks as a reader would")
def test_each_click_says_what_the_package_says(tmp_path):
    patterns = sorted({*range(0, 2**16, 97), 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x8000, 0xFC00, 0xFFFF})
    widgets = clickable_bits(TENTH, presets={'"1"': 0x3C00}) + clickable_bits(0x3DCD, 8, 7)
    path = tmp_path / "page.html"
    path.write_text(f'<meta charset="utf-8"><body>{widgets}</body>', encoding="utf-8")
    found, console = opened(path, PROBE.replace("PATTERNS", json.dumps(patterns)))
    assert not console and "no scripts" not in found.pop("said")

    def same(said, value):  # a float is written in Python as in JavaScript, but for its exponent and infinity
        said = float(said.replace("Infinity", "inf"))
        return said == value or (math.isnan(said) and math.isnan(value))

    for name, fmt in (("half", FP16), ("brain", BF16)):
        wrong = {bits: said for bits, said in found[name].items() if not same(said, decode_one(int(bits), fmt))}
        assert not wrong, name
    assert all(same(said, decode_one(2 ** (place + 1) - 1, FP16)) for place, said in enumerate(found["bits"]))
    steps = [2050, 2047, -2047, -2050, math.inf, 65472, math.inf, 65504]
    assert all(map(same, found["steps"], steps)), found["steps"]
