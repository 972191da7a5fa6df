"""Softmax and batch norm of FP16 numbers in memory, with the arithmetic in FP32 or in FP16.

Both read and write every number once: if memory is what they wait for, arithmetic in FP32 costs next to nothing, as
Micikevicius et al., 2018, "Mixed Precision Training", section 3.3, say. Here each is one kernel, whose type of number
is all that differs.
"""

import torch

import flash  # noqa: F401  chooses Triton's interpreter where there is no GPU

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def softmax_kernel(x_ptr, y_ptr, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """One row: exp(x - max) / sum of exp(x - max)."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + place).to(TYPE)
    # A GPU has the exponential of float32 numbers only.
    p = tl.exp((x - tl.max(x, 0)).to(tl.float32)).to(TYPE)
    tl.store(y_ptr + place, (p / tl.sum(p, 0)).to(tl.float16))


@triton.jit
def batch_norm_kernel(x_ptr, y_ptr, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """One channel, whose values lie in a row: (x - mean) / sqrt(variance + 1e-5)."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + place).to(TYPE)
    # Divided first: the sum of so many FP16 numbers might be out of range.
    x = x - tl.sum((x / COLUMNS).to(TYPE), 0)
    variance = tl.sum((x * x / COLUMNS).to(TYPE), 0).to(tl.float32)
    tl.store(y_ptr + place, (x * (1 / tl.sqrt(variance + 1e-5)).to(TYPE)).to(tl.float16))


KERNELS = {"softmax": softmax_kernel, "batch norm": batch_norm_kernel}
TYPES = {"FP32": tl.float32, "FP16": tl.float16}


def run_kernel(name, arithmetic, x, y):
    """y = softmax or batch norm of the rows of x, (rows, columns), in FP16; columns: a power of 2."""
    warps = 8 if x.shape[1] >= 4096 else 4
    KERNELS[name][(x.shape[0],)](x, y, COLUMNS=x.shape[1], TYPE=TYPES[arithmetic], num_warps=warps)


def exact(name, x):
    """The same by PyTorch in float64."""
    x = x.double()
    if name == "softmax":
        return x.softmax(1)
    return (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def largest_error(name, arithmetic, x):
    """The largest difference from that."""
    y = torch.full_like(x, torch.nan)
    run_kernel(name, arithmetic, x, y)
    return (y.double() - exact(name, x)).abs().max().item()
