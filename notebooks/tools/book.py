"""A page for each notebook, and index.html: a map with a sentence on each.

Code that prepares (imports) or draws is behind a click, and so is what answers an exercise (`jupyter.source_hidden`,
`jupyter.outputs_hidden`, which fold it in JupyterLab too). Sources that the text links, and guides beside the
notebooks, are pages here, so that the folder may be handed out alone.
"""

import re
from pathlib import Path

from notebooks.tools.cells import highlight, number_of, outputs, page, read, title_of, words, write

FOLDER = Path(__file__).parents[1]
PREPARES = re.compile(r"import |from |set_|plt\.rc|torch\.set_|display\(Markdown\(")
STYLE = (Path(__file__).parent / "book.css").read_text(encoding="utf-8")


def book(folder):
    """Write the pages; returns their paths."""
    notebooks = {path.stem: read(path) for path in sorted(FOLDER.glob("*.ipynb"))}
    names, paths, sources = list(notebooks), [], set()
    for at, (name, notebook) in enumerate(notebooks.items()):
        links = ['<a href="index.html">all notebooks</a>'] + [
            f'<a href="{to}.html">{sign} {number_of(to)} {title_of(notebooks[to])}</a>' if to else "<span></span>"
            for to, sign in ((names[at - 1] if at else "", "←"), ("" if name == names[-1] else names[at + 1], "→"))
        ]
        around = f"<nav>{links[1]}{links[0]}{links[2]}</nav>"
        content = "".join(draw(cell) for cell in notebook.cells)
        content = content.replace(title_of(notebook), f"{number_of(name)} · {title_of(notebook)}", 1)
        content = content.replace("</h1>", f"</h1>{contents(content)}", 1)
        content = linked(content)
        sources |= set(re.findall(r'href="\.\./([\w/.]+)"', content))
        content = re.sub(r'href="\.\./([\w/.]+)"', r'href="source/\1.html"', content)
        title = f"{number_of(name)} {title_of(notebook)}"
        paths.append(write(folder / f"{name}.html", page(title, around + content + around, styles=STYLE)))
    for guide in sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"}):
        text = guide.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        content = '<nav><a href="index.html">all notebooks</a></nav>' + linked(wide(words(text)))
        paths.append(write(folder / f"{guide.stem}.html", page(title, content, styles=STYLE)))
    for source in sorted(sources):
        text = highlight((FOLDER.parent / source).read_text(encoding="utf-8"))
        write(folder / "source" / f"{source}.html", page(source, f"<h1>{source}</h1>{text}", styles=STYLE))
    rows = "".join(
        f'<tr><td>{number_of(name)}</td><td><a href="{name}.html">{title_of(notebook)}</a></td><td>{said}</td></tr>'
        for (name, notebook), said in zip(notebooks.items(), sentences(names))
    )
    index = "<h1>minizero</h1><p>How large models are trained in little memory. What you can say after a notebook:</p>"
    index += f"<table class='map'>{rows}</table>"
    return [*paths, write(folder / "index.html", page("minizero", index, styles=STYLE))]


def draw(cell):
    """A cell as HTML."""
    if cell.cell_type == "markdown":
        return wide(words(cell.source))
    if "setup" in cell.metadata.get("tags", []):  # it finds the packages, which a page does not need
        return ""
    hidden, shown = cell.metadata.get("jupyter", {}), "".join(outputs(cell))
    code = highlight(cell.source)
    if hidden.get("source_hidden") or PREPARES.match(cell.source) or 'class="figure"' in shown:
        code = f"<details><summary>code</summary>{code}</details>"
    if hidden.get("outputs_hidden"):
        shown = f"<details><summary>answers an exercise: open it after yours</summary>{shown}</details>"
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
    rows = (FOLDER / "README.md").read_text(encoding="utf-8")
    return [next(iter(re.findall(rf"\]\({name}\.ipynb\).*\| (.+?) \|$", rows, re.MULTILINE)), "") for name in names]
