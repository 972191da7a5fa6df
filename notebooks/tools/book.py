"""A page for each notebook; index.html: a map with a sentence on each; museum.html: the exercises with a run to mend.

Code that prepares (imports) or draws is behind a click, and so is what answers an exercise (`jupyter.source_hidden`,
`jupyter.outputs_hidden`, which fold it in JupyterLab too). Sources that the text links, and guides beside the
notebooks, are pages here, so that the folder may be handed out alone.
"""

import re
from pathlib import Path

from notebooks.tools.cells import folded, highlight, number_of, outputs, page, read, title_of, words, write
from tests.exercises.course import COURSE

FOLDER = Path(__file__).parents[1]
PREPARES = re.compile(r"import |from |set_|plt\.rc|torch\.set_|display\(Markdown\(")
HOME = '<a href="index.html">all notebooks</a>'
STYLE = (Path(__file__).parent / "book.css").read_text(encoding="utf-8")


def book(folder):
    """Write the pages; returns their paths."""
    notebooks = {path.stem: read(path) for path in sorted(FOLDER.glob("*.ipynb"))}
    names, paths, sources = list(notebooks), [], set()

    def put(name, title, content):
        paths.append(write(folder / f"{name}.html", page(title, content, styles=STYLE)))

    def way_to(at, sign):
        name = names[at] if 0 <= at < len(names) else None
        words = f"{sign} {number_of(name)} {title_of(notebooks[name])}" if name else ""
        return f'<a href="{name}.html">{words}</a>' if name else "<span></span>"

    for at, (name, notebook) in enumerate(notebooks.items()):
        around = f"<nav>{way_to(at - 1, '←')}{HOME}{way_to(at + 1, '→')}</nav>"
        content = "".join(draw(cell) for cell in notebook.cells)
        content = content.replace(title_of(notebook), f"{number_of(name)} · {title_of(notebook)}", 1)
        content = content.replace("</h1>", f"</h1>{contents(content)}", 1)
        content = linked(content)
        sources |= set(re.findall(r'href="\.\./([\w/.]+)"', content))
        content = re.sub(r'href="\.\./([\w/.]+)"', r'href="source/\1.html"', content)
        put(name, f"{number_of(name)} {title_of(notebook)}", around + content + around)
    for guide in sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"}):
        text = guide.read_text(encoding="utf-8")
        put(guide.stem, text.partition("\n")[0].removeprefix("# "), f"<nav>{HOME}</nav>" + linked(wide(words(text))))
    for source in sorted(sources):
        text = highlight((FOLDER.parent / source).read_text(encoding="utf-8"))
        write(folder / "source" / f"{source}.html", page(source, f"<h1>{source}</h1>{text}", styles=STYLE))
    rows = "".join(
        f'<tr><td>{number_of(name)}</td><td><a href="{name}.html">{title_of(notebook)}</a></td><td>{said}</td></tr>'
        for (name, notebook), said in zip(notebooks.items(), sentences(names))
    )
    index = "<h1>minizero</h1><p>How large models are trained in little memory. What you can say after a notebook:</p>"
    index += f"<table class='map'>{rows}</table>"
    index += '<p><a href="museum.html">The museum</a>: training runs that looked healthy, and were not.</p>'
    put("museum", "The museum", museum(notebooks))
    put("index", "minizero", index)
    return paths


def museum(notebooks):
    """Each exercise with a bug to find: what happened, the sources, and, folded, the sentence that one takes away."""
    content = f"<nav>{HOME}</nav><h1>The museum</h1><p>Each of these runs looked healthy, and was not. "
    content += "Each happened to a well-known library. The exercise runs it on a laptop, shows the numbers that betray "
    content += "it, and asks for the line.</p>"
    for exercise in COURSE:
        text, name = exercise.text(), exercise.notebook
        if not text.takeaway:
            continue
        story = text.about.split("\n\n")[1]
        links = re.findall(r"https://[^\s,]+", text.about)
        sources = "".join(f' <a href="{link}">{source(link)}</a>' for link in links)
        content += (
            f"<h2>{exercise.id} · {exercise.title.removeprefix('Find the bug: ')}</h2>{words(story)}"
            f'<p><code>make check E={exercise.id}</code>, lesson <a href="{name}.html">{number_of(name)} '
            f"{title_of(notebooks[name])}</a>. Sources:{sources}</p>"
            + folded("what one takes away: open it after the exercise", words(text.takeaway))
        )
    return content


def source(link):
    """A short name of it: OLMo-core #828, or where the page is."""
    found = re.search(r"github\.com/[\w-]+/([\w.-]+)/(?:pull|issues)/(\d+)", link)
    return f"{found[1]} #{found[2]}" if found else link.split("/")[2]


def draw(cell):
    """A cell as HTML."""
    if cell.cell_type == "markdown":
        return wide(words(cell.source))
    if "setup" in cell.metadata.get("tags", []):  # it finds the packages, which a page does not need
        return ""
    hidden, shown = cell.metadata.get("jupyter", {}), "".join(outputs(cell))
    code = highlight(cell.source)
    if hidden.get("source_hidden") or PREPARES.match(cell.source) or 'class="figure"' in shown:
        code = folded("code", code)
    if hidden.get("outputs_hidden"):
        shown = folded("answers an exercise: open it after yours", shown)
    return code + wide(shown)


def wide(text):
    """A table that is wider than the screen scrolls alone."""
    return text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def linked(content):
    """The notebooks and guides that it links are pages here."""
    return re.sub(r'href="(\w+)\.(?:ipynb|md)', r'href="\1.html', content)


def contents(content):
    """The list of the page's sections."""
    found = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', content)
    return "<ul class='contents'>" + "".join(f'<li><a href="#{at}">{text}</a></li>' for at, text in found) + "</ul>"


def sentences(names):
    """What README.md's table says of each notebook."""
    rows = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", (FOLDER / "README.md").read_text(encoding="utf-8"))
    return [next(iter(re.findall(rf"\]\({name}\.ipynb\).*\| (.+?) \|$", rows, re.MULTILINE)), "") for name in names]
