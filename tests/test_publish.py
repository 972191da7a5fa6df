"""Slides and book: complete, alone, folded where they answer an exercise, and alive in a real browser."""

import html
import json
import re

import nbformat
import pytest

from notebooks.tools import answers
from notebooks.tools.cells import number_of, read, title_of
from notebooks.tools.publish import book, main
from notebooks.tools.slides import DECK_SLIDES, FOLDER, browser, draw, faults, opened, slides
from tests.exercises import stubs
from tests.exercises.course import COURSE, find
from tests.test_lessons import LESSONS

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.lessons
in_a_browser = pytest.mark.skipif(browser() is None, reason="no Chromium here: it opens the pages as a reader would")

# Runs in the page when it has loaded, and leaves what it saw in the document.
PROBE = """addEventListener("load", () => setTimeout(() => {
  const asleep = document.querySelectorAll(".asleep").length;
  const broken = [...document.images].filter(image => image.currentSrc && !image.naturalWidth).length;
  let moved = 0, sliders = document.querySelectorAll("input[type=range]");
  for (const slider of sliders) {
    const image = slider.closest(".animation")?.querySelector("img"), before = image?.src;
    slider.value = slider.max; slider.dispatchEvent(new Event("input")); slider.onchange?.();
    moved += image && image.src !== before ? 1 : 0;
  }
  let slides = 0;
  if (window.Reveal) { Reveal.next(); slides = Reveal.getTotalSlides(); }
  const at = window.Reveal ? Reveal.getIndices().h : -1;
  const say = wide => {
    const found = {wide, asleep, broken, images: document.images.length, sliders: sliders.length, moved, slides, at};
    document.documentElement.dataset.probe = JSON.stringify(found);
  };
  if (window.Reveal) return say(0);
  const phone = document.createElement("iframe");  // a window of its own cannot be so narrow
  phone.width = 390;
  phone.srcdoc = document.documentElement.outerHTML.replace(/<script[^]*?<\\/script>/g, "");
  phone.onload = () => say(phone.contentDocument.documentElement.scrollWidth);
  document.body.append(phone);
}, 500));"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of slides and book by their names, and what is wrong with slides."""
    folder = tmp_path_factory.mktemp("published")
    paths, wrong = slides(folder / "slides")
    return {f"{path.parent.name}/{path.stem}": path for path in [*paths, *book(folder / "book")]}, wrong


@pytest.fixture(scope="module")
def published(made):
    return made[0]


def test_there_is_a_file_for_each_notebook_and_one_deck(published):
    assert sorted(published) == sorted(
        [f"{kind}/{name}" for kind in ("slides", "book") for name in NAMES]
        + ["slides/deck", "book/index", "book/museum", "book/your_own_model", "book/on_paper"]
    )


def test_nothing_is_wrong_with_the_slides_of_lessons(made):
    """Titles, texts, notes; and, with a browser, what lies below the screen, is cut, or too small to be read."""
    for name in [*LESSONS, "deck"]:
        assert made[1][name] == [], name


def test_the_lecture_has_notes_to_speak_from(published):
    """A title, an agenda that names the parts, a slide that opens each part; 50 minutes are about 25 slides."""
    text = published["slides/deck"].read_text()
    notes = [html.unescape(note) for note in re.findall(r'<aside class="notes">(.*?)</aside>', text, re.DOTALL)]
    assert 15 <= len(notes) <= DECK_SLIDES
    assert all(100 <= len(note.split()) <= 150 for note in notes), [len(note.split()) for note in notes]
    titles = [
        cell.metadata["title"]
        for name in NAMES
        for at, cell in enumerate(read(FOLDER / f"{name}.ipynb").cells)
        if cell.metadata.get("deck") == "part" or at == 0 and cell.metadata.get("deck")
    ]
    agenda = re.search(r"<table class='agenda'>(.*?)</table>", text)[1]
    assert [html.unescape(title) for title in re.findall(r"</td><td>(.*?)</td>", agenda)] == titles and len(titles) >= 4
    assert len(re.findall(r"<p class='part'>Part", text)) == len(titles)
    minutes = [int(re.match(r"\[(\d+):00\] ", note)[1]) for note in notes]
    assert minutes[0] == 0 and minutes == sorted(minutes) and 42 <= minutes[-1] <= 44


def slide(kind, source, **metadata):
    """A cell with the mark of a slide; of code, with what it has shown."""
    shown = [nbformat.v4.new_output("stream", text=text) for text in metadata.pop("shown", [])]
    cell = nbformat.v4.new_code_cell(source, outputs=shown) if kind == "code" else nbformat.v4.new_markdown_cell(source)
    cell.metadata.update({"alt": "a figure of nothing", "heading": "Heading", "notes": "Said."} | metadata)
    return cell


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (slide("markdown", "## A `message`\n\nWith a text."), []),
        (slide("markdown", "long prose", title="A message", text="short"), []),
        (slide("code", "run()", title="A message", shown=["one\n", "two"]), []),
        (slide("markdown", "## A message"), ["it has a title and nothing else"]),
        (slide("code", "run()", title="A message"), ["it has a title and nothing else"]),
        (slide("code", "run()", title="A message", shown=["one"], outputs=[]), ["it has a title and nothing else"]),
        (slide("markdown", "Prose alone."), ["it has no title"]),
        (slide("markdown", "## A message\n\nAll rows:"), ["it announces what does not come: All rows:"]),
        (slide("code", "run()", title="A message", outputs=[3]), ["`outputs` names one that its cell has not"]),
        (slide("markdown", "## A message\n\nText.", notes=""), ["it has no notes"]),
    ],
)
def test_what_is_wrong_with_a_slide_is_said(cell, said):
    assert list(faults(draw(cell), cell.metadata["notes"])) == said


def test_a_slide_shows_all_outputs_or_those_that_it_names():
    cell = slide("code", "run()", title="A message", shown=["one\n", "two\n"])
    assert "one\ntwo" in draw(cell) and "run()" not in draw(cell)
    cell.outputs.insert(1, nbformat.v4.new_output("display_data", data={"text/markdown": "between"}))
    assert re.findall("one|between|two", draw(cell)) == ["one", "between", "two"]
    cell.metadata.update(outputs=[2], code=True)
    assert "two" in draw(cell) and "one" not in draw(cell) and "run" in draw(cell)


def test_publish_says_what_is_wrong(monkeypatch, tmp_path, capsys):
    wrong = {"01_a": ["slide 3: it has no notes"], "deck": []}
    monkeypatch.setattr("sys.argv", ["publish", "slides"])
    monkeypatch.setattr("notebooks.tools.publish.slides", lambda folder: ([tmp_path], wrong))
    assert main() == 1 and "01_a, slide 3: it has no notes" in capsys.readouterr().err
    wrong["01_a"].clear()
    assert main() == 0


def test_nothing_is_fetched_and_every_picture_has_words(published):
    for name, path in published.items():
        text = re.sub(r"<script>.*?</script>", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//', text), name
        assert "@import" not in text
        images = re.findall(r"<img[^>]*>", text)
        assert all(re.search(r'alt="[^"]{8,}"', image) for image in images), name
        assert name.startswith("slides") or name.endswith(("index", "museum", "on_paper")) or images or "<pre" in text


def test_links_inside_the_book_lead_somewhere(published):
    for name, path in published.items():
        if name.startswith("book"):
            for link in re.findall(r'href="([\w./-]+\.html)', path.read_text()):
                assert (path.parent / link).exists(), f"{name}: {link}"
            assert 'href="../' not in path.read_text(), f"{name} needs what lies around the folder"
            assert ".ipynb" not in re.sub(r"<code>.*?</code>|<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)


def test_the_museum_shows_each_run_to_mend_and_folds_what_one_takes_away(published):
    """Its story, its public sources, its lesson; the sentence stands in the exercise alone."""
    text = published["book/museum"].read_text()
    unfolded = html.unescape(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL))
    exhibits = [exercise for exercise in COURSE if exercise.text().takeaway]
    assert re.findall(r"<h2>(\d\d) ", text) == [exercise.id for exercise in exhibits] and len(exhibits) >= 7
    for exercise in exhibits:
        said = exercise.text().takeaway
        assert 15 <= len(said.split()) <= 45 and said.endswith(".") and ". " not in said, exercise.id
        assert said in html.unescape(text) and said not in unfolded, exercise.id
        shown = unfolded.split(f"<h2>{exercise.id} ")[1].split("<h2>")[0]
        assert f'href="{exercise.notebook}.html"' in shown and f"make check E={exercise.id}<" in shown
        assert re.findall(r'href="(https://[^"]+)', shown) == re.findall(r"https://[^\s,]+", exercise.text().about)
        assert " ".join(exercise.text().about.split("\n\n")[1].split()[:6]) in " ".join(shown.split()), exercise.id


def printed(cell):
    """What a cell has printed or shown as Markdown, without what is behind a click."""
    shown = [
        "".join(output.get("text", []) or output.get("data", {}).get("text/markdown", []))
        for output in cell.get("outputs", [])
    ]
    return re.sub(r"<details>.*?</details>", "", "\n".join(shown), flags=re.DOTALL)


def gives_away(text, exercise):
    """Does most of an exercise's reference stand in the text?"""
    body = stubs.reference(exercise).partition('"""\n')[2].splitlines() or stubs.reference(exercise).splitlines()[1:]
    lines = {line.split("  #")[0].strip() for line in body if len(line.strip()) > 12 and line.strip()[0] != "#"}
    return len([line for line in lines if line in text]) > 0.6 * len(lines)


def test_no_output_gives_an_answer_away():
    """In any rendering: what prints the reference of an exercise does so behind a click."""
    for name in NAMES:
        mine = [exercise for exercise in COURSE if exercise.notebook == name]
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]:
            hidden = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            assert not hidden, f"{name}: a hidden output is hidden in JupyterLab alone"
            given = [exercise.id for exercise in mine if gives_away(printed(cell), exercise)]
            assert not given, f"{name} shows the answer of {given} in {''.join(cell['source'])[:60]!r}"


def test_an_answer_that_stands_open_is_seen():
    exercise = find("zero1_step")
    cell = {"outputs": [{"data": {"text/markdown": [f"```python\n{stubs.reference(exercise)}\n```"]}}]}
    assert gives_away(printed(cell), exercise)
    cell["outputs"][0]["data"]["text/markdown"] = [answers.folded(stubs.reference(exercise)).data]
    assert not gives_away(printed(cell), exercise)


def test_slides_and_book_fold_what_answers_an_exercise(published):
    for kind in ("slides", "book"):
        for name in NAMES:
            text = published[f"{kind}/{name}"].read_text()
            unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
            assert "comm.send_recv(outgoing, right, incoming, left)" not in unfolded, name
    assert published["book/02b_zero_engines"].read_text().count("The listing answers an exercise") == 4


@in_a_browser
@pytest.mark.parametrize("of_slides", ["two files", pytest.param("all files", marks=pytest.mark.soak)])
def test_a_browser_opens_them(published, of_slides):
    """Each file of slides was opened when it was made, too, and then its scripts must have had no error."""
    moved = 0
    for name, path in published.items():
        one_of_two = name in ("slides/deck", "slides/01_collectives")
        if of_slides == "two files" and name.startswith("slides") and not one_of_two:
            continue
        found, console = opened(path, PROBE)
        assert not console, name
        assert found["broken"] == found["asleep"] == 0, f"{name}: {found}"
        assert found["wide"] <= 390, f"{name} scrolls sideways on a phone: {found}"
        assert found["sliders"] == found["moved"], f"{name}: {found}"
        moved += found["moved"]
        if name.startswith("slides"):
            assert found["slides"] >= 5 and found["at"] == 1, f"{name}: {found}"
    assert moved >= 2


@in_a_browser
def test_a_browser_finds_what_is_cut_off_or_too_small(tmp_path, monkeypatch):
    """Four slides: one that is right, one that is too long, one whose line is too wide, one with a small player."""
    from notebooks.tools import slides as tool

    right, long = "## A message\n\nShort.", "## A message\n\n" + "A line of text.\n\n" * 30
    drawn = [(draw(slide("markdown", text)), "notes") for text in (right, long)]
    drawn.append((draw(slide("code", "run()", title="A message", shown=["x" * 400])), "notes"))
    picture = "data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 width=%22400%22 height=%22300%22/>"
    player = f'<div class="animation"><img src="{picture}" style="max-width: 300px"></div>'
    drawn.append((f'<h2>A message</h2><div class="figure">{player}</div>', "notes"))
    path = tmp_path / "slides.html"
    path.write_text(tool.deck("Four", drawn))
    said = tool.look(path)
    assert any(re.fullmatch(r"slide 2: \d+ px of it lie below the screen", text) for text in said), said
    assert any(text.startswith("slide 3: its letters are") for text in said), said
    assert any(re.fullmatch(r"slide 4: its figure is 300 x \d+ px: too small for the last row", text) for text in said)
    assert not any(text.startswith("slide 1") for text in said), said


def test_a_page_of_the_book_has_numbers_contents_and_ways_on(published):
    index = published["book/index"].read_text()
    assert "`" not in index
    for at, name in enumerate(NAMES):
        text, title = published[f"book/{name}"].read_text(), title_of(read(FOLDER / f"{name}.ipynb"))
        assert f">{number_of(name)} · {title}" in html.unescape(text), name
        sections = re.findall(r'<h2 id="([^"]*)"', text)
        assert re.findall(r'<li><a href="#([^"]*)"', text) == sections, name
        assert text.count('<a href="index.html">') == 2 and text.count("<nav>") == 2, name
        assert at == 0 or text.count(f'href="{NAMES[at - 1]}.html">←') == 2, name
        row = re.search(rf"<tr><td>{number_of(name)}</td>.*?</tr>", index)[0]
        assert f'href="{name}.html"' in row and len(row.rpartition("<td>")[2]) > 20, name
        assert "VBox(" not in text, name


def test_every_notebook_ends_with_its_exercises():
    """The list of the course's exercises that belong to it; and its links lead somewhere."""
    for name in NAMES:
        cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
        ending = "".join(cells[-1]["source"])
        assert "## Exercises" in ending and ("## Sources" in ending or "## Next" in ending), name
        mine = [exercise for exercise in COURSE if exercise.notebook == name]
        listed = re.findall(r"^- (\d\d) (.+?)(?: ★)?$", ending, re.MULTILINE)
        assert listed == [(exercise.id, exercise.title) for exercise in mine], name
        texts = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\((?!http|attachment:)([^)#]+)\)", texts):
            assert (FOLDER / link).exists(), f"{name}: {link}"


def test_the_lecturers_page_adds_up():
    """Minutes of homework, a day and of the core; and of each notebook the slides and the whole lesson.

    Of a day's 90 minutes ten are for questions. Notebooks in parentheses are read at home.
    """
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    core = sum(exercise.minutes for exercise in COURSE if exercise.core)
    assert f"the core: {core} minutes" in text
    days = re.findall(r"^\| (\d) \| ([\d, b-d()]+) \| ([\d–, ]+): .*? \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    given, shown = [], []
    for day, present, numbers, minutes, of_core in days:
        parts = [list(map(int, part.split("–"))) for part in numbers.split(", ")]
        these = [exercise for exercise in COURSE for part in parts if part[0] <= exercise.number <= part[-1]]
        assert sum(exercise.minutes for exercise in these) == int(minutes), f"day {day}"
        assert sum(exercise.minutes for exercise in these if exercise.core) == int(of_core), f"day {day}"
        given += [exercise.number for exercise in these]
        shown += re.findall(r"\w+", present)
    assert sorted(given) == [exercise.number for exercise in COURSE]
    table = re.findall(r"^\| \[(\w+) .*?\]\((\w+)\.ipynb\) \| (\d+) \((\d+)\) \|", text, re.MULTILINE)
    assert [name for _, name, *_ in table] == NAMES and [number for number, *_ in table] == sorted(shown)
    slides_of = {number: int(minutes) for number, _, minutes, _ in table}
    for day, present, *_ in days:
        assert sum(slides_of[number] for number in re.findall(r"\w+(?![\w)])", present)) <= 80, f"day {day}"
    assert all(int(minutes) < int(whole) for *_, minutes, whole in table)
