"""The first code cell of a notebook: the same everywhere, with the address of pyproject.toml, and of use anywhere."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from notebooks.tools import setup_cell
from notebooks.tools.run import FOLDER

PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHERS = ["numpy", "torch", "matplotlib", "rich", "safetensors", "ipywidgets"]  # what else a notebook needs
NOWHERE = "https://127.0.0.1:9/minizero"  # a port at which nobody answers: as if there were no network


def package(folder: Path, *names: str) -> Path:
    """Empty packages in `folder`; of ours, with the file by which a checkout is known."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / "cli.py").touch()
    return folder


def opened(
    folder: Path, *found: str, repository: str = PROJECT["urls"]["Repository"], pip: str | None = None, then: str = ""
):
    """Run the cell in `folder` in a Python that has the empty packages `found`, and nothing of this machine's.

    pip: what `python -m pip` does, in place of the real one. then: what runs at the end.
    """
    site = folder.parent / "site"
    site.mkdir(exist_ok=True)
    package(site, *found)
    cell = setup_cell.source().replace(PROJECT["urls"]["Repository"], repository)
    if repository != PROJECT["urls"]["Repository"]:
        assert repository in cell
    environment = os.environ | {"SITE": str(site), "PIP_RETRIES": "0", "GIT_TERMINAL_PROMPT": "0"}
    if pip is not None:
        (folder.parent / "pip.py").write_text(pip)
        environment["PYTHONPATH"] = str(folder.parent)  # the cell's own Python is isolated (-I), its pip is not
    found = "import minizero; print(minizero.__file__, flush=True)"
    program = f"import sys; sys.path.append({str(site)!r})\n{cell}\n{found}{then}"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def says_one_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Not found: ") and "make setup" in line and len(line) < 200
    return line.removeprefix("Not found: ").partition(".")[0]


def test_every_notebook_has_it_first_with_the_address_of_pyproject():
    repository = PROJECT["urls"]["Repository"]
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        assert cells[0]["metadata"]["tags"] == ["setup"] and cells[0]["outputs"] == [], path.name
        assert cells[0]["metadata"]["jupyter"] == {"source_hidden": True}
        source = "".join(cells[0]["source"])
        assert f'ADDRESS = "git+{repository}"' in source, f"{path.name}: run python -m notebooks.tools.run --setup"
        assert source == setup_cell.source(), f"{path.name}: run python -m notebooks.tools.run --setup"
        assert repository not in "".join("".join(c["source"]) for c in cells[1:])
    assert len(source.splitlines()) <= 20
    needed = [f'"{name}"' for name in ("minizero", *OTHERS)]
    assert f"needed = [{', '.join(needed)}]" in source


def test_the_address_stands_in_one_file():
    repository, holders = PROJECT["urls"]["Repository"], []
    for pattern in ("*", "minizero/**/*.py", "notebooks/**/*.py", "notebooks/*.md", "tests/**/*.py"):
        for path in FOLDER.parent.glob(pattern):
            if path.is_file() and repository in path.read_text(encoding="utf-8", errors="ignore"):
                holders.append(path.name)
    assert holders == ["pyproject.toml"]


def test_the_tool_writes_the_cell_and_nothing_else(tmp_path):
    copy = tmp_path / "notebook.ipynb"
    text = (FOLDER / "03_fp16_bits.ipynb").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "ADDRESS =" in line)
    copy.write_text(text.replace(line, line.replace("git+", "git+https://elsewhere.org/")), encoding="utf-8")
    setup_cell.write(copy)
    assert copy.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("where", ["notebooks", ".", ".."])
def test_a_bare_checkout_is_found_and_by_a_process_that_the_notebook_starts(tmp_path, where):
    """Without an installation: from the folder of the notebooks, from the checkout, and from the folder around it."""
    checkout = package(tmp_path / "around" / "minizero", "minizero")
    (checkout / "notebooks").mkdir()
    child = "import minizero; print(minizero.__file__)"
    start = f"\nsubprocess.run([sys.executable, '-S', '-c', {child!r}], cwd={str(tmp_path)!r}, check=True)"
    done = opened((checkout / where).resolve(), *OTHERS, then=start)
    assert (done.returncode, done.stderr) == (0, "")
    ours, its = done.stdout.splitlines()
    assert ours == its and Path(ours).samefile(checkout / "minizero" / "__init__.py")


def test_a_bare_checkout_names_what_else_is_missing(tmp_path):
    checkout = package(tmp_path / "checkout", "minizero")
    done = opened(checkout, "numpy", "torch", "matplotlib")
    assert says_one_line(done) == "rich, safetensors, ipywidgets" and "published" not in done.stderr


NOT_RUN, UNSET = "open('../ran', 'w')", f"https://example.org{setup_cell.NOBODY}minizero"
INSTALLS = f"""import os, pathlib, sys
assert sys.argv[1:] == ['install', '--quiet', 'git+{NOWHERE}']
folder = pathlib.Path(os.environ['SITE'], 'minizero')
folder.mkdir()
(folder / '__init__.py').touch()
"""


@pytest.mark.parametrize(
    "found, repository, pip, says, fails",
    [
        (["minizero", *OTHERS], NOWHERE, NOT_RUN, "", ""),
        (OTHERS, UNSET, NOT_RUN, "", "No copy is published"),
        (OTHERS, NOWHERE, INSTALLS, "Installing, which takes some minutes", ""),
        pytest.param(OTHERS, NOWHERE, None, "Installing, which", "ERROR: |fatal: ", marks=pytest.mark.slow),
    ],
    ids=["what is installed is taken", "no address is one line", "an address is installed", "no network: pip says so"],
)
def test_elsewhere(found, repository, pip, says, fails, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = opened(tmp_path / "elsewhere", *found, repository=repository, pip=pip)
    assert done.stdout.startswith(says or ("" if fails else str(tmp_path / "site"))) and not (tmp_path / "ran").exists()
    assert re.search(fails, done.stderr) if fails else done.stderr == ""
    if fails:
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("Not found: minizero.")
        assert says or says_one_line(done) == "minizero"
    else:
        assert done.returncode == 0 and Path(done.stdout.splitlines()[-1]).parent == tmp_path / "site" / "minizero"
