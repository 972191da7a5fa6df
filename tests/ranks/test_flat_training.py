"""A flat script, as people have them, ends well under torchrun, and trains the same in each stage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_flat_script_trains_the_same_under_ddp_and_zero3_and_resumes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(ROOT / "tests" / "ranks" / "flat_training.py"), str(tmp_path), "DDP", "Zero3", "DDP:Zero3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*torchrun, *program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["Zero3"] == losses["DDP"] and losses["DDP"][-1] < losses["DDP"][0]
    assert losses["DDP:Zero3"] == losses["DDP"][2:], "as if it had not been interrupted"
