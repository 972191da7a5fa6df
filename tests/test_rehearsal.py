"""What is meant for GPUs mixes no devices: it runs on pretend ones. See tests/rehearsal."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Together, since each process takes seconds to start.
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
GROUPS = [["readme", "docstrings", "demo", "gpu"]]
# On a CPU each notebook runs in test_notebooks.py.
GROUPS += [pytest.param(names, marks=pytest.mark.soak) for names in (NOTEBOOKS[:5], NOTEBOOKS[5:10], NOTEBOOKS[10:])]


@pytest.mark.pretend
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("parts", GROUPS, ids=" ".join)
def test_nothing_mixes_devices(parts):
    command = [sys.executable, "-m", "tests.rehearsal", *parts]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
