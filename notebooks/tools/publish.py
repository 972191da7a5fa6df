"""The notebooks as slides and as a book: `python -m notebooks.tools.publish slides` (or `book`).

Both are plain HTML files that open from disk with the network off: scripts, styles, pictures and formulas are inside.

    slides   a file for each notebook, from its cells marked "slide" (the field's usual `slideshow` metadata), and
             deck.html, 50 minutes from the cells that carry speaker `notes`, unless their `deck` says false;
             reveal.js, press S for the notes
    book     a page for each notebook, and a map

Code is folded on slides. In the book it stands open, except where it answers an exercise (`jupyter.source_hidden`,
`jupyter.outputs_hidden`, which fold it in JupyterLab too); a click opens it.
"""

import argparse
import html
import re
import sys
from functools import cache
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

FOLDER = Path(__file__).parents[1]
REVEAL = FOLDER.parent / "minizero" / "data" / "reveal"
DECK_SLIDES = 25
# The buttons of matplotlib's animations use a font from the web: here they are plain characters.
BUTTONS = {"minus": "−", "plus": "+", "play": "▶", "pause": "❚❚", "step-backward": "◁", "step-forward": "▷"}
BUTTONS |= {"fast-backward": "⏮", "fast-forward": "⏭"}
ICONS = "".join(f'.fa-{name}::before {{ content: "{sign}"; }}\n' for name, sign in BUTTONS.items())
ICONS += ".fa { font-style: normal; } .fa-flip-horizontal { display: inline-block; transform: scaleX(-1); }\n"
STYLE = """
body { font-family: Helvetica, Arial, sans-serif; line-height: 1.5; color: #222; max-width: 60em; margin: 2em auto;
       padding: 0 1em; }
pre { overflow-x: auto; line-height: 1.3; } img, svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1em 0; } th, td { border-bottom: 1px solid #ccc; padding: 0.3em 0.8em; }
div.highlight { background: #f6f6f6; padding: 0.1em 0.8em; border-left: 3px solid #0072B2; }
details { margin: 0.6em 0; } summary { cursor: pointer; color: #0072B2; }
.jp-InputPrompt, .jp-OutputPrompt, .anchor-link, .jp-Collapser { display: none; }
nav { display: flex; justify-content: space-between; border-bottom: 1px solid #ccc; padding-bottom: 0.5em; }
"""
SLIDE_STYLE = """
.reveal { font-size: 26px; } .reveal h1 { font-size: 1.9em; } .reveal h2 { font-size: 1.4em; }
.reveal h1, .reveal h2, .reveal h3 { text-transform: none; } .anchor-link { display: none; }
.reveal section { text-align: left; }
.reveal p, .reveal li { line-height: 1.35; } .reveal table { font-size: 0.75em; }
.reveal pre { width: 100%; font-size: 0.62em; box-shadow: none; max-height: 560px; overflow: auto; }
.reveal img, .reveal svg { max-height: 490px; max-width: 100%; }
"""


def read(path):
    """The notebook; each picture with words for who cannot see it: the cell's `alt`, or the heading above it."""
    notebook, heading = nbformat.read(path, as_version=4), path.stem
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = next(iter(re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)), heading)
        cell.metadata["heading"] = re.sub(r"^\d+\. ", "", heading)
        cell.metadata.setdefault("alt", f"Figure: {heading}")
    return notebook


def draw(cell, fold):
    """One cell as HTML. fold: code behind a click, also where it is nobody's answer."""
    if cell.cell_type == "markdown":
        return with_formulas(body(cell))
    hidden = cell.metadata.get("jupyter", {})
    code, figures = body(cell, exclude_output=True), [o for o in cell.outputs if "data" in o]
    if fold and figures:  # a slide has room for one: the animation, where there is one
        figures.sort(key=lambda output: "text/html" not in output.data)
        cell = nbformat.from_dict(dict(cell) | {"outputs": figures[:1]})
    shown = body(cell, exclude_input=True)
    if fold or hidden.get("source_hidden"):
        code = f"<details><summary>code</summary>{code}</details>"
    if hidden.get("outputs_hidden"):
        shown = f"<details><summary>answers an exercise: open it after yours</summary>{shown}</details>"
    alt = html.escape(cell.metadata["alt"], quote=True)
    shown = re.sub(r'(<img)(?: alt="[^"]*")?', rf'\1 alt="{alt}"', shown)
    if not fold:
        return code + shown
    said = html.escape(cell.metadata.get("notes", "").partition(". ")[0].rstrip("."))  # the first sentence stands there
    return f"<h3>{html.escape(cell.metadata['heading'])}</h3><p>{said}</p>{shown}{code}"


@cache
def exporter(**without):
    """What makes HTML of cells: it reads its templates once, which takes longer than a cell."""
    made = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True, **without)
    kinds = ["text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain"]  # no widgets: nothing runs them
    made.config.NbConvertBase.display_data_priority = kinds
    return made


def body(cell, **without):
    """What nbconvert makes of a cell, without a page around it."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.from_dict(dict(cell))])
    text = exporter(**without).from_notebook_node(notebook)[0]
    return re.sub(r'<link[^>]+href="https?:[^>]*>', "", text)


def with_formulas(text):
    """LaTeX between dollars becomes MathML, which browsers draw by themselves."""
    for dollars, display in ((r"\$\$(.+?)\$\$", "block"), (r"\$([^$\n]+?)\$", "inline")):
        text = re.sub(dollars, lambda m, d=display: convert(html.unescape(m[1]), display=d), text, flags=re.DOTALL)
    return text


def page(title, content, styles):
    """A whole HTML file."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{HtmlFormatter().get_style_defs(".highlight")}{ICONS}{styles}</style>'
        f"</head><body>{content}</body></html>\n"
    )


def title_of(notebook):
    """Its first heading."""
    return re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)[1]


def deck(title, slides):
    """A reveal.js file. slides: (HTML, speaker notes)."""
    sections = "".join(
        f"<section>{content}<aside class='notes'>{html.escape(notes)}</aside></section>" for content, notes in slides
    )
    files = {
        name: (REVEAL / name).read_text() for name in ("reset.css", "reveal.css", "white.css", "reveal.js", "notes.js")
    }
    styles = files["reset.css"] + files["reveal.css"] + files["white.css"] + SLIDE_STYLE
    start = "Reveal.initialize({hash: true, width: 1280, height: 720, margin: 0.03, plugins: [RevealNotes]});"
    scripts = "".join(f"<script>{code}</script>" for code in (files["reveal.js"], files["notes.js"], start))
    return page(title, f'<div class="reveal"><div class="slides">{sections}</div></div>{scripts}', styles=styles)


def slides(folder):
    """Write a file for each notebook, and deck.html; returns their paths."""
    talk, paths = [], []
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = read(path)
        marked = [c for c in notebook.cells if c.metadata.get("slideshow", {}).get("slide_type") == "slide"]
        drawn = [(draw(cell, fold=True), cell.metadata.get("notes", "")) for cell in marked]
        talk += [slide for slide, cell in zip(drawn, marked) if slide[1] and cell.metadata.get("deck", True)]
        paths.append(write(folder / f"{path.stem}.html", deck(title_of(notebook), drawn)))
    if len(talk) > DECK_SLIDES:
        raise ValueError(f"the deck has {len(talk)} slides, {DECK_SLIDES} fit into 50 minutes: take `notes` off some")
    return [*paths, write(folder / "deck.html", deck("How large models are trained in little memory", talk))]


def book(folder):
    """Write a page for each notebook, and index.html; returns their paths."""
    notebooks = {path.stem: read(path) for path in sorted(FOLDER.glob("*.ipynb"))}
    names, paths = list(notebooks), []
    for number, (name, notebook) in enumerate(notebooks.items()):
        before, after = names[number - 1] if number else "", names[number + 1] if number + 1 < len(names) else ""
        links = [
            f'<a href="{to}.html">{text}</a>' if to else "<span></span>"
            for to, text in ((before, "back"), (after, "on"))
        ]
        content = "".join(draw(cell, fold=False) for cell in notebook.cells)
        content = re.sub(r'href="(\d\d\w+)\.ipynb', r'href="\1.html', content)  # the others are pages here
        content = re.sub(r'href="\.\./', 'href="../../', content)  # the checkout, seen from results/book
        top = f'<nav>{links[0]}<a href="index.html">all</a>{links[1]}</nav>'
        paths.append(write(folder / f"{name}.html", page(title_of(notebook), top + content, styles=STYLE)))
    items = "".join(f'<li><a href="{name}.html">{title_of(notebook)}</a></li>' for name, notebook in notebooks.items())
    index = f"<h1>minizero</h1><p>How large models are trained in little memory.</p><ol start='0'>{items}</ol>"
    return [*paths, write(folder / "index.html", page("minizero", index, styles=STYLE))]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def main():
    parser = argparse.ArgumentParser(
        prog="python -m notebooks.tools.publish", description="Notebooks as slides, or as a book."
    )
    parser.add_argument("what", choices=["slides", "book"])
    parser.add_argument("--output", type=Path, help="default: results/slides, results/book")
    options = parser.parse_args()
    folder = options.output or FOLDER.parent / "results" / options.what
    for path in (slides if options.what == "slides" else book)(folder):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
