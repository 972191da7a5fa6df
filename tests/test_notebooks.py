"""Every notebook runs, is committed as executed, is small, and says nothing of the machine it ran on."""

import json
import re
from pathlib import Path

import pytest

from notebooks.tools.run import FOLDER, execute

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# A home, a checkout, a temporary folder, an installed package: places that exist on one machine only.
PLACES = re.compile(
    rf"/home/|{re.escape(str(Path.home()))}/|/Users/|/tmp/|site-packages|\.venv|{re.escape(str(FOLDER.parent))}"
)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    execute(path)  # the assertions are in the notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_outputs(path):
    text = path.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in enumerate(cells, 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert len(text) < 2**20
    assert not PLACES.search(text)
