"""Slides and book: complete, alone, folded where they answer an exercise, and alive in a real browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from notebooks.tools.publish import DECK_SLIDES, FOLDER, book, slides
from tests.exercises.course import COURSE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.slow

# Runs in the page when it has loaded, and leaves what it saw in the document.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
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
  const found = {broken, images: document.images.length, sliders: sliders.length, moved, slides, at};
  document.documentElement.dataset.probe = JSON.stringify(found);
}, 500));</script>"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Every file by its name, slides and book."""
    folder = tmp_path_factory.mktemp("published")
    paths = [*slides(folder / "slides"), *book(folder / "book")]
    return {f"{path.parent.name}/{path.stem}": path for path in paths}


def test_there_is_a_file_for_each_notebook_and_one_deck(published):
    assert sorted(published) == sorted(
        [f"{kind}/{name}" for kind in ("slides", "book") for name in NAMES] + ["slides/deck", "book/index"]
    )
    text = published["slides/deck"].read_text()
    notes = re.findall(r"<aside class='notes'>(.*?)</aside>", text, re.DOTALL)
    assert 15 <= len(notes) <= DECK_SLIDES and all(len(note) > 40 for note in notes)


def test_the_deck_leaves_out_what_says_so(published):
    """A notebook's own slides have all its notes, the deck those of no cell whose `deck` is false."""
    deck, left_out = published["slides/deck"].read_text(), 0
    for name in NAMES:
        own = published[f"slides/{name}"].read_text()
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]:
            if cell["metadata"].get("deck") is False and "slideshow" in cell["metadata"]:
                note = f"<aside class='notes'>{html.escape(cell['metadata']['notes'])}</aside>"
                assert note in own and note not in deck, f"{name}: {note}"
                left_out += 1
    assert left_out > 10


def test_nothing_is_fetched_and_every_picture_has_words(published):
    for name, path in published.items():
        text = re.sub(r"<script>.*?</script>", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//', text), name
        assert "@import" not in text
        images = re.findall(r"<img[^>]*>", text)
        assert all(re.search(r'alt="[^"]{8,}"', image) for image in images), name
        assert name.startswith("slides") or name.endswith("index") or images or "<pre" in text


def test_links_inside_the_book_lead_somewhere(published):
    for name, path in published.items():
        if name.startswith("book"):
            for link in re.findall(r'href="([\w./-]+\.html)', path.read_text()):
                assert (path.parent / link).exists(), f"{name}: {link}"
            assert ".ipynb" not in re.sub(r"<code>.*?</code>|<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)


def test_what_answers_an_exercise_is_folded(published):
    """In notebooks the output that shows source is hidden until it is opened; in slides and book it is, too."""
    shown = 0
    for name in NAMES:
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]:
            outputs = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
            folded = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            if len(re.findall(r"^\s*(?:def |class |@triton)", outputs, re.MULTILINE)) and "return" in outputs:
                assert folded, f"{name}: {outputs[:60]}"
            shown += folded
    assert shown >= 4
    for kind in ("slides", "book"):
        for name in NAMES:
            text = published[f"{kind}/{name}"].read_text()
            unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
            assert "comm.send_recv(outgoing, right, incoming, left)" not in unfolded, name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: it opens the pages as a reader would")
def test_a_browser_opens_them_all(published, tmp_path):
    moved = 0
    for name, path in published.items():
        probed = tmp_path / f"{name.replace('/', '-')}.html"
        probed.write_text(PROBE.join(path.read_text().rsplit("</body>", 1)))
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--dump-dom"]
        done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=600, check=False)
        assert not re.findall(r"CONSOLE.*", done.stderr), name
        found = json.loads(re.search(r'data-probe="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
        assert found["broken"] == 0, f"{name}: {found}"
        assert found["sliders"] == found["moved"], f"{name}: {found}"
        moved += found["moved"]
        if name.startswith("slides"):
            assert found["slides"] >= 5 and found["at"] == 1, f"{name}: {found}"
    assert moved >= 2


def test_every_notebook_ends_with_its_exercises():
    """The list of the course's exercises that belong to it; and its links lead somewhere."""
    for name in NAMES:
        cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
        ending = "".join(cells[-1]["source"])
        assert "## Exercises" in ending and ("## Sources" in ending or "## Next" in ending), name
        mine = [exercise for exercise in COURSE if exercise.notebook == name]
        listed = re.findall(r"^- (\d\d) (.+?)(?: ★)?$", ending, re.MULTILINE)
        assert listed == [(exercise.id, exercise.title) for exercise in mine], name
        for link in re.findall(
            r"\]\((?!http)([^)#]+)\)", "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        ):
            assert (FOLDER / link).exists(), f"{name}: {link}"
