"""The notebooks as slides and as a book: `python -m notebooks.tools.publish slides` (or `book`).

Both are plain HTML files that open from disk with the network off: scripts, styles, pictures and formulas are inside.

    slides   a file for each notebook, and deck.html, one lecture of 50 minutes; reveal.js, press S for the notes
    book     a page for each notebook, and a map

`slides` ends with exit status 1, and says which, if a slide is cut off, empty, or illegible from the last row, or if
the browser complains of one. What only a browser sees is looked at if Chromium is installed.
"""

import argparse
import sys
from pathlib import Path

from notebooks.tools.book import book
from notebooks.tools.slides import FOLDER, browser, slides


def main():
    parser = argparse.ArgumentParser(
        prog="python -m notebooks.tools.publish", description="Notebooks as slides, or as a book."
    )
    parser.add_argument("what", choices=["slides", "book"])
    parser.add_argument("--output", type=Path, help="default: results/slides, results/book")
    options = parser.parse_args()
    folder = options.output or FOLDER.parent / "results" / options.what
    paths, wrong = slides(folder) if options.what == "slides" else (book(folder), {})
    print(*paths, sep="\n")
    if options.what == "slides" and browser() is None:
        print("Chromium is not installed, so nobody has looked whether a slide is cut off.", file=sys.stderr)
    said = [f"{name}, {text}" for name, texts in wrong.items() for text in texts]
    print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
