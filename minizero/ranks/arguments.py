"""Arguments that a collective refuses before anything is sent: each check raises `ValueError`."""

from collections.abc import Collection

import torch
from torch import Tensor


def check_op(name: str, op: str, known: Collection[str], tensor: Tensor) -> None:
    """`op` must be one of `known`, and have a result in the tensor's dtype."""
    if op not in known:
        raise ValueError(f"{name}: unknown op {op!r}: use one of {', '.join(known)}")
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if is_float8 or tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise ValueError(f"{name}: PyTorch has no {op} of {tensor.dtype}: convert it, to float32 or int64 for example")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{name}: the mean of {tensor.dtype} is not one: use op='sum', or a floating dtype")


def as_summand(op: str, tensor: Tensor) -> Tensor:
    """The tensor, in int64 if a sum of its small integers would wrap (four times 100 in uint8) or be an "or" (bool)."""
    small = not tensor.is_floating_point() and tensor.dtype.itemsize <= 2
    return tensor.long() if op == "sum" and small else tensor


def check_out(name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`out`, if given, must have the shape and the dtype of the result."""
    if out is not None and (out.shape != shape or out.dtype != dtype):
        raise ValueError(f"{name}: out must be {shape} of {dtype}, not {tuple(out.shape)} of {out.dtype}")


def check_dimension(name: str, tensor: Tensor, ranks: int = 1) -> None:
    """The tensor must have a dimension 0, which `ranks` divides."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: needs a tensor with a dimension 0 to cut along: use tensor.reshape(1)")
    if tensor.shape[0] % ranks:
        raise ValueError(
            f"{name}: {ranks} ranks do not divide dimension 0 of shape {tuple(tensor.shape)}: "
            f"pad it with minizero.engines.layout.pad(tensor, {ranks})"
        )
