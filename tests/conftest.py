"""Every test runs with one thread per rank: the same bits everywhere, and no crowd on few cores."""

import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# A shell lets the jobs in its background ignore Ctrl-C, and their children too, which are to hear it here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
