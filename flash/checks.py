"""What attention accepts. Each error names the argument, what it was, what was expected, and what to do."""

import math
import numbers
from typing import Any

import torch

from flash.options import Options

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_HEAD_DIM = 256
NO_BOUND = 2**30  # a window this wide is no window: sums of positions stay inside 32 bits
PADDED = "(batch, heads, sequence, head dim)"
PACKED = "(total, heads, head dim)"


def check_tensors(name: str, q: Any, k: Any, v: Any, shape: str = PADDED) -> None:
    """`ValueError` (for dtypes `TypeError`) unless q, k and v have the dimensions of `shape`, and fit together."""
    dimensions = 4 if shape == PADDED else 3
    for letter, x in zip("qkv", (q, k, v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {letter} must be a tensor {shape}, not {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: {letter} is {x.dtype}; expected float16, bfloat16, float32 or float64: convert it first"
            )
        if x.dim() != dimensions:
            raise ValueError(f"{name}: {letter} has {x.dim()} dimensions, {tuple(x.shape)}; expected {shape}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {letter} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
        if x.device != q.device:
            raise ValueError(f"{name}: {letter} is on {x.device}, q is on {q.device}; all three must be on one device")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"{name}: head dimension of {letter} ({x.shape[-1]}) differs from q ({q.shape[-1]}); "
                f"q, {letter} must be {shape}"
            )
    if not 1 <= q.shape[-1] <= LARGEST_HEAD_DIM:
        raise ValueError(f"{name}: head dimension {q.shape[-1]}; expected 1 to {LARGEST_HEAD_DIM}")
    if dimensions == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{name}: batches differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}; must be {shape}")
    if k.shape != v.shape:
        raise ValueError(f"{name}: k is {tuple(k.shape)}, v is {tuple(v.shape)}; both must have the same {shape}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (heads == 0 or kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{name}: q has {heads} heads, k and v have {kv_heads}; the key/value heads must divide the query heads"
        )


def check(
    name: str, q: Any, k: Any, v: Any, causal: Any, scale: Any, window: Any, p: Any, seed: Any, shape: str = PADDED
) -> Options:
    """Check the arguments that all attention functions have, and return their options, still without lengths."""
    check_tensors(name, q, k, v, shape)
    scale = check_scale(name, scale, q.shape[-1])
    left, right, bottom_right = check_band(name, causal, window)
    dropout_p, seed = check_dropout(name, p, seed, q.device)
    return Options(scale, left, right, bottom_right, dropout_p, seed)


def check_scale(name: str, scale: Any, head_dim: int) -> float:
    """The scale as a float: 1 / sqrt(head dim) unless given."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"{name}: scale is {scale!r}; expected a finite number, or None for 1 / sqrt(head dim)")
    return float(scale)


def check_band(name: str, causal: Any, window: Any) -> tuple[int, int, bool]:
    """(left, right, bottom_right): causal and window as one band around the diagonal. -1: no bound on that side."""
    if isinstance(causal, torch.Tensor) or causal not in (True, False, "bottom-right"):
        raise ValueError(f"{name}: causal is {causal!r}; expected False, True (top-left) or 'bottom-right'")
    left, right = -1, -1
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"{name}: window is {window!r}; expected (left, right) or None")
        left, right = (_bound(name, window, side) for side in window)
    return left, 0 if causal else right, causal == "bottom-right"


def _bound(name: str, window: Any, side: Any) -> int:
    """One side of the window, -1 for none."""
    if side is None:
        return -1
    if isinstance(side, bool) or not isinstance(side, numbers.Integral) or side < 0:
        raise ValueError(
            f"{name}: window is {tuple(window)!r}; each side must be a whole number of at least 0, or None for no bound"
        )
    return int(side) if side < NO_BOUND else -1


def check_dropout(name: str, p: Any, seed: Any, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """(p, seed): the seed as an int64 tensor on `device`, drawn from torch's generator unless given; None if p is 0."""
    if isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0 <= float(p) < 1:
        raise ValueError(f"{name}: dropout_p is {p!r}; expected a number from 0 to below 1")
    if seed is not None:
        whole = isinstance(seed, numbers.Integral)
        if not whole or not -(2**63) <= seed < 2**63:
            raise ValueError(f"{name}: dropout_seed is {seed!r}; expected a whole number of 64 bits, or None")
    if p == 0:
        return 0.0, None
    if seed is None:
        return float(p), torch.randint(2**63 - 1, (), device=device)
    return float(p), torch.full((), seed, dtype=torch.int64, device=device)


def check_cu_seqlens(name: str, cu_seqlens: Any, letter: str, x: torch.Tensor) -> None:
    """Type, shape and device of cumulative lengths. Their values: `check_starts`, which waits for a GPU."""
    what = f"{name}: cu_seqlens_{letter}"
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{what} must be an int32 tensor, not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{what} is {cu_seqlens.dtype}; expected int32: use .int()")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"{what} has shape {tuple(cu_seqlens.shape)}; expected (sequences + 1,)")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{what} is on {cu_seqlens.device}, {letter} is on {x.device}; expected one device")


def check_starts(
    name: str, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, total_k: int
) -> tuple[list[int], list[int]]:
    """The values of the cumulative lengths as lists, checked against the rows that there are. Waits for a GPU."""
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        sequences = f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1} sequences"
        raise ValueError(f"{name}: cu_seqlens_q and cu_seqlens_k have {sequences}; expected the same number")
    both = []
    for letter, cu_seqlens, total in (("q", cu_seqlens_q, total_q), ("k", cu_seqlens_k, total_k)):
        starts, what = cu_seqlens.tolist(), f"{name}: cu_seqlens_{letter}"
        if starts[0] != 0:
            raise ValueError(f"{what} starts at {starts[0]}; expected 0")
        for number, (start, stop) in enumerate(zip(starts, starts[1:])):
            if stop < start:
                raise ValueError(
                    f"{what} decreases from {start} to {stop} at sequence {number}; expected sums of lengths"
                )
        if starts[-1] > total:
            raise ValueError(f"{what} ends at {starts[-1]}, but {letter} has {total} rows; expected at most that")
        both.append(starts)
    return both[0], both[1]


def check_backend(name: str, backend: Any) -> None:
    """`ValueError` unless there is such a backend."""
    if backend not in ("auto", "triton", "tiled"):
        raise ValueError(f"{name}: backend is {backend!r}; expected 'auto', 'triton' or 'tiled'")
