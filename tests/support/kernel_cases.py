"""Operands, options and blocks for the Triton kernels. Import it only where Triton is installed."""

import contextlib
from unittest import mock

import torch

from flash import kernels, launch
from tests.support import flash_cases

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"


def tensors(*shapes, dtype=torch.float32, seed=1):
    return [x.to(DEVICE, dtype) for x in flash_cases.tensors(*shapes, seed=seed)]


def blocks_of(rows, keys):
    """All kernels with these blocks; on a GPU the table's."""
    if not kernels.INTERPRETED:
        return contextlib.nullcontext()
    return mock.patch.object(launch, "choose", lambda *_: launch.Blocks(rows, keys, 4, 1))
