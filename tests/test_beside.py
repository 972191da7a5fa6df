"""A file of the user's that hides one of our packages is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("file", ["flash.py", "flash/__init__.py", "precision.py", "precision/__init__.py"])
def test_what_hides_a_package_is_named(file, tmp_path):
    start = ["-m", "minizero.xray", "--help"] if file.endswith("_.py") else ["-c", "import minizero"]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("number = 1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True)
    name = file.split("/")[0].removesuffix(".py")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: minizero needs its package {name}, in {ROOT / name}, but Python finds")
    assert str(tmp_path / file) in last and "another name" in last and done.returncode
