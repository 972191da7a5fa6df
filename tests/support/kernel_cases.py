"""Operands, options and blocks for the Triton kernels. Import it only where Triton is installed."""

import contextlib
from unittest import mock

import torch

from flash import kernels, launch
from flash.checks import check

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"


def tensors(*shapes, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def options_of(q, k, v, **options):
    return check("test", q, k, v, **options).with_lengths(q.shape[2], k.shape[2])


def blocks_of(rows, keys):
    """All kernels with these blocks; on a GPU the table's."""
    if not kernels.INTERPRETED:
        return contextlib.nullcontext()
    return mock.patch.object(launch, "choose", lambda *_: launch.Blocks(rows, keys, 4, 1))
