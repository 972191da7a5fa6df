"""Which kernel of attention a PyTorch for CUDA takes: its own functions are asked, on fake tensors, without a GPU.

`kernel_choice.cpp` makes it believe in a GPU, as long as a function of its decides. No kernel runs.

    LD_PRELOAD=kernel_choice.so python -m tests.support.kernel_choice kernel_choice.so     prints where an X-ray errs
"""

import ctypes
import itertools
import sys
from types import SimpleNamespace

import torch
from torch._subclasses import FakeTensorMode
from torch.backends import cuda

from minizero.xray.card import backend

GPUS = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(8, 8), (8, 2), (8, 1), (8, 3)]
SIZES = [(60, 60), (64, 64), (128, 128), (192, 128), (192, 192), (208, 208), (256, 256), (288, 288)]
KINDS = ["", "gqa", "gqa mask", "causal", "dropout", "no gradients"]
CASES = [*itertools.product(GPUS, DTYPES, HEADS, SIZES, KINDS)]


def arguments(dtype, heads, size, kind, device):
    """q, k, v, the mask, dropout's p, and whether it is causal, and whether heads may share keys."""
    shapes = (2, heads[0], 128, size[0]), (2, heads[1], 128, size[0]), (2, heads[1], 128, size[1])
    grad = "no gradients" not in kind
    qkv = [torch.empty(shape, dtype=dtype, device=device, requires_grad=grad) for shape in shapes]
    mask = torch.empty(2, heads[0], 128, 128, dtype=dtype, device=device) if "mask" in kind else None
    return *qkv, mask, 0.125 * ("dropout" in kind), "causal" in kind, "gqa" in kind


def taken(shim, gpu, *case):
    """The first kernel in PyTorch's order that can be used."""
    given = cuda.SDPAParams(*arguments(*case, "cuda"))
    order = [("cudnn", cuda.can_use_cudnn_attention)] * (gpu[0] in (9, 10))
    order += [("flash", cuda.can_use_flash_attention), ("efficient", cuda.can_use_efficient_attention)]
    shim.pretend(*gpu, 1)
    try:
        return next((name for name, possible in order if possible(given, False)), "math")
    finally:
        shim.pretend(0, 0, 0)


if __name__ == "__main__":
    with FakeTensorMode():
        shim = ctypes.CDLL(sys.argv[1])
        for gpu, *case in CASES:
            ours, theirs = backend(SimpleNamespace(capability=gpu), *arguments(*case, "meta")), taken(shim, gpu, *case)
            if ours != theirs:
                print(gpu, *case, f"ours: {ours}, PyTorch's: {theirs}")
