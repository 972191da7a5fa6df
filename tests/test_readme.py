"""The README: a first screen that can be taken in at once, few words, and the numbers of the run that it names."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "notebooks" / "results"
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")
WORDS, SCREEN = 770, 45  # at most so many words of prose, and lines on the first screen


def prose(text: str) -> str:
    """Without code, tables, pictures and the targets of links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    return re.sub(r"\]\([^)]*\)|</?\w+>", "", IMAGE.sub("", text))


def count_words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in prose(text).split())


def mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.2f}"


def test_words_are_counted_without_code_tables_and_pictures():
    hidden = "| not | these |\n\n```\nnor these\n```\n- ![nor\nthis](a.png)\n"
    shown = f"One [two three](https://four.five) `six`.\n\n{hidden}"
    assert count_words(shown) == 4


def test_the_prose_is_short():
    assert count_words(TEXT) <= WORDS


def test_the_first_screen():
    """What it is, three commands, one picture and the lessons: in this order, and little else."""
    lessons = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    screen = TEXT[: TEXT.index(lessons[-1])]
    assert len(screen.splitlines()) <= SCREEN
    title, sentence, *_ = screen.split("\n\n")
    assert title == "# minizero" and len(re.findall(r"\.(?:\s|$)", sentence)) == 1
    (commands,) = re.findall(r"```\n(.*?)```", screen, re.DOTALL)
    assert re.findall(r"^make (\w+)", commands, re.MULTILINE) == ["demo", "test", "exercises"]
    assert len(IMAGE.findall(screen)) == 1
    places = [screen.index(mark) for mark in (sentence, commands, "![", "## The lessons", *lessons[:-1])]
    assert places == sorted(places), "every notebook is in the list, in its order"


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_pictures_have_words():
    for alt, _ in IMAGE.findall(TEXT):
        assert len(alt.split()) >= 5


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)(?=[ `])", TEXT)) <= targets
    assert re.search(r"^python -m pytest workbook/\d\d_", TEXT, re.MULTILINE), "students check with pytest, too"


def test_the_table_is_that_of_the_run():
    results = json.loads((RESULTS / "cpu-demo" / "results.json").read_text(encoding="utf-8"))
    for run in results["runs"]:
        held, peak = (mib(max(rank[kind]["total"] for rank in run["ranks"])) for kind in ("persistent", "peak"))
        predicted, formula = mib(run["predicted"]["total"]), mib(run["bytes_sent_formula"])
        time = run["step_seconds"] / results["runs"][0]["step_seconds"]
        cells = [run["name"], held, f"*{predicted}*", peak, mib(run["bytes_sent"]), f"*{formula}*"]
        assert "| " + " | ".join([*cells, f"{time:.2f}", f"{run['losses'][-1]:.6f}"]) + " |" in TEXT
        assert f"{held} MiB" in IMAGE.findall(TEXT)[0][0]
        assert run["losses"] == results["runs"][0]["losses"], "equal to the last bit"
    assert f"{results['n_parameters']:,} parameters, {results['world_size']} ranks" in TEXT


def test_what_is_said_of_table1_holds_in_its_numbers():
    """Means closer than the standard deviation of single seeds, and half the activations."""
    rows = json.loads((RESULTS / "table1" / "table1.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        noise = statistics.mean(statistics.variance(row[kind]) for kind in ("baseline", "mixed")) ** 0.5
        assert abs(statistics.mean(row["mixed"]) - statistics.mean(row["baseline"])) < noise, row["network"]
        assert 0.5 <= row["activations"]["mixed"] / row["activations"]["baseline"] < 0.52
