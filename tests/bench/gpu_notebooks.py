"""python -m tests.bench.gpu_notebooks: every notebook executed on this device, into the folder, with what it shows.

A notebook notices a GPU by itself. Those whose outputs say more than a CPU's are worth committing, with the card named.
"""

import json
import time

import nbformat

from notebooks.tools.card import card, machine
from notebooks.tools.run import FOLDER, execute
from tests.bench.gpu_tools import main


def run_one(path, folder):
    """Seconds that it took. Its assertions are in the notebook."""
    start = time.perf_counter()
    notebook = execute(path)
    found = machine()
    notebook.cells.append(nbformat.v4.new_markdown_cell(f"Executed on {card()}, torch {found['torch']}."))
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    return time.perf_counter() - start


def run(report, tiny):
    """Execute, and return the lines of the short table."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    if tiny:  # one that shows whether this works at all
        cell = {"id": "a", "cell_type": "code", "source": "import torch; torch.ones(2).sum()", "outputs": []}
        small = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
        paths = [report.path.parent / "tiny.ipynb"]
        paths[0].write_text(json.dumps(small | {"cells": [cell | {"metadata": {}, "execution_count": None}]}))
    folder = report.path.parent / "notebooks"
    each = {path.stem: report.measure(path.stem, lambda: run_one(path, folder)) for path in paths}  # noqa: B023
    return [", ".join(f"{name} {spent:.0f} s" for name, spent in each.items() if spent) or "none"]


if __name__ == "__main__":
    main("notebooks", __doc__, run)
