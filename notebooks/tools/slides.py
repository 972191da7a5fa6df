"""Slides from the cells that are marked "slide", a file for each notebook; and deck.html, one lecture of 50 minutes.

What a slide shows and what is said to it stands in the metadata of its cell:

    slideshow   {"slide_type": "slide"}, the mark
    title       the message, a short sentence
    text        what stands under it, in Markdown; if it is missing, a text cell's own text
    outputs     which outputs of a code cell it shows, by their numbers; if it is missing, all
    code        true: the cell's code stands there, too
    notes       what the lecturer says
    deck        true: it belongs to the lecture; "part": and opens a part of it

In the lecture the first cell of a notebook opens a part, too, and the agenda names it. Title and agenda are in
opening.md. The notes of the lecture begin with the minute at which their slide comes, by the words before it.
"""

import functools
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from notebooks.tools.cells import folded, highlight, number_of, outputs, page, read, title_of, words, write

FOLDER = Path(__file__).parents[1]
REVEAL = FOLDER.parent / "minizero" / "data" / "reveal"
STYLE = (Path(__file__).parent / "slides.css").read_text(encoding="utf-8")
MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")
OPENING = Path(__file__).parent / "opening.md"
DECK_SLIDES, DECK_MINUTES = 25, 45  # and five for questions
NOTHING = "<p>no such output</p>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def slides(folder):
    """Write the files. Returns their paths, and what is wrong with the slides, by notebook, in words."""
    talk, paths, wrong = [], [], {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = read(path)
        marked = [c for c in notebook.cells if c.metadata.get("slideshow", {}).get("slide_type") == "slide"]
        drawn = [(draw(cell), cell.metadata.get("notes", "")) for cell in marked]
        wrong[path.stem] = [f"slide {at}: {said}" for at, slide in enumerate(drawn, 1) for said in faults(*slide)]
        for cell, slide in zip(marked, drawn):
            if cell.metadata.get("deck"):
                opens = cell is notebook.cells[0] or cell.metadata["deck"] == "part"
                talk.append((opens, path.stem, *slide))
        paths.append(write(folder / f"{path.stem}.html", deck(title_of(notebook), drawn)))
    everything, wrong["deck"] = lecture(talk), []
    if len(everything) > DECK_SLIDES:
        too_many = f"it has {len(everything)} slides, {DECK_SLIDES} fit into 50 minutes: take `deck` off some"
        wrong["deck"].append(too_many)
    paths.append(write(folder / "deck.html", deck("How large models are trained in little memory", everything)))
    for path in paths:
        wrong[path.stem] += look(path)
    return paths, wrong


def draw(cell):
    """A slide: its title, its text, what its cell has shown."""
    title, text, figures = cell.metadata.get("title"), cell.metadata.get("text"), []
    if cell.cell_type == "markdown" and text is None:
        heading, _, rest = re.match(r"(?:#+ ([^\n]+))?(\n*)(.*)", cell.source, re.DOTALL).groups()
        title, text = title or heading, rest
    if cell.cell_type == "code":
        figures, chosen = outputs(cell), cell.metadata.get("outputs")
        figures = figures if chosen is None else [dict(enumerate(figures)).get(n, NOTHING) for n in chosen]
        if cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            figures = [folded("answers an exercise", "".join(figures))]
        if cell.metadata.get("code"):
            figures = [highlight(cell.source), *figures]
        title = title or cell.metadata.get("notes", "").partition(". ")[0].rstrip(".") or cell.metadata["heading"]
        if not any("<img" in figure for figure in figures):
            figures = fitting(figures)
    head = words(f"## {title or ''}")
    return f"{head}<div class='words{'' if figures else ' alone'}'>{words(text or '')}</div>{''.join(figures)}"


def fitting(pieces):
    """Code and printed lines, in letters as large as the slide allows."""
    lines = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(pieces))).splitlines() or [""]
    size = min(30, 1130 / 0.61 / max(1, *map(len, lines)), 500 / 1.4 / len(lines))
    return [piece.replace("<pre>", f'<pre style="font-size: {size:.1f}px">') for piece in pieces]


def faults(slide, notes):
    """What can be seen without a browser."""
    title, _, rest = slide.partition("</h2>")
    text = re.sub(r"<[^>]+>|\s+", " ", rest).strip()
    if not re.sub(r"<[^>]+>", "", title).strip():
        yield "it has no title"
    if not text and "<img" not in rest:
        yield "it has a title and nothing else"
    if text.endswith(":") and "<img" not in rest:
        yield f"it announces what does not come: {text[-60:]}"
    if "there are sliders here" in rest:
        yield "it shows widgets, which need a kernel"
    if NOTHING in rest:
        yield "`outputs` names one that its cell has not"
    if not notes:
        yield "it has no notes"


def lecture(talk):
    """All slides of the lecture, HTML and notes, from (opens a part, its notebook's name, HTML, notes)."""
    parts = [(name, re.search(r"<h2[^>]*>(.*?)</h2>", slide)[1]) for opens, name, slide, _ in talk if opens]
    agenda = "".join(f"<tr><td>{name.replace('_', ' ')}</td><td>{title}</td></tr>" for name, title in parts)
    everything = []
    for opening in OPENING.read_text(encoding="utf-8").split("\n---\n"):
        text, _, notes = opening.partition("\nNotes:")
        shown = words(text).replace("<p>AGENDA</p>", f"<table class='agenda'>{agenda}</table>")
        everything.append((f"<div class='words alone'>{shown}</div>", notes.strip()))
    done = 0
    for opens, name, slide, notes in talk:
        done += opens
        mark = f"<p class='part'>Part {done} of {len(parts)} · notebook {number_of(name)}</p>" if opens else ""
        everything.append((mark + slide, notes))
    counts = [len(notes.split()) for _, notes in everything]
    minutes = [round(DECK_MINUTES * sum(counts[:at]) / sum(counts)) for at in range(len(counts))]
    return [(slide, f"[{minute}:00] {notes}") for minute, (slide, notes) in zip(minutes, everything)]


def deck(title, drawn):
    """A reveal.js file. drawn: (HTML, speaker notes)."""
    sections = ""
    for content, notes in drawn:
        kind = "slide quiet" if "alone" in content else "slide"  # words alone may be larger
        sections += f'<section><div class="{kind}">{content}</div>'
        sections += f'<aside class="notes">{html.escape(notes)}</aside></section>'
    names = ("reset.css", "reveal.css", "white.css", "reveal.js", "notes.js")
    files = {name: (REVEAL / name).read_text(encoding="utf-8") for name in names}
    styles = files["reset.css"] + files["reveal.css"] + files["white.css"] + STYLE
    start = "Reveal.initialize({hash: true, slideNumber: true, width: 1280, height: 720, margin: 0, center: false, "
    start += "transition: 'none', plugins: [RevealNotes]});"
    scripts = "".join(f"<script>{code}</script>" for code in (files["reveal.js"], files["notes.js"], start))
    return page(title, f'<div class="reveal"><div class="slides">{sections}</div></div>{scripts}', styles=styles)


def browser():
    """Chromium, if this machine has it."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@functools.cache
def profile():
    """A folder for the browser: to fill a new one takes it up to half a second a page."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def opened(path, script):
    """What the page's `data-probe` says after `script` has run in it, and what the browser's console says."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        text = path.read_text(encoding="utf-8").rpartition("</body>")
        copy.write_text(f"{text[0]}<script>{script}</script>{text[1]}{text[2]}", encoding="utf-8")
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        command += [f"--user-data-dir={profile().name}", "--window-size=1280,720", "--virtual-time-budget=8000"]
        command += ["--dump-dom", copy.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    return json.loads(html.unescape(found[1])) if found else None, re.findall(r"CONSOLE.*", done.stderr)


def look(path):
    """What only a browser can see: text below the screen, cut lines, small figures; and what its console says.

    Empty if there is no browser.
    """
    if browser() is None:
        return []
    found, console = opened(path, MEASURE)
    return [f"slide {at}: {said}" for at, said in found] + [f"the browser says: {line}" for line in console]
