"""For every test of this folder: the same bits in each run, and large tests have the card to themselves."""

import gc
import os

import pytest
import torch

from tests.gpu.device import CUDA, turn

# cuBLAS repeats its bits only if its workspace is fixed, before it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def the_card(request):
    """Other tests share the card, in workers of pytest-xdist, too; one that is marked `alone` waits for them to end."""
    with turn(alone=request.node.get_closest_marker("alone") is not None):
        yield
        gc.collect()
        if CUDA:  # what is kept in reserve, another worker's test may need
            torch.cuda.empty_cache()
