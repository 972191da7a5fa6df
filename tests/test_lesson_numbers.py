"""Each number of a lesson's prose has a source, and each line of arithmetic in the prose is right.

A source is: an output or the code of the lesson, or of another lesson that the paragraph names; arithmetic beside the
number; a table of formats or cards. The numbers without one are in `NO_SOURCE`, each with why it may stand. A number is
looked at if it may be measured: it has a point, or three digits that are not only zeros. Powers of two are sizes, and
numbers of the digits 0 and 1 are binary.
"""

import functools
import html
import inspect
import re
from collections.abc import Iterator

import pytest
import torch

from flash import gpus
from minizero.simulate import clusters
from tests.test_lessons import LESSONS, Cell, read

NUMBER = r"\d[\d,]*(?:\.\d+)?"
NAMED = "exercises?|lessons?|notebooks?|sections?|problems?|arXiv|issues?|requests?|Algorithm|IEEE|torch"
# Code, formulas, addresses, HTML, the exercises' list, sources, and numbers that are names or years.
NO_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|#\d+|(?:\[\d+)?\]\([^)]*\)|<[^>]+>|^- \d\d .*?$|^#+ .*?$|^## Sources.*"
    rf"|(?i:{NAMED})\s+\[?[\d.]{{2,}}\w*|\b(?:19\d|20[0-3])\d\b",
    re.S | re.M,
)
UNIT = r"(?:%|[A-Za-zµ]+(?:/[a-z]+)?)"
TERM = r"[(√ −-]*[\d¼½¾](?:[\d,.¼½¾²³⁴⁵⁶⁷⁸⁹⁰¹⁻)]*[\d¼½¾²³⁴⁵⁶⁷⁸⁹⁰¹)])?"
EXPRESSION = rf"{TERM}(?: ?(?:{UNIT} )?[×·/+−-] ?{TERM})*"
EQUALS = r"(?:,? [=≈]| is| are) (?:about |at least )?"
CHAIN = re.compile(rf"{EXPRESSION}(?: {UNIT})?(?:{EQUALS}{EXPRESSION}(?: {UNIT})?)+")
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
POWERS = str.maketrans(SUPERSCRIPTS, "0123456789-")
SCALES = [1000.0**n for n in range(-4, 5)] + [1024.0**n for n in (-3, -2, -1, 1, 2, 3)] + [100.0, 0.01]

NO_SOURCE: dict[str, dict[str, str]] = {
    "00_where_memory_goes": {
        "7.0523": "counted by hand, in billions",
        "6.6": "drawn in a figure, above a bar",
        "99.5": "drawn in a figure, above a bar",
        "250,000": "given: vocabularies of real models",
    },
    "02d_own_loop": {"419": "published, with its source"},
    "04b_masters_sums_bytes": {
        "255": "given: a pixel",
        "6,144": "given: the size of a parameter",
        "12.2": "worked out by the check of exercise 52",
    },
    "05_recompute": {
        "2.495": "published, with its source",
        "2.195": "published, with its source",
        "1,280": "published, with its source",
    },
    "08_scale": {"16.4": "drawn in a figure, for who searches"},
    "08b_what_a_fit_says": dict.fromkeys(["5.9", "5.5"], "asserted by a cell, in other units"),
    "09_all_together": {
        "4.1": "drawn in a figure, above a bar",
        "0.75": "one block's parameters",
        "6.4": "31 blocks",
        "365": "counted by hand, in millions: 364,787,712",
        "8,900": "published, with its source",
        "9,600": "published, with its source",
    },
}


def printed(cells: list[Cell]) -> set[float]:
    """The numbers in the code and in the outputs."""
    texts = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        texts.append(re.sub(r"(?<=\d)_(?=\d)", "", cell["source"]))
        for output in cell["outputs"]:
            shown = {kind: text for kind, text in output.get("data", {}).items() if kind.startswith("text/")}
            texts += [
                re.sub(r"<[^>]+>", " ", html.unescape("".join(text)))
                for text in (output.get("text", ""), *shown.values())
            ]
    return {value(number) for number in re.findall(NUMBER, "\n".join(texts))}


@functools.cache
def printed_in(lesson: str) -> set[float]:
    return printed(read(lesson))


def value(number: str) -> float:
    return float(number.replace(",", ""))


def says(number: str, exact: float) -> bool:
    """Is this how one writes `exact` with so many digits? The last may be off by one half, and zeros are no digits."""
    digits = len(number.partition(".")[2])
    zeros = 0 if digits else len(number) - len(number.rstrip("0"))
    return abs(value(number) - exact) <= 0.5001 * 10.0 ** (zeros - digits)


POWERS_OF_TWO = {2.0**n for n in range(64)}
FORMATS = {65504.0, 448.0, 240.0, 57344.0}  # the largest numbers of FP16 and of 8-bit formats
CARDS = {value(x) for table in (gpus, clusters) for x in re.findall(NUMBER, inspect.getsource(table))}


def worth_of(expression: str) -> float | None:
    """None if it cannot be worked out."""
    text = re.sub(UNIT, "", expression).strip(" .,")
    text = text.removeprefix("(") if text.count("(") > text.count(")") else text
    text = text.rstrip(")") if text.count("(") < text.count(")") else text
    text = text.replace(",", "").translate({ord(c): f"+.{x}" for c, x in zip("¼½¾", (25, 5, 75))})
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"**({m[0].translate(POWERS)})", text)
    text = re.sub(r"√ ?([\d.]+)", r"(\1)**.5", re.sub(r"√ ?(\([^)]*\))", r"\1**.5", text))
    text = text.strip(" .,").replace("×", "*").replace("·", "*").replace("−", "-").strip()
    try:
        return float(eval(text))
    except (SyntaxError, TypeError, ZeroDivisionError, OverflowError):
        return None


def arithmetic(text: str) -> Iterator[tuple[str, bool]]:
    """Each two sides of an equality, and whether it holds: as one rounds, in another unit, or in FP16."""
    text = re.sub(r" ?\([^()\d]*\)", "", " ".join(text.split()))  # without words in brackets
    for chain in CHAIN.findall(text):
        sides = re.split(f"({EQUALS})", chain)
        for left, equals, right in zip(sides[::2], sides[1::2], sides[2::2]):
            exact, said = worth_of(left), worth_of(right)
            worked_out = re.search(r"\d.*[×·/+−]|√", left) or (
                equals in {" = ", " ≈ "} and set(left) & set(SUPERSCRIPTS)
            )
            if exact is None or said is None or not worked_out:
                continue
            if set(re.sub(r"\D", "", left + right)) <= set("01") and "." in left:  # binary
                continue
            number = re.fullmatch(rf"[ −-]*({NUMBER})[^\d(/×·+{SUPERSCRIPTS}]*", right)
            close = any(
                says(number[1], abs(exact) * scale) if number else abs(exact * scale - said) < 0.02 * abs(said)
                for scale in (1.0, *SCALES)
            )
            yield f"{left} = {right}".strip(), close or float(torch.tensor(exact).half()) == said


def numbers(text: str) -> Iterator[str]:
    for number in re.findall(rf"(?<![\w.,^/⁻]){NUMBER}(?!\w|\.\d)", text):
        number = number.rstrip(",")
        digits = number.replace(",", "")
        power = value(number) in POWERS_OF_TWO
        chosen = "." not in digits and (power or len(digits) < 3 or len(digits.rstrip("0")) < 2)
        if not chosen and not set(digits) <= set("01."):
            yield number


def faults(cells: list[Cell]) -> list[str]:
    """The wrong arithmetic, and the numbers without a source."""
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    equalities = dict(equality for text in texts for equality in arithmetic(NO_PROSE.sub(" ", text)))
    own = printed(cells) | FORMATS | CARDS | {value(number) for number in re.findall(NUMBER, " ".join(equalities))}
    wrong = [equality for equality, right in equalities.items() if not right]
    for text in texts:
        known = own.union(*map(printed_in, re.findall(r"\b(0\w+)\.ipynb", text)))
        wrong += [n for n in numbers(NO_PROSE.sub(" ", text)) if not any(says(n, exact) for exact in known)]
    return wrong


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_number_has_a_source(lesson):
    assert sorted(set(faults(read(lesson))) - set(NO_SOURCE.get(lesson, {}))) == []


def test_the_list_is_short_and_in_use():
    stale = {lesson: set(why) - set(faults(read(lesson))) for lesson, why in NO_SOURCE.items()}
    assert not any(stale.values()), stale
    assert sum(map(len, NO_SOURCE.values())) <= 40


def lesson_of(prose: str, output: str = "") -> list[Cell]:
    return [
        {"cell_type": "markdown", "source": prose},
        {"cell_type": "code", "source": "", "outputs": [{"text": output}]},
    ]


@pytest.mark.parametrize(
    "prose, output",
    [
        ("Its peak is 12.64 MiB.", "12.6445"),
        ("It sends 2 × 617 bytes = 1.234 KB, of which 1.234 are needed.", ""),
        ("2 × 63/64 × 0.28 seconds are about 0.55 seconds, and 2048 + 1 = 2048 in FP16.", ""),
        ("12.64 (states) + 3.16 (bucket) = 15.8 MiB. A third of 65504 is a step.", ""),
        ("√(24/18) is 1.15. In 2019, [1302](https://github.com) and lesson 02.5 had `7.77`.", ""),
    ],
)
def test_a_number_may_have_any_of_these_sources(prose, output):
    assert faults(lesson_of(prose, output)) == []


@pytest.mark.parametrize(
    "prose, output, fault",
    [
        ("Its peak is 12.64 MiB.", "12.6551", "12.64"),
        ("It sends 1,235 bytes.", "1234", "1,235"),
        ("It sends 3 × 617 bytes = 1,234 bytes.", "", "3 × 617 bytes = 1,234 bytes"),
        ("2 · 1.5 are 3.1 in all.", "", "2 · 1.5 = 3.1 in"),
    ],
)
def test_a_wrong_number_is_found(prose, output, fault):
    assert fault in faults(lesson_of(prose, output))
