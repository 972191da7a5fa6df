"""The first code cell of every notebook (tag `setup`): it finds the packages wherever the notebook is opened.

A notebook is opened in a checkout with its environment, in a checkout without one, or alone in Colab. The cell finds
the packages, for itself and for the processes that it starts, installs them, or says in one line what to do. The
address to install from stands in pyproject.toml alone, as `Repository`; `python -m notebooks.tools.run` writes it into
the cells (with `--setup` it does nothing else).
"""

import json
import re
import tomllib
from pathlib import Path

import nbformat

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
NOBODY = "/OWNER/"  # stands in the address as long as nobody has published a copy

CELL = """\
# Finds the packages: those installed, or a checkout around it. In Colab it installs ADDRESS: run it first, and wait.
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ADDRESS = "{address}"  # from pyproject.toml; if it says OWNER, no copy is published
needed = {names}
places = [Path.cwd(), *Path.cwd().parents, Path.cwd() / "minizero"]
checkouts = [str(place) for place in places if (place / "minizero" / "cli.py").exists()]
sys.path += checkouts[:1]  # and for the processes that this one starts:
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*checkouts[:1], os.environ.get("PYTHONPATH")]))
if not checkouts and not find_spec("minizero") and "{nobody}" not in ADDRESS:
    print("Installing, which takes some minutes:", ADDRESS, flush=True)
    pip = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", ADDRESS], capture_output=True, text=True)
    print(pip.stderr[-2000:], file=sys.stderr, end="")
if missing := [name for name in needed if not find_spec(name)]:
    where = "In" if checkouts else "No copy is published that could be installed: open this notebook in"
    sys.exit(f"Not found: {{', '.join(missing)}}. {{where}} a checkout, with the kernel that `make setup` makes.")"""


def source():
    """The cell's text, with the address and the packages that pyproject.toml names."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    needed = [re.match(r"[\w-]+", package)[0] for package in project["dependencies"] if ";" not in package]
    names = json.dumps([project["name"], *needed, "ipywidgets"])  # the sliders of notebook 08
    return CELL.format(address="git+" + project["urls"]["Repository"], names=names, nobody=NOBODY)


def write(path):
    """Give the notebook at `path` today's setup cell, and leave the rest of the file as it is."""
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "setup" in cell.metadata.get("tags", []))
    if cell.source != source():
        cell.source = source()
        nbformat.write(notebook, path)
