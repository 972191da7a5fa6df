"""python -m tests.bench.gpu_notebooks: every notebook executed on this device, into the folder, with what it shows.

Four run at once, the longest first. A notebook notices a GPU by itself. Each cell runs, also after one that fails.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import nbformat

from notebooks.tools.card import card, machine
from notebooks.tools.run import FOLDER, execute
from tests.bench.gpu_tools import main

LONGEST_FIRST = ("09", "06", "05", "08", "07", "02")


def run_one(path, folder):
    """Seconds that it took. `RuntimeError` if a cell fails: its assertions are in the notebook."""
    start = time.perf_counter()
    notebook = execute(path, allow_errors=True)
    errors = [
        f"cell [{number}] {output.ename}: {output.evalue}"[:150]
        for number, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    found = machine()
    notebook.cells.append(nbformat.v4.new_markdown_cell(f"Executed on {card()}, torch {found['torch']}."))
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    if errors:
        raise RuntimeError("; ".join(errors).replace("\n", " "))
    return time.perf_counter() - start


def run(report, tiny):
    """Execute, and return the lines of the short table."""
    places = {number: place for place, number in enumerate(LONGEST_FIRST)}
    paths = sorted(FOLDER.glob("*.ipynb"), key=lambda path: (places.get(path.name[:2], len(places)), path.name))
    if tiny:  # one that shows whether this works at all
        cell = {"id": "a", "cell_type": "code", "source": "import torch; torch.ones(2).sum()", "outputs": []}
        small = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
        paths = [report.path.parent / "tiny.ipynb"]
        paths[0].write_text(json.dumps(small | {"cells": [cell | {"metadata": {}, "execution_count": None}]}))
    folder = report.path.parent / "notebooks"
    with ThreadPoolExecutor(4) as pool:
        spent = pool.map(lambda path: report.measure(path.stem, lambda: run_one(path, folder)), paths)
        each = dict(zip((path.stem for path in paths), spent))
    return [", ".join(f"{name} {seconds:.0f} s" for name, seconds in each.items() if seconds) or "none"]


if __name__ == "__main__":
    main("notebooks", __doc__, run)
