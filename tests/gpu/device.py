"""Where the tests of this folder run: on a CUDA GPU; with GPU_TESTS_ON=cpu on the CPU, small, to see that they work."""

import contextlib
import os
import tempfile

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRIED_ON_CPU = not CUDA and os.environ.get("GPU_TESTS_ON") == "cpu"

marks = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CUDA and not TRIED_ON_CPU, reason="needs a CUDA GPU; GPU_TESTS_ON=cpu tries it on the CPU"),
]


def size(on_gpu, on_cpu):
    """A size for the GPU; the other where the test is only tried."""
    return on_gpu if CUDA else on_cpu


def needs_gpu(reason):
    """For what has no counterpart on a CPU."""
    return pytest.mark.skipif(not CUDA, reason=f"needs a CUDA GPU: {reason}")


@contextlib.contextmanager
def turn(alone):
    """The time of one test: beside others, or alone on the card, whatever processes they run in."""
    if not CUDA or os.name != "posix":
        yield
        return
    import fcntl  # not on Windows

    with open(os.path.join(tempfile.gettempdir(), f"minizero-gpu-{os.getuid()}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
