"""Cells of a notebook as HTML that needs no network: formulas are MathML, players have plain signs on their buttons."""

import html
import re
from urllib.parse import quote

import nbformat
from latex2mathml.converter import convert
from nbconvert.filters import Highlight2HTML, ansi2html, markdown2html
from pygments.formatters import HtmlFormatter

from minizero.pictures.clickable import plain_signs

highlight = Highlight2HTML(pygments_lexer="python")


def read(path):
    """The notebook; each picture with words for who cannot see it: the cell's `alt`, or the heading above it."""
    notebook, heading = nbformat.read(path, as_version=4), path.stem
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for name, picture in cell.get("attachments", {}).items():
                cell.source = cell.source.replace(f"attachment:{name}", as_address(*next(iter(picture.items()))))
            heading = next(iter(re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)), heading)
        cell.metadata["heading"] = re.sub(r"^\d+\. ", "", heading)
        cell.metadata.setdefault("alt", f"Figure: {cell.metadata['heading']}")
    return notebook


def title_of(notebook):
    """Its first heading."""
    return re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)[1]


def number_of(name):
    """02b, of 02b_zero_engines."""
    return name.partition("_")[0]


def words(text):
    """Markdown as HTML."""
    made = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    for dollars, display in ((r"\$\$(.+?)\$\$", "block"), (r"\$([^$\n]+?)\$", "inline")):
        made = re.sub(dollars, lambda m, d=display: convert(html.unescape(m[1]), display=d), made, flags=re.DOTALL)
    return made


def folded(summary, content):
    """Behind a click."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def outputs(cell):
    """What the cell shows, a piece of HTML for each output. A player stands for its own static picture."""
    shown = [shown_as(output, cell.metadata["alt"]) for output in cell.outputs]
    if any('class="animation"' in piece for piece in shown):
        shown = ["" if piece.startswith('<div class="figure"><img') else piece for piece in shown]
    joined = []  # lines that were printed one after the other are one block
    for piece in shown:
        if joined and piece.startswith("<pre>") and joined[-1].startswith("<pre>"):
            joined[-1] = joined[-1].removesuffix("</pre>") + piece.removeprefix("<pre>")
        else:
            joined.append(piece)
    return joined


def shown_as(output, alt):
    """One output as HTML. Widgets need a kernel: a sentence stands for them."""
    if output.output_type == "stream":
        return f"<pre>{ansi2html(output.text)}</pre>"
    if output.output_type == "error":
        return f"<pre>{html.escape(output.ename)}: {html.escape(output.evalue)}</pre>"
    kinds = output.data
    if any("widget-view" in kind for kind in kinds):
        return "<p>In the running notebook there are sliders here.</p>"
    if "text/html" in kinds:
        made = plain_signs(kinds["text/html"]).replace("<img ", f'<img alt="{html.escape(alt)}" ')
        return f'<div class="figure">{made}</div>'
    for kind in ("image/svg+xml", "image/png"):
        if kind in kinds:
            return f'<div class="figure"><img src="{as_address(kind, kinds[kind])}" alt="{html.escape(alt)}"></div>'
    if "text/markdown" in kinds:
        return words(kinds["text/markdown"])
    return f"<pre>{html.escape(kinds['text/plain'])}</pre>"


def as_address(kind, picture):
    """A picture inside of a page."""
    return f"data:{kind}," + quote(picture) if "svg" in kind else f"data:{kind};base64,{picture.strip()}"


def page(title, content, styles):
    """A whole HTML file."""
    colors = HtmlFormatter().get_style_defs(".highlight")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{colors}\n{styles}</style></head><body>{content}</body></html>\n"
    )


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
