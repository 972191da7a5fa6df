"""`make portable` tries what it says it tries."""

import os
import subprocess
import sys

import pytest

from tests import portable


@pytest.mark.slow
@pytest.mark.skipif(portable.openblas_core() == "", reason="this NumPy has no OpenBLAS to choose from")
def test_a_setting_without_effect_is_named():
    """OpenBLAS, as the others, ignores a value that it does not know."""
    command = [sys.executable, "-c", "from tests.portable import check; check()"]
    for core, words in (("Haswell", ""), ("Abacus", "OPENBLAS_CORETYPE=Abacus, but OpenBLAS computes as on ")):
        environment = os.environ | {"OPENBLAS_CORETYPE": core, "ATEN_CPU_CAPABILITY": "default"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert (done.returncode != 0) == bool(words) and words in done.stderr, done.stderr


@pytest.mark.slow
def test_no_test_to_run_is_an_error():
    """Its selection cannot become empty unseen: of a file without numbers nothing is left."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", portable.MARKS, "tests/simulate/test_cli.py"]
    assert subprocess.run(command, capture_output=True, timeout=600).returncode == pytest.ExitCode.NO_TESTS_COLLECTED
